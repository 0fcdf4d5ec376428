"""The weight of the project, bounded by tests/house/limits.json: lines of code and tests, words of docs, root entries.

python -m scripts.house_limits           print what is, what is allowed, and which packages grew since
python -m scripts.house_limits --lower   lower the limits to what is; a rise needs a fall elsewhere in the same commit
"""

import argparse
import ast
import json
import pathlib
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parent.parent
LIMITS = ROOT / "tests" / "house" / "limits.json"
PACKAGES = ("ferrum_jax", "pallas_kernels", "checkpoints")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 650, 60


def sources() -> list[pathlib.Path]:
    return [path for package in PACKAGES for path in _files(package)]


def totals() -> dict[str, int]:
    words = sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md"))
    return {
        "product lines": _lines(sources()),
        "test lines": _lines(_files("tests")),
        "script lines": _lines(_files("scripts")),
        "docs words": words,
        "root entries": len({path.relative_to(ROOT / "ferrum_jax").parts[0] for path in _files("ferrum_jax")}),
    }


def _files(folder: str) -> list[pathlib.Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _lines(paths: Iterable[pathlib.Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def too_large() -> Iterator[str]:
    """Each file and function that is longer than one reads in one go."""
    for path in sources():
        text, name = path.read_text(), path.relative_to(ROOT)
        if (count := text.count("\n")) > MAX_FILE_LINES:
            yield f"{name}: {count} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (count := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                    yield f"{name}:{node.lineno} {node.name}: {count} lines"


def limits() -> dict[str, dict[str, int]]:
    return json.loads(LIMITS.read_text())


def grown() -> dict[str, int]:
    """Lines that each package has gained since the limits last changed; empty in a checkout without its history."""
    commit = _git("log", "-1", "--format=%H", "--", str(LIMITS.relative_to(ROOT))).strip()
    found = Counter[str]()
    for line in _git("diff", "--numstat", "--no-renames", commit or "HEAD", "--", "*.py").splitlines():
        added, deleted, path = line.split("\t")
        found["/".join(pathlib.PurePath(path).parts[:-1][:2])] += int(added) - int(deleted)
    return {package: gain for package, gain in found.most_common() if gain > 0}


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""


def lower() -> None:
    """Writes limits that are what is, where that is less."""
    allowed = limits()
    allowed["totals"] = {name: min(count, allowed["totals"].get(name, count)) for name, count in totals().items()}
    LIMITS.write_text(json.dumps(allowed, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="lower the limits to what is")
    if parser.parse_args().lower:
        lower()
    for name, count in totals().items():
        allowed = limits()["totals"][name]
        print(f"{name:14} {count:7,} of {allowed:7,}, room for {allowed - count:,}")
    for package, gain in grown().items():
        print(f"  {package} grew by {gain:,}")


if __name__ == "__main__":
    main()
