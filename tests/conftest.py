"""All tests run on the CPU, with strict promotion: an operation on two dtypes is an error unless one is a Python
scalar's. In the fast suite no step of an engine moves an array but by name (tests/transfer_guard.py), and executables
are compiled when they are used (tests/compiles.py).
Processes share executables through the store of tests/support.py.
"""

import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")  # in programs that tests start as well
os.environ.setdefault("NPROC", "8")  # threads of XLA, in which an interpreted kernel's warpgroups wait for each other

import jax
import pytest

from ferrum_jax.config import EngineConfig
from pallas_kernels.fast_compile import FAST_COMPILE
from tests import compiles, transfer_guard
from tests.golden_table import TABLE, marked
from tests.support import FAMILIES, small_llm

# The fast suite makes machine code by the shorter way (pallas_kernels/fast_compile.py), and runs of a marker that of
# users. Recorded numbers are of the former, so it does not matter who starts the tests. Workers have it from who did.
SHORT = " ".join(f"--{name}={str(value).lower()}" for name, value in FAST_COMPILE.items())
_markers = sys.argv[sys.argv.index("-m") + 1] if "-m" in sys.argv else "not slow"
if "PYTEST_XDIST_WORKER" not in os.environ and _markers.startswith("not slow"):
    os.environ["FAST_TESTS"] = "1"
    os.environ.setdefault("XLA_FLAGS", SHORT)

# How far a child has come would decide what a test sees. tests/startup/test_behind.py and programs that tests start
# have the default.
EngineConfig.__init__.__kwdefaults__["ready"] = "all"

if "FAST_TESTS" in os.environ:
    jax.config.update("jax_numpy_rank_promotion", "raise")
    transfer_guard.stand_around_steps()
    compiles.when_used()

MOST_MAPS, TESTS_A_LOOK = 25_000, 20
_ended = itertools.count(1)

pytest_plugins = ("tests.histories", "tests.turns.plugin")


@pytest.fixture(scope="session", params=[marked(name, TABLE[name]["ladder"]) for name in FAMILIES])
def family(request) -> str:
    """One golden folder of each family; the fast suite compiles the ladder of one alone."""
    return request.param


@pytest.fixture(scope="module")
def compiles_at_start() -> Iterator[None]:
    """Starts in a module that asks for it compile everything, as those of users do."""
    compiles.at_start()
    yield
    if "FAST_TESTS" in os.environ:
        compiles.when_used()


@pytest.fixture(autouse=True)
def few_executables() -> Iterator[None]:
    """Drops executables before a process has as many as Linux lets it map (65,530 pieces), where XLA crashes.

    The list is long and slow to read, so that not every test looks at it.
    """
    yield
    if next(_ended) % TESTS_A_LOOK:
        return
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        small_llm.cache_clear()
        jax.clear_caches()
        gc.collect()
