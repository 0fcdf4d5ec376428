"""`--seed`: the seed from which this run draws its histories. Without it every run draws the same.

Hypothesis draws from it, and so does what asks `seeded` for its own seed.
"""

import secrets
from typing import Any

import hypothesis
import pytest

_drawn = 0


def seeded(seed: int) -> int:
    """A test's own seed in a run without --seed, and another one in each run with a seed."""
    return seed + _drawn * 1_000_003


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", help="draw other histories than always: from a number, or from a random one")


@pytest.hookimpl(tryfirst=True)  # before the plugin of hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    global _drawn
    asked = config.option.seed
    # No test depends on the clock: on a busy machine inputs are made slowly, and an example may take long.
    hypothesis.settings.register_profile(
        "histories",
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        derandomize=asked is None,
        database=None,
    )
    hypothesis.settings.load_profile("histories")
    if asked is None:
        return
    if asked != "random" and not asked.isdecimal():
        raise pytest.UsageError(f"--seed is {asked[:40]!r}; give a number that is not negative, or random")
    config.option.seed = str(secrets.randbelow(2**32)) if asked == "random" else asked  # processes of xdist get it
    config.option.hypothesis_seed = config.option.seed
    _drawn = int(config.option.seed)


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal: Any = session.config.pluginmanager.getplugin("terminalreporter")
    if terminal and session.config.option.seed is not None:
        terminal.write_line(f"histories from --seed {session.config.option.seed}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.failed and item.config.option.seed is not None:
        report.sections.append((f"histories from --seed {item.config.option.seed}", "give it again to draw the same"))
    return report
