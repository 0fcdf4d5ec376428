"""Choosing keys and reading the chosen ones compile for TPUs that are not here, in place."""

from __future__ import annotations

import pytest

from tests.aot.described import described

pytestmark = pytest.mark.aot


@pytest.mark.parametrize(
    ("generation", "block_sizes"),
    [
        ("v6e", [32]),
        pytest.param("v6e", [16, 64, 128], marks=pytest.mark.slow),
        *(pytest.param(generation, [16, 32, 64, 128], marks=pytest.mark.slow) for generation in ("v5e", "v5p", "v7x")),
    ],
    ids=str,
)
def test_both_kernels_compile_and_leave_the_pool_where_it_is(generation: str, block_sizes: list[int]) -> None:
    for name, kernels in described("indexer_program", generation, block_sizes).items():
        assert kernels.keys() == {"indexer_decode", "latent_attention_decode"}, name
        for kernel, program in kernels.items():
            assert program["aliased_bytes"] >= program["pool_bytes"], f"{name}: {kernel}"
            assert program["pool_copies"] == [], f"{name}: {kernel}"
            assert program["vmem_bytes"] < 16 * 2**20, f"{name}: {kernel}"
