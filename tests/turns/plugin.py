"""`--sixth`: a sixth of the slow tests, and of those for absent chips, with those that the last changes touch.

It prints what it selects and what it leaves out, and how each test that fails runs alone. `--until`: the time
after which no more tests begin; the summary names those that were left out.
"""

import shlex
import sys
import time
from collections import Counter
from typing import Any

import pytest

from tests.turns.history import history
from tests.turns.sixths import NUM_SIXTHS, file_of, unit_of
from tests.turns.touched import Turn, imports_of, turn

pytest_plugins = ("tests.spent",)

_LATE = "left out: the time of --until was over before it began"


def pytest_addoption(parser: pytest.Parser) -> None:
    sixths = [str(n) for n in range(NUM_SIXTHS)]
    parser.addoption(
        "--sixth",
        choices=[*sixths, "auto"],
        help="run one sixth of the slow tests, and those that changes touch; auto: the one in turn by git's history",
    )
    parser.addoption("--until", type=float, help="seconds since 1970 (date +%s) after which no more tests begin")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses paths that are not there: several processes would only say that no tests ran."""
    missing = [path for path in config.args if not (config.invocation_params.dir / path.partition("::")[0]).exists()]
    if missing:
        raise pytest.UsageError(f"file or directory not found: {' '.join(missing)}")


@pytest.hookimpl(tryfirst=True)  # before its fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.option.until is not None and time.time() > item.config.option.until:
        pytest.skip(_LATE)


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.sixth is None:
        return
    past = history(config.rootpath)
    sixth = past.sixth if config.option.sixth == "auto" else int(config.option.sixth)
    slow = [item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("aot")]
    ids = [item.nodeid for item in slow]
    its = turn(sixth, ids, past.changed, imports_of(config.rootpath, ids), past.lap)
    out = [item for item in slow if unit_of(item.nodeid) not in its.kept]
    if getattr(config, "workerinput", {}).get("workerid", "gw0") == "gw0":
        _say(config, [past.said, f"runs sixth {sixth}: {len(ids) - len(out)} of {len(ids)} tests", *told(its, ids)])
    config.hook.pytest_deselected(items=out)
    dropped = set(out)
    items[:] = [item for item in items if item not in dropped]


def told(its: Turn, node_ids: list[str]) -> list[str]:
    """Lines that say which tests the changes add, and which have to wait."""
    tests = Counter(map(unit_of, node_ids))
    lines = []
    for file in sorted({unit[0] for unit in its.touched}):
        units = [unit for unit in its.touched if unit[0] == file]
        paths = sorted({its.touched[unit] for unit in units})
        lines.append(f"and {sum(tests[unit] for unit in units)} of {file} because of {_first(paths)}")
    for why, units in (("touched", its.left_out), ("of this sixth", its.late)):
        files = Counter[str]()
        for unit in units:
            files[unit[0]] += tests[unit]
        if files:
            lines.append(f"{why}, but left to later turns for their time; run these by hand:")
            lines += [f"  {count} of {file}" for file, count in sorted(files.items())]
    if its.everybodys:
        lines.append(f"left to the turns, with no slow test or too many of their own: {_first(its.everybodys)}")
    return lines


def _first(paths: list[str]) -> str:
    more = len(paths) - 4
    return ", ".join(paths[:4]) + (f" and {more} more" if more > 0 else "")


def _say(config: pytest.Config, lines: list[str]) -> None:
    """On the terminal at once, from a process of xdist as well."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("", *lines, sep="\n", file=sys.stderr, flush=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Which tests --until left out, and how what failed runs alone."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if _LATE in str(report.longrepr)]
    if skipped:
        terminalreporter.section("left out, since the time was over; run these by hand")
        for file, count in sorted(Counter(file_of(report.nodeid) for report in skipped).items()):
            terminalreporter.line(f"{count} of {file}")
    reports = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    if config.option.sixth is None or not reports:
        return
    terminalreporter.section("to run it alone")
    seed = f" --seed {config.option.seed}" if config.option.seed is not None else ""
    for node_id, marker in {report.nodeid: "aot" if "aot" in report.keywords else '""' for report in reports}.items():
        terminalreporter.line(f"scripts/test -m {marker}{seed} {shlex.quote(node_id)}")
