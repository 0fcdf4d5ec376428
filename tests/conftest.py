"""All tests run on the CPU. Tests of one family run in one process and share its executables."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support import FAMILIES, FAST_FAMILIES, GOLDENS

LONG_FAMILIES = ("llama", "qwen2")  # whose code another one runs nearly all of
MARKS = {f: [pytest.mark.slow, *([pytest.mark.long] if f in LONG_FAMILIES else [])] for f in FAMILIES}


@pytest.fixture(
    scope="session", params=[f if f in FAST_FAMILIES else pytest.param(f, marks=MARKS[f]) for f in FAMILIES]
)
def family(request) -> str:
    """One golden folder of each family; the fast suite compiles the ladder of one alone."""
    return request.param


ONE_FUNCTION = ("tests/sampling/",)  # tests of these folders call one jitted function, which each process compiles
FOLDERS = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
PUBLISHED = ("tests/models/test_registry.py", "tests/sharding/test_sharding.py")  # lay out the same models
OWN_MODELS = ("test_recurrent.py", "test_windows.py")


class ByFamily(LoadScopeScheduling):
    """Gives a worker all tests of a family, for its executables take longest; other tests go one by one."""

    def _split_scope(self, nodeid: str) -> str:
        parameters = nodeid.partition("[")[2].rstrip("]").split("-")
        family = next((name for name in FOLDERS if name in parameters), None)
        if nodeid.startswith("tests/aot/"):  # tests of one compile share a process as well
            return "-".join([nodeid.partition("::")[0], *parameters])
        if family is None and nodeid.startswith("tests/engine/"):
            file = nodeid.partition("::")[0]
            family = file if file.endswith(OWN_MODELS) else "qwen3"  # the engine's other tests use this one
        if nodeid.startswith(ONE_FUNCTION):
            family = nodeid.rpartition("/")[0]
        if nodeid.startswith(PUBLISHED):
            family = nodeid.partition("[")[2]
        if nodeid.startswith("tests/invariance/test_recurrent.py"):
            family = "qwen3_next"
        return family or nodeid


@pytest.hookimpl(optionalhook=True)  # pytest may run without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFamily:
    return ByFamily(config, log)
