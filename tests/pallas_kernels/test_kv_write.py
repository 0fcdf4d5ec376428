"""kv_write against NumPy, and that it writes in place."""

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels.kv_pool import KV_DTYPES
from pallas_kernels.kv_write import kv_write, oracle
from pallas_kernels.kv_write.cases import TINY_CASES, Case, make_arguments, make_shapes
from tests.fast_compile import UNOPTIMISED


@pytest.mark.parametrize("case", TINY_CASES, ids=lambda case: case.name)
def test_real_tokens_are_written_and_every_other_block_keeps_its_bits(case: Case) -> None:
    pool, k, v, block_ids, offsets = make_arguments(case)
    places = list(zip(block_ids.tolist(), offsets.tolist(), strict=True))[: case.num_real]
    expected, expected_scales = oracle.write(*oracle.arrays(pool), np.asarray(k), np.asarray(v), places)
    got = jax.jit(kv_write, static_argnames="implementation")(pool, k, v, block_ids, offsets)
    assert jax.tree.structure(got) == jax.tree.structure(pool)
    values, scales = oracle.arrays(got)
    np.testing.assert_array_equal(values[1:].view("uint8"), expected[1:].view("uint8"))  # block 0 takes the padding
    if expected_scales is not None:
        np.testing.assert_array_equal(scales[1:], expected_scales[1:])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("tokens", [1, 16, 256])
def test_a_donated_pool_is_written_in_place(tokens: int, kv_dtype: str) -> None:
    case = Case(
        name="", num_tokens=tokens, num_real=tokens, num_blocks=101, num_kv_heads=8, head_dim=128, kv_dtype=kv_dtype
    )
    arguments = make_shapes(case, "xla")
    compiled = jax.jit(kv_write, donate_argnums=0).lower(*arguments).compile(UNOPTIMISED)
    memory = compiled.memory_analysis()
    pool_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arguments[0]))
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes
    shapes = ("[101,", f"[{101 * 16},")
    moving = (" copy(", " convert(", " bitcast-convert(")  # in any of them the whole pool would move
    lines = [x for x in compiled.as_text().splitlines() if any(op in x for op in moving)]
    assert [x for x in lines if any(shape in x for shape in shapes)] == []


def test_shapes_that_do_not_fit_and_an_unknown_implementation_are_errors() -> None:
    pool, k, v, block_ids, offsets = make_shapes(TINY_CASES[0], "xla")
    for values, message in (
        (
            jax.ShapeDtypeStruct((12, 16, 3, 128), "float32"),
            r"pool.values is float32\[12, 16, 3, 128\]; for 2 KV heads",
        ),
        (jax.ShapeDtypeStruct((12, 16, 4, 128), "int8"), r"pool.scales is None; .* must be float32\[12, 4, 16\]"),
    ):
        with pytest.raises(ValueError, match=message):
            kv_write(dataclasses.replace(pool, values=values), k, v, block_ids, offsets)
    with pytest.raises(ValueError, match="axis T"):
        kv_write(pool, k, v, jax.ShapeDtypeStruct((2,), "int32"), offsets)
    with pytest.raises(ValueError, match="implementation is 'mosaic'"):
        kv_write(pool, k, v, block_ids, offsets, implementation="mosaic")
