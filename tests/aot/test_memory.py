"""The memory that targets state, asked of the compiler: a ledger that counts on more makes programs that do not run."""

from __future__ import annotations

import pytest

from tests.aot.described import described

pytestmark = pytest.mark.aot
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "TPU7x:2x2x1")


def test_a_target_has_the_memory_that_its_compiler_allows_and_not_much_more():
    assert described("memory_program", TOPOLOGIES) == {name: [True, False] for name in TOPOLOGIES}
