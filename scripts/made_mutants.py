"""Faults that a program makes in the four packages where one loses data or gives a wrong answer, and who finds them.

    python -m scripts.made_mutants kv_cache               the turn of this commit: 100 mutants of the package
    python -m scripts.made_mutants batch --count 50 --turn 3 --seconds 600
    python -m scripts.made_mutants structured --count 0   only measures the branches that its fast tests take

A mutant negates a condition, moves a comparison or a constant by one, drops a statement, swaps two arguments, or has
`or` for `and`. The tests of a package run once in a fork to learn which lines each executes, and then for each mutant
those that execute its line, the fastest first (`mutant_forks`). Survivors that somebody has looked at are kept in
scripts/made_mutants.toml. The program ends with 1 where fewer of the others are found than stands there, or fewer
branches are taken. Needs `pip install coverage`.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.mutant_forks import ROOT, InForks, changes_of, run_in_forks
from scripts.mutant_sites import Site, code_with, sites_of

KEPT = ROOT / "scripts" / "made_mutants.toml"
_LOGS = ("tests/engine/test_request_log.py", "tests/offline/test_replay.py")
PACKAGES = {  # its folder, and the tests that are to find its faults
    "kv_cache": ("ferrum_jax/core/kv_cache", ["tests/prefix_cache", "tests/scheduling"]),
    "scheduler": ("ferrum_jax/core/scheduler", ["tests/scheduling", "tests/prefix_cache", *_LOGS]),
    "batch": ("ferrum_jax/batch", ["tests/batch", "tests/commands/test_verify_command.py"]),
    "structured": ("ferrum_jax/text/structured", ["tests/structured", "--ignore=tests/structured/test_trials.py"]),
}
_LEFT_OUT = (
    "ferrum_jax/batch/ray.py",  # whose tests want Ray
    "ferrum_jax/text/structured/trial_process.py",  # whose tests end children of the process that collected them
)


class Lines(NamedTuple):
    """What the tests of a package execute. tests: by file and line. took_s: by test. branches: taken, and all."""

    tests: dict[str, dict[int, list[str]]]
    took_s: dict[str, float]
    failing: list[str]
    branches: tuple[int, int]


def lines_of(forks: InForks, folder: Path) -> Lines:
    """Runs every test of the session, in one fork, and says what each executes of the package."""

    def measure() -> Lines:
        import coverage  # which who reads the table alone need not have

        measured = coverage.Coverage(
            data_file=None, branch=True, source=[str(folder)], omit=_LEFT_OUT, config_file=False
        )
        took_s, now = dict[str, float](), [("", 0.0)]

        def before(name: str) -> None:
            took_s[now[0][0]] = time.monotonic() - now[0][1]
            now[0] = name, time.monotonic()
            measured.switch_context(name)

        measured.start()
        failing = list(forks.failing(forks.names, before))
        before("")
        measured.stop()
        data, paths = measured.get_data(), sorted(folder.rglob("*.py"))
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            measured.json_report(outfile=report.name)
            totals = json.loads(Path(report.name).read_text())["totals"]
        executed = {str(path.relative_to(ROOT)): data.contexts_by_lineno(str(path)) for path in paths}
        return Lines(executed, took_s, failing, (totals["covered_branches"], totals["num_branches"]))

    found = forks.forked(measure)
    if not isinstance(found, Lines):
        raise RuntimeError(f"the tests could not be measured: {found}")
    return found


def found_by(forks: InForks, site: Site, lines: Lines) -> str | None:
    """The test that finds a mutant; None if none does."""
    executed = lines.tests[site.file]
    tests = {name for line in site.lines for name in executed.get(line, ()) if name in lines.took_s}
    names = sorted(tests, key=lambda name: (lines.took_s[name], name))
    return forks.found_by(changes_of(ROOT / site.file, code_with(site)), names) if names else None


def sites_in(folder: str) -> list[Site]:
    """Every fault that can be made in a package."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [site for path in paths for site in sites_of(path) if site.file not in _LEFT_OUT]


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
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no mutant begins")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name holds it")
    asked = parser.parse_args()
    folder, tests = PACKAGES[asked.package]
    kept, bad = tomllib.loads(KEPT.read_text()), list[str]()
    commits = ["git", "rev-list", "--count", "HEAD"]
    turn = int(subprocess.check_output(commits, cwd=ROOT)) if asked.turn is None else asked.turn
    sites = [site for site in sites_in(folder) if asked.only in site.name]
    until_s = time.monotonic() + asked.seconds

    def work(forks: InForks) -> None:
        lines = lines_of(forks, ROOT / folder)
        forks.took_s = lines.took_s
        forks.left_out.update(lines.failing)
        print("".join(f"{name} fails without a mutant, and is left out\n" for name in lines.failing))
        share = 100 * lines.branches[0] / lines.branches[1]
        print(f"{lines.branches[0]} of {lines.branches[1]} branches are taken, {share:.2f} %", flush=True)
        if share < (least := kept["branches"][asked.package]):
            bad.append(f"fewer than {least} % of the branches are taken")
        found: dict[str, str | None] = {}
        for site in (its := chosen(sites, asked.count, turn)):
            if time.monotonic() < until_s:
                found[site.name] = found_by(forks, site, lines)
                print(f"{site.name}  {found[site.name] or 'SURVIVED'}", flush=True)
        survivors = [name for name, test in found.items() if test is None]
        new = [name for name in survivors if name not in kept["survivors"]]
        print(f"{len(found) - len(survivors)} of {len(found)} found; in turn are {len(its)} of {len(sites)} mutants")
        print("".join(f"{name} survived and is not in {KEPT.name}\n" for name in new))
        judged = len(found) - len(survivors) + len(new)
        if judged - len(new) < kept["found"][asked.package] / 100 * judged:
            bad.append(f"fewer than {kept['found'][asked.package]} % of the mutants that are not kept are found")

    run_in_forks(tests, work)
    print("\n".join(bad))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
