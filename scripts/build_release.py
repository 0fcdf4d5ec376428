"""Builds the sdist of a source tree, and the wheel from that sdist alone, and checks what both hold.

    python -m scripts.build_release TREE OUT

They hold the packages ferrum_jax, pallas_kernels and checkpoints, the license and the files that describe them; no
tests, no scripts and no model. Raises ValueError for anything else.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

PACKAGES = ("ferrum_jax", "pallas_kernels", "checkpoints")
BESIDE = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg")


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """(sdist, wheel) in `out`, both checked. The links of the tree's README become absolute, for an index shows it."""
    out.mkdir(parents=True, exist_ok=True)
    readme = tree / "README.md"
    readme.write_text(absolute_links(readme.read_text(), repository(tree)))
    sdist = out / _run_backend(tree, "build_sdist", out)
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (root,) = Path(unpacked).iterdir()
        names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        check(sdist.name, [name for name in names if ".egg-info/" not in name], BESIDE, tree)
        wheel = out / _run_backend(root, "build_wheel", out)
    names = zipfile.ZipFile(wheel).namelist()
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    if f"{info}/licenses/LICENSE" not in names:
        raise ValueError(f"{wheel.name} lacks its license")
    check(wheel.name, [name for name in names if not name.startswith(f"{info}/")], (), tree)
    return sdist, wheel


def check(archive: str, names: list[str], beside: tuple[str, ...], tree: Path) -> None:
    """Raises ValueError unless the names are exactly the packages' modules and data, and any of `beside`."""
    data = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    paths = [path for name in PACKAGES for path in (tree / name).rglob("*.py")]
    paths += [p for package, globs in data.items() for g in globs for p in (tree / package.replace(".", "/")).glob(g)]
    ours = {path.relative_to(tree).as_posix() for path in paths}
    more, missing = sorted({*names} - ours - {*beside}), sorted(ours - {*names})
    if more or missing:
        raise ValueError(f"{archive} has the wrong files: it also holds {more or 'nothing'}, lacks {missing}")


def repository(tree: Path) -> str:
    """The address of the repository, as pyproject.toml has it."""
    return tomllib.loads((tree / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def absolute_links(markdown: str, place: str) -> str:
    """The text with its links and pictures at the repository, on the main branch."""
    return re.sub(
        r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)",
        lambda found: f"{found[1]}[{found[2]}]({place}/{'raw' if found[1] else 'blob'}/main/{found[3]})",
        markdown,
    )


def _run_backend(tree: Path, what: str, out: Path) -> str:
    """The name of the file that setuptools makes of the tree."""
    program = f"from setuptools import build_meta; print(build_meta.{what}({str(out.resolve())!r}))"
    run = [sys.executable, "-c", program]
    done = subprocess.run(
        run, cwd=tree, capture_output=True, text=True, env=os.environ | {"SOURCE_DATE_EPOCH": "315532800"}
    )
    if done.returncode:
        raise ValueError(f"setuptools could not {what}:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, metavar="TREE", help="folder of the sources")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for both files")
    args = parser.parse_args()
    for path in build(args.tree, args.out):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
