"""Faults put into the product on purpose, one at a time, and which test finds each of them.

    python -m scripts.mutants                        every mutant of scripts/mutants.toml, in seven minutes of one core
    python -m scripts.mutants key-without-adapter    the mutants that are named
    python -m scripts.mutants --list                 their names
    python -m scripts.mutants --json found.json      keeps the table

A mutant says the text of a file, what takes its place, and the tests that are to find it. They run in a copy of the
files that git tracks, as they are in the checkout, which itself is never changed. What finds a mutant must pass without
it. A mutant that no test finds has survived, and the program ends with 1: a test is missing, or it is no fault.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.goldens.weights import CACHE

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "scripts" / "mutants.toml"
_LIMIT_S = 600.0  # a test that never ends has found its mutant too
_MAX_SHOWN = 2000  # characters of what pytest says when it cannot run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault. file, tests: paths in the repository. old: stands in the file once."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def mutants() -> list[Mutant]:
    """The table's, in its order."""
    return [Mutant(name=name, **fields) for name, fields in tomllib.loads(TABLE.read_text()).items()]


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A folder with the tracked files as they are now, and the goldens' weights that were made already."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        for path in filter(None, listed.split("\0")):
            if (ROOT / path).exists():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, folder / path)
        if CACHE.exists():
            (folder / ".pytest_cache").mkdir()
            (folder / ".pytest_cache" / CACHE.name).symlink_to(CACHE.resolve())
        yield folder


def found_by(mutant: Mutant, folder: Path) -> str | None:
    """The test of the copy that fails with the mutant; None if it survives. The file is then as it was.

    Raises RuntimeError for a test that fails without the mutant too.
    """
    path = folder / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: its old text stands {text.count(mutant.old)} times in its file"
    _write(path, text.replace(mutant.old, mutant.new))
    try:
        found = _first_failure(mutant.tests, folder)
    finally:
        _write(path, text)
    if found is not None and "::" in found and _first_failure([found], folder) is not None:
        raise RuntimeError(f"{found} fails without {mutant.name} too; mend it first")
    return found


def _write(path: Path, text: str) -> None:
    """Compiled code goes too: two texts of one length, written in one second, would share it."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def _first_failure(tests: Sequence[str], folder: Path) -> str | None:
    """The first test that fails, or what else went wrong; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "--tb=no", "-rfE", "-m", fast_tests(), *tests]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(folder)
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"the limit of {_LIMIT_S:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # what tests have started goes with them
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        text = said.read()
    if code <= 0:
        return f"the death of its process by signal {-code}" if code else None
    failed = re.search(r"(?m)^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", text)
    if failed is None:
        raise RuntimeError(f"pytest ended with {code} and names no test that failed:\n{text[-_MAX_SHOWN:]}")
    return failed[1]


def fast_tests() -> str:
    """The markers of tests that run always, as scripts/test has them."""
    found = re.search(r'(?m)^marker=\(-m "(.+)"\)$', (ROOT / "scripts" / "test").read_text())
    assert found is not None, "scripts/test says which tests are fast"
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutants; all where none is given")
    parser.add_argument("--list", action="store_true", help="print the names and files, and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the table, by name")
    asked = parser.parse_args()
    table = {mutant.name: mutant for mutant in mutants()}
    if unknown := [name for name in asked.names if name not in table]:
        parser.error(f"no mutant has the name {', '.join(unknown)}; see --list")
    chosen = [table[name] for name in asked.names or table]
    if asked.list:
        print("\n".join(f"{mutant.name:36} {mutant.file}" for mutant in chosen))
        return
    rows: dict[str, dict[str, object]] = {}
    with copied() as folder:
        for mutant in chosen:
            started_s = time.monotonic()
            test = found_by(mutant, folder)
            seconds = round(time.monotonic() - started_s, 1)
            rows[mutant.name] = {"file": mutant.file, "found by": test, "seconds": seconds}
            print(f"{mutant.name:36} {seconds:6} s  {test or 'SURVIVED'}", flush=True)
            if asked.json is not None:
                asked.json.write_text(json.dumps(rows, indent=2) + "\n")
    survivors = [name for name, row in rows.items() if row["found by"] is None]
    print(f"{len(rows) - len(survivors)} of {len(rows)} found" + "".join(f", {name} survived" for name in survivors))
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
