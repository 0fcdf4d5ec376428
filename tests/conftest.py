"""All tests run on the CPU. Tests of one family run in one process and share its executables."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support import FAMILIES


@pytest.fixture(scope="session", params=FAMILIES)
def family(request) -> str:
    """One golden folder of each family."""
    return request.param


class ByFamily(LoadScopeScheduling):
    """Gives a worker all tests of a family, for its executables take longest; other tests go one by one."""

    def _split_scope(self, nodeid: str) -> str:
        parameters = nodeid.partition("[")[2].rstrip("]").split("-")
        family = next((name for name in FAMILIES if name in parameters), None)
        if nodeid.startswith("tests/aot/"):  # tests of one compile share a process as well
            return "-".join([nodeid.partition("::")[0], *parameters])
        if family is None and nodeid.startswith("tests/engine/"):
            family = "qwen3"  # the engine's other tests use this one
        return family or nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFamily:
    return ByFamily(config, log)
