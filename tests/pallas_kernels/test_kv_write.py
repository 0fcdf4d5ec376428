"""kv_write against NumPy, and that it writes in place."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.cases import CASES, Case, make_arguments


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_real_tokens_are_written_and_every_other_block_keeps_its_bits(case: Case) -> None:
    pool, k, v, block_ids, offsets = make_arguments(case)
    expected = np.array(pool)
    for t in range(case.num_real):
        expected[block_ids[t], offsets[t], 0::2] = np.asarray(k[t]).astype(expected.dtype)
        expected[block_ids[t], offsets[t], 1::2] = np.asarray(v[t]).astype(expected.dtype)
    got = np.asarray(jax.jit(kv_write, static_argnames="implementation")(pool, k, v, block_ids, offsets))
    np.testing.assert_array_equal(got[1:], expected[1:])  # block 0 takes the padding


@pytest.mark.parametrize("tokens", [1, 16, 256])
def test_a_donated_pool_is_written_in_place(tokens: int) -> None:
    case = Case(name="", num_tokens=tokens, num_real=tokens, num_blocks=101, num_kv_heads=8, head_dim=128)
    arguments = make_arguments(case)
    compiled = jax.jit(kv_write, donate_argnums=0).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == arguments[0].nbytes
    assert memory.temp_size_in_bytes < arguments[0].nbytes
    shapes = ("= f32[101,", f"= f32[{101 * 16},")
    copies = [x for x in compiled.as_text().splitlines() if " copy(" in x and any(shape in x for shape in shapes)]
    assert copies == []


def test_shapes_that_do_not_fit_and_an_unknown_implementation_are_errors() -> None:
    pool, k, v, block_ids, offsets = make_arguments(CASES[0])
    with pytest.raises(ValueError, match="twice as many"):
        kv_write(pool[:, :, :3], k, v, block_ids, offsets)
    with pytest.raises(ValueError, match="axis T"):
        kv_write(pool, k, v, block_ids[:2], offsets)
    with pytest.raises(ValueError, match="implementation is 'mosaic_gpu'"):
        kv_write(pool, k, v, block_ids, offsets, implementation="mosaic_gpu")
