"""CPU seconds that each folder of tests uses, beside its budget in tests/budget.toml, and a bar with the time left.

The unit is a CPU second of the machine that the budget was measured on: a fixed piece of Python says how much faster
this one is. A folder over its budget is printed. No test fails for its time: a busy machine would lengthen it. Some
tests are slow because their folder has no room, by a list in the same file.
"""

import json
import os
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from tests.turns.sixths import unit_of
from tests.turns.touched import Unit, seconds_of

BUDGET = tomllib.loads((Path(__file__).parent / "budget.toml").read_text())
FOLDERS: dict[str, float] = BUDGET["folders"]
SLOW: dict[str, list[str]] = BUDGET["slow"]
_USED, _COLLECTING = "cpu_s", "collecting"


def folder_of(node_id: str) -> str:
    """The folder right below tests/, and "" where a test is in none."""
    return "/".join(PurePosixPath(node_id.partition("::")[0]).parts[1:-1][:1])


def cpu_s() -> float:
    """CPU seconds used by this process with its threads, and by its children that have ended."""
    return sum(os.times()[:4])


def _work_s() -> float:
    """CPU seconds of a fixed piece of work, in scalars as tracing and compiling are."""
    began, total = time.thread_time(), 0
    for n in range(1_000_000):
        total += n * n % 7
    return time.thread_time() - began


def dear(used: Mapping[str, float]) -> list[tuple[Unit, float]]:
    """Units of slow tests that took more than 10 seconds and twice what is recorded, by which turns are chosen."""
    units = Counter[Unit]()
    for node_id, seconds in used.items():
        units[unit_of(node_id)] += seconds
    return [(unit, seconds) for unit, seconds in units.most_common() if seconds > max(10.0, 2 * seconds_of(unit))]


def proven(tests: Counter[str], seconds: float, exitstatus: int) -> str:
    if exitstatus:
        return f"NOT proven: {tests.total():,} tests passed, and others did not"
    return f"proven: {tests.total():,} tests of {len(tests)} folders hold on this CPU, in {seconds:.0f} CPU seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spent", help="write the CPU seconds of each test to this file, as JSON")


@pytest.hookimpl(tryfirst=True)  # before -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file, _, name = item.nodeid.partition("::")
        if not {name, name.partition("[")[0]}.isdisjoint(SLOW.get(file, ())):
            item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # when there is a terminal
def pytest_configure(config: pytest.Config) -> None:
    if not config.option.numprocesses or hasattr(config, "workerinput"):
        config.pluginmanager.register(Measured())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summed(config))


class Measured:
    """In a process that runs tests: each report says what has been used since the report before it."""

    def __init__(self) -> None:
        self.before, self.collecting = 0.0, None  # what imports take counts as collecting

    def since(self) -> float:
        before, self.before = self.before, cpu_s()
        return self.before - before

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        self.collecting = self.since()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        if self.collecting is not None:
            report.user_properties.append((_COLLECTING, self.collecting))
            self.collecting = None
        report.user_properties.append((_USED, self.since()))
        return report


class Summed:
    """In the process with the terminal: what each folder used, and a bar in place of pytest's dots."""

    def __init__(self, config: pytest.Config) -> None:
        self.terminal: Any = config.pluginmanager.getplugin("terminalreporter")
        self.option, self.has_bar = config.option, config.option.verbose < 0
        self.faster = BUDGET["work_s"] / min(_work_s() for _ in range(3))
        self.used, self.tests = Counter[str](), Counter[str]()
        self.weights: dict[str, float] = {}  # of each folder's tests, to guess the time left
        self.all = self.done = self.shown = self.began = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.pytest_xdist_node_collection_finished([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """A test is expected to take its part of its folder's budget."""
        tests = Counter(map(folder_of, ids))
        self.weights = {folder: FOLDERS.get(folder, count) / count for folder, count in tests.items()}
        self.all, self.began = sum(tests[folder] * self.weights[folder] for folder in tests), time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self):
        category, letter, word = yield
        return (category, "", "") if self.has_bar else (category, letter, word)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in report.user_properties:
            self.used[report.nodeid if name == _USED else _COLLECTING] += seconds * self.faster
        if report.failed and self.has_bar:
            self.terminal.ensure_newline()
            self.terminal.write_line(f"FAILED {report.nodeid}", red=True)
        self.tests[folder_of(report.nodeid)] += report.when == "call" and report.passed
        if report.when == "teardown":
            self.done += self.weights.get(folder_of(report.nodeid), 0.0)
            self._draw()

    def _draw(self) -> None:
        """A line that is drawn over on a terminal, and one for each tenth elsewhere."""
        share, is_terminal = min(self.done / max(self.all, self.done, 1e-9), 1.0), self.terminal.isatty
        if not self.has_bar or share + 1e-6 < self.shown:
            return
        self.shown = (int(share * 200) + 1) / 200 if is_terminal else (int(share * 10 + 1e-6) + 1) / 10
        left = (time.monotonic() - self.began) * (1 - share) / share
        bar = f"[{'#' * int(share * 30):.<30}] {share:4.0%}"
        line = f"{bar}, {self.tests.total():,} tests, {left // 60:.0f} min {left % 60:02.0f} s left"
        self.terminal.write(f"\r{line}  " if is_terminal else f"{line}\n", flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, exitstatus: int) -> None:
        if not self.tests:
            return
        if self.option.spent:
            Path(self.option.spent).write_text(json.dumps(self.used, indent=0))
        folders, is_fast = Counter[str](), "not slow" in self.option.markexpr
        for node_id, seconds in self.used.items():
            folders[folder_of(node_id) or node_id] += seconds
        cells = [_cell(folder, seconds, is_fast) for folder, seconds in sorted(folders.items())]
        self.terminal.ensure_newline()
        self.terminal.write_line(f"CPU seconds, of a machine that this one is {self.faster:.2f} times as fast as:")
        for first in range(0, len(cells), 4):
            self.terminal.write_line("".join(cells[first : first + 4]).rstrip())
        for unit, seconds in [] if is_fast else dear(self.used):
            self.terminal.write_line(f"{' '.join(unit)} took {seconds:.0f} s; say so in tests/turns/seconds.toml")
        self.terminal.write_line(proven(self.tests, folders.total(), exitstatus))


def _cell(folder: str, seconds: float, is_fast: bool) -> str:
    """A folder's name, what it used and, in the fast suite, its budget."""
    budget = FOLDERS.get(folder, 0.0)
    of = f" of {budget:g}" + (" OVER" if seconds > budget else "") if is_fast else ""
    return f"{folder[:15]:<16}{seconds:5.0f}{of:<12}"
