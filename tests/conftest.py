"""All tests run on the CPU. Tests of one family run in one process and share its executables."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest

from tests.by_family import ByFamily
from tests.support import FAMILIES, FAST_FAMILIES

LONG_FAMILIES = ("llama", "qwen2")  # whose code another one runs nearly all of
MARKS = {f: [pytest.mark.slow, *([pytest.mark.long] if f in LONG_FAMILIES else [])] for f in FAMILIES}


@pytest.fixture(
    scope="session", params=[f if f in FAST_FAMILIES else pytest.param(f, marks=MARKS[f]) for f in FAMILIES]
)
def family(request) -> str:
    """One golden folder of each family; the fast suite compiles the ladder of one alone."""
    return request.param


@pytest.hookimpl(optionalhook=True)  # pytest may run without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFamily:
    return ByFamily(config, log)
