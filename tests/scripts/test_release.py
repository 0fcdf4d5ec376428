"""What is released: the wheel and the sdist hold the packages and no more, and the wheel answers from anywhere.

The state of a checkout, also of what is none.

scripts/setup_venv.sh keeps an environment that works, with the Python that it was made with.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ferrum_jax
from ferrum_jax.__main__ import main
from scripts.build_release import PACKAGES, absolute_links, build, check, repository
from scripts.git_state import git_state
from tests.support import COMPILED, ROOT, written_by

VERSIONS = rf"ferrum-jax {re.escape(ferrum_jax.__version__)} \(jax [\d.]+, jaxlib [\d.]+, Python [\d.]+\)\n"


def test_version_names_those_of_jax_and_python_too(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and re.fullmatch(VERSIONS, capsys.readouterr().out)


def test_the_package_is_a_program_and_prints_its_version_without_loading_jax():
    program = [sys.executable, "-X", "importtime", "-m", "ferrum_jax", "--version"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(VERSIONS, done.stdout)
    assert not re.search(r"\| +jax$", done.stderr, re.MULTILINE)


def test_the_changelog_begins_with_what_is_not_released_and_then_has_the_version():
    sections = re.findall(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())
    assert sections[0] == "Unreleased" or sections[0] == ferrum_jax.__version__


def test_a_file_that_does_not_belong_is_named(tmp_path):
    (tmp_path / "ferrum_jax").mkdir()
    for name in ("a.py", "sizes.json", "notes.txt"):
        (tmp_path / "ferrum_jax" / name).touch()
    (tmp_path / "pyproject.toml").write_text('[tool.setuptools.package-data]\nferrum_jax = ["*.json"]\n')
    check("wheel", ["ferrum_jax/a.py", "ferrum_jax/sizes.json"], (), tmp_path)
    with pytest.raises(ValueError, match=r"holds \['ferrum_jax/notes.txt'\], lacks \[\]"):
        check("wheel", ["ferrum_jax/a.py", "ferrum_jax/sizes.json", "ferrum_jax/notes.txt"], (), tmp_path)
    with pytest.raises(
        ValueError, match=r"holds \['tests/b.py'\], lacks \['ferrum_jax/a.py', 'ferrum_jax/sizes.json'\]"
    ):
        check("wheel", ["tests/b.py"], (), tmp_path)


@pytest.mark.slow
def test_the_wheel_holds_the_packages_alone_and_answers_with_the_demos_model(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="an older one cannot build what pip installs")
    tree, site = tmp_path / "tree", tmp_path / "site"
    for name in written_by(["git", "ls-files"]).splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    _, wheel = build(tree, tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == set(PACKAGES)
    found = run(tmp_path, site, "-c", "import ferrum_jax, pallas_kernels, checkpoints; print(ferrum_jax.__file__)")
    assert Path(found.strip()).is_relative_to(site)
    engine = ["--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    small = [*engine, "--max-tokens", "8", "--temperature", "0"]
    command = ["-m", "ferrum_jax", "generate", "--model", str(ROOT / "checkpoints/demo"), *small]
    assert run(
        tmp_path, site, *command, "--compilation-cache-dir", str(COMPILED), "    def __eq__(self, other):"
    ).strip()


def run(folder: Path, site: Path, *command: str) -> str:
    """What a program prints that finds the packages in `site`."""
    environment = os.environ | {"PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
    return written_by([sys.executable, *command], cwd=folder, env=environment)


def test_the_readme_that_an_index_shows_has_no_relative_link():
    shown = absolute_links((ROOT / "README.md").read_text(), repository(ROOT))
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(links) > 10 and all(link.startswith("https://") for link in links)
    (picture,) = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", shown)
    assert picture.startswith(f"{repository(ROOT)}/raw/main/docs/pictures/")


def test_a_commit_and_changes_to_it_are_told(tmp_path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    git("init")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "one")
    clean = git_state(tmp_path)
    assert len(str(clean["git"])) >= 7 and clean["dirty"] is False
    (tmp_path / "file").touch()
    assert git_state(tmp_path) == {**clean, "dirty": True}


def test_where_there_is_no_checkout_nothing_is_known(tmp_path, monkeypatch):
    assert git_state(tmp_path) == {"git": None, "dirty": None}
    monkeypatch.setenv("PATH", str(tmp_path))  # nor git
    assert git_state(tmp_path) == {"git": None, "dirty": None}


# As much of an interpreter as the script asks for.
FAKE = """#!/usr/bin/env bash
case "$*" in
    --version) echo "Python {version}" ;;
    *base_executable*) echo {path} ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""


@pytest.fixture
def tree(tmp_path) -> Path:
    """A checkout with an environment of Python 3.12, and 3.11 as the machine's python3."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup_venv.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("a\n")
    for name, version in (("python3", "3.11.7"), ("python3.12", "3.12.3")):
        (tmp_path / name).write_text(FAKE.format(version=version, path=tmp_path / name))
        (tmp_path / name).chmod(0o755)
    set_up(tmp_path, PYTHON="python3.12")
    (tmp_path / ".venv/mine").touch()
    return tmp_path


def set_up(tree: Path, **environment: str) -> str:
    """The version of the environment after the script."""
    ours = {"PATH": f"{tree}:{os.environ['PATH']}", "EXTRAS": "test", **environment}
    program = 'set -euo pipefail; source scripts/setup_venv.sh; "$venv/bin/python" --version'
    return written_by(["bash", "-c", program], cwd=tree, env=ours).splitlines()[-1]


def test_an_environment_that_works_is_kept_though_python3_is_another(tree):
    assert set_up(tree) == "Python 3.12.3" and (tree / ".venv/mine").exists()


def test_a_python_that_is_named_makes_the_environment_anew(tree):
    assert set_up(tree, PYTHON="python3") == "Python 3.11.7" and not (tree / ".venv/mine").exists()


def test_new_requirements_make_it_anew_with_its_own_python(tree):
    (tree / "constraints.txt").write_text("b\n")
    assert set_up(tree) == "Python 3.12.3" and not (tree / ".venv/mine").exists()


def test_an_environment_that_does_not_work_is_made_with_python3(tree):
    (tree / ".venv/bin/python").unlink()
    assert set_up(tree) == "Python 3.11.7"
