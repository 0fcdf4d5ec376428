"""What `ferrum-jax check` and the check at an engine's start run on a chip compiles for chips that are not here.

And the memory that targets state, asked of the compiler: a ledger that counts on more makes programs that do not run.
"""

import pytest

from tests.aot.described import described

pytestmark = pytest.mark.aot
TARGETS = ("tpu:v5e:2x2", "tpu:v5p:2x2x1", "tpu:v6e:2x2", "tpu:TPU7x:2x2x1", "gpu:h200")


@pytest.mark.parametrize("target", TARGETS)
def test_every_program_of_the_check_compiles(target):
    found = described("check_program", target)
    assert len(found) >= 6 and {"copy", "matmul in bfloat16"} <= found.keys()
    assert {name: said for name, said in found.items() if said} == {}


TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "TPU7x:2x2x1")


def test_a_target_has_the_memory_that_its_compiler_allows_and_not_much_more():
    assert described("memory_program", TOPOLOGIES) == {name: [True, False] for name in TOPOLOGIES}
