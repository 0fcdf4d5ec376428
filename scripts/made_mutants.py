"""Faults that a program makes in the four packages where one loses data or gives a wrong answer, and who finds them.

    python -m scripts.made_mutants kv_cache               the turn of this commit: 100 mutants of the package
    python -m scripts.made_mutants batch --count 50 --turn 3
    python -m scripts.made_mutants structured --coverage      only measures the branches that its fast tests take

A mutant negates a condition, moves a comparison or a constant by one, drops a statement, swaps two arguments, or has
`or` for `and`. The tests of a package are collected once. A fork of that process runs all of them to learn which lines
each executes, and a fork for each mutant swaps the code of the functions in memory and runs the tests that execute its
line, the fastest first; so no file is changed. Programs that tests start run without the mutant. A survivor must stand
in scripts/made_mutants.toml, and coverage must not fall below what stands there: else the program ends with 1. Needs
`pip install coverage`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest

from scripts.mutant_sites import Site, code_with, sites_of
from scripts.mutants import ROOT, fast_tests

KEPT = ROOT / "scripts" / "made_mutants.toml"
PACKAGES = {  # its folder, and the tests that are to find its faults
    "kv_cache": ("ferrum_jax/core/kv_cache", ["tests/prefix_cache", "tests/scheduling"]),
    "scheduler": ("ferrum_jax/core/scheduler", ["tests/scheduling", "tests/prefix_cache"]),
    "batch": ("ferrum_jax/batch", ["tests/batch"]),
    "structured": ("ferrum_jax/text/structured", ["tests/structured"]),
}
_LEAST_S, _SLOWER = 30.0, 8.0  # how long the tests of a mutant may take: seconds, and times what they took without it


class Lines(NamedTuple):
    """What the tests of a package execute. tests: by file and line. took_s: by test. branches: taken, and all."""

    tests: dict[str, dict[int, list[str]]]
    took_s: dict[str, float]
    branches: tuple[int, int]


class InForks:
    """A pytest plugin that runs tests of the session in forks of its process. work: called when they are collected."""

    def __init__(self, work: Callable[[InForks], None]) -> None:
        self._work, self._items, self._failed = work, dict[str, pytest.Item](), False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._work(self)
        return True

    def run(self, names: Sequence[str], before: Callable[[str], None] = lambda name: None) -> str | None:
        """In a fork: the first of these tests that fails, or None. before: called before each."""
        for name, following in zip(names, [*names[1:], None], strict=True):
            before(name)
            item = self._items[name]
            next_item = None if following is None else self._items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            if self._failed:
                return name
        return None

    @property
    def names(self) -> list[str]:
        return list(self._items)

    def forked(self, function: Callable[[], Any], limit_s: float) -> Any:
        """What a function returns in a fork, or TimeoutError, or RuntimeError with what it raised or died of."""
        with tempfile.NamedTemporaryFile() as result:
            if not (pid := os.fork()):
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(1, 2)
                try:
                    value: Any = function()
                except BaseException as error:
                    value = RuntimeError(f"{type(error).__name__}: {error}")
                Path(result.name).write_bytes(pickle.dumps(value))
                os._exit(0)
            until = time.monotonic() + limit_s
            while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until:
                time.sleep(0.01)
            with contextlib.suppress(ProcessLookupError):  # what tests have started goes with them
                os.killpg(pid, signal.SIGKILL)
            if not ended[0]:
                os.waitpid(pid, 0)
                return TimeoutError(f"{limit_s:.0f} s")
            content = Path(result.name).read_bytes()
            return pickle.loads(content) if content else RuntimeError(f"the process died: {ended[1]}")


def lines_of(forks: InForks, folder: Path) -> Lines:
    """Runs every test of the session, in one fork, and says what each executes of the package."""

    def measure() -> Lines | str:
        measured = coverage.Coverage(data_file=None, branch=True, source=[str(folder)], config_file=False)
        took_s, now = dict[str, float](), [("", 0.0)]

        def before(name: str) -> None:
            took_s[now[0][0]] = time.monotonic() - now[0][1]
            now[0] = name, time.monotonic()
            measured.switch_context(name)

        measured.start()
        failed = forks.run(forks.names, before)
        before("")
        measured.stop()
        if failed is not None:
            return f"{failed} fails without a mutant; mend it first"
        data, paths = measured.get_data(), sorted(folder.rglob("*.py"))
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            measured.json_report(outfile=report.name)
            totals = json.loads(Path(report.name).read_text())["totals"]
        executed = {str(path.relative_to(ROOT)): data.contexts_by_lineno(str(path)) for path in paths}
        return Lines(executed, took_s, (totals["covered_branches"], totals["num_branches"]))

    found = forks.forked(measure, 3000.0)
    if not isinstance(found, Lines):
        raise SystemExit(f"the tests could not be measured: {found}")
    return found


def found_by(forks: InForks, site: Site, lines: Lines, trusted: set[str]) -> str | None:
    """What finds a mutant: a test, a limit of time, an error where it is made; None if nothing does."""
    executed = lines.tests[site.file]
    tests = {name for line in site.lines for name in executed.get(line, ()) if name in lines.took_s}
    names = sorted(tests, key=lambda name: (lines.took_s[name], name))

    def mutated() -> str | None:
        swap(ROOT / site.file, code_with(site))
        return forks.run(names)

    limit_s = _LEAST_S + _SLOWER * sum(lines.took_s[name] for name in names)
    found = forks.forked(mutated, limit_s) if names else None
    if isinstance(found, str) and found not in trusted:
        if (again := forks.forked(lambda: forks.run([found]), limit_s)) is not None:
            raise SystemExit(f"{found} fails without {site.name} too ({again}); mend it first")
        trusted.add(found)
    return found if found is None or isinstance(found, str) else f"{type(found).__name__}: {found}"


def swap(path: Path, module: types.CodeType) -> None:
    """Gives the functions of a module that is imported the code of another text of it."""
    new: dict[tuple[int, str], list[types.CodeType]] = {}
    waiting = [module]
    while waiting:
        code = waiting.pop()
        new.setdefault((code.co_firstlineno, code.co_qualname), []).append(code)
        waiting += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    for function in gc.get_objects():
        if isinstance(function, types.FunctionType) and function.__code__.co_filename == str(path):
            codes = new.get((function.__code__.co_firstlineno, function.__code__.co_qualname), [])
            if len(codes) == 1 and len(codes[0].co_freevars) == len(function.__code__.co_freevars):
                function.__code__ = codes[0]


def chosen(sites: Sequence[Site], count: int, turn: int) -> list[Site]:
    """Sites of a turn: turns that follow each other come round to all."""
    mixed = sorted(sites, key=lambda site: hashlib.blake2b(site.name.encode()).digest())
    first = turn * count % max(len(mixed), 1)
    return [*mixed[first:], *mixed[:first]][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("--count", type=int, default=100, help="mutants of this turn")
    parser.add_argument("--turn", type=int, help="which of them; as many commits as there are, where it is not given")
    parser.add_argument("--coverage", action="store_true", help="measure the branches, and make no mutant")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name holds it")
    asked = parser.parse_args()
    folder, tests = PACKAGES[asked.package]
    kept, bad = tomllib.loads(KEPT.read_text()), list[str]()
    commits = ["git", "rev-list", "--count", "HEAD"]
    turn = int(subprocess.check_output(commits, cwd=ROOT)) if asked.turn is None else asked.turn
    sites = [
        site for path in sorted((ROOT / folder).rglob("*.py")) for site in sites_of(path) if asked.only in site.name
    ]

    def work(forks: InForks) -> None:
        lines = lines_of(forks, ROOT / folder)
        share = 100 * lines.branches[0] / lines.branches[1]
        print(f"{lines.branches[0]} of {lines.branches[1]} branches are taken, {share:.2f} %", flush=True)
        if share < (least := kept["branches"].get(asked.package, 0)):
            bad.append(f"fewer than {least} % of the branches are taken")
        trusted, some = set[str](), [] if asked.coverage else chosen(sites, asked.count, turn)
        survivors = []
        for site in some:
            found = found_by(forks, site, lines, trusted)
            survivors += [site.name] if found is None else []
            print(f"{site.name}  {found or 'SURVIVED'}", flush=True)
        bad.extend(f"{name} survived" for name in survivors if name not in kept["survivors"])
        print(f"{len(some) - len(survivors)} of {len(some)} mutants found; the package has {len(sites)}")

    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", fast_tests(), *tests]
    os.chdir(ROOT)
    pytest.main(options, plugins=[InForks(work)])
    print("\n".join(bad))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
