"""All tests run on the CPU. Tests of one family share a process, and so its executables."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest

from tests.support import FAMILIES


@pytest.fixture(scope="session", params=[pytest.param(f, marks=pytest.mark.xdist_group(f)) for f in FAMILIES])
def family(request) -> str:
    """One golden folder of each family; tests of a family run in one process and share its executables."""
    return request.param
