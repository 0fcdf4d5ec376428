"""The weight of the product's code, which tests/house/limits.json bounds: lines, large files, functions and classes.

python -m scripts.house_limits           print what is and what is allowed
python -m scripts.house_limits --lower   lower the limits to what is; a rise is written by hand, and argued for
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
LIMITS = ROOT / "tests" / "house" / "limits.json"
PACKAGES = ("ferrum_jax", "pallas_kernels", "checkpoints")
MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_CLASS_LINES, MOST_PARAMETERS = 350, 60, 300, 8


def sources() -> list[pathlib.Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def room(path: pathlib.Path) -> str:
    """The folder right below a package, in which a file stands; the package where there is none."""
    inside = path.relative_to(ROOT).parts[:-1]
    return "/".join(inside[:2])


def weights() -> dict[str, dict[str, int]]:
    """Lines by room; and how many files, functions, classes are large."""
    lines: dict[str, int] = {}
    large = {"files": 0, "functions": 0, "classes": 0, "parameter lists": 0}
    for path in sources():
        text = path.read_text()
        count = text.count("\n")
        lines[room(path)] = lines.get(room(path), 0) + count
        large["files"] += count > MOST_FILE_LINES
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                large["classes"] += _length(node) > MOST_CLASS_LINES
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                large["functions"] += _length(node) > MOST_FUNCTION_LINES
                large["parameter lists"] += len(list(_parameters(node))) > MOST_PARAMETERS
    return {"lines": {"all": sum(lines.values()), **lines}, "large": large}


def _length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.arg]:
    yield from (arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if arg.arg != "self")


def limits() -> dict[str, dict[str, int]]:
    return json.loads(LIMITS.read_text())


def lower() -> None:
    """Writes limits that are what is, where that is less."""
    allowed = limits()
    for kind, found in weights().items():
        allowed[kind] = {name: min(count, allowed[kind].get(name, count)) for name, count in found.items()}
    LIMITS.write_text(json.dumps(allowed, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="lower the limits to what is")
    if parser.parse_args().lower:
        lower()
    for kind, found in weights().items():
        for name, count in found.items():
            print(f"{kind:6} {name:32} {count:7,} of {limits()[kind].get(name, 0):7,}")


if __name__ == "__main__":
    main()
