"""add_low_rank against its float64 oracle; its cost, and that a token's bits are its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.low_rank import LowRankSlots, add_low_rank, oracle, pairs_of
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE

S, R, I, O = 12, 4, 40, 56
PER_TILE = 4


def arguments(T: int, slots: np.ndarray, seed: int = 0, dtype: str = "float32"):
    rng = np.random.default_rng(seed)
    y, x, a, b = (
        (rng.standard_normal(shape) * scale).astype(np.dtype(dtype))
        for shape, scale in (((T, O), 1), ((T, I), 1), ((S, R, I), I**-0.5), ((S, R, O), R**-0.5))
    )
    scales = rng.uniform(0.5, 2, S).astype(np.float32)
    kept = LowRankSlots(
        a=a.reshape(S // PER_TILE, PER_TILE * R, I),
        b=b.reshape(S // PER_TILE, PER_TILE * R, O),
        scales=np.repeat(scales, R).reshape(S // PER_TILE, -1),
        rank=R,
    )
    expected = oracle.add_low_rank(*(v.astype(np.float64) for v in (y, x, a, b)), scales, slots)
    return *jax.device_put((y, x, kept)), expected


def _add(y, x, kept, slots, tile=16):
    pairs = pairs_of(slots.astype(jnp.int32), num_tiles=S // PER_TILE, slots_per_tile=PER_TILE, tile=tile)
    return add_low_rank(y, x, kept, pairs), pairs


add = jax.jit(_add, static_argnames="tile")
add_fast = jax.jit(_add, compiler_options=FAST_COMPILE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("T", [3, 16, 41])
def test_every_token_gets_what_its_own_slot_adds(T, dtype):
    slots = np.random.default_rng(1).integers(0, S + 1, T)
    y, x, kept, expected = arguments(T, slots, dtype=dtype)
    got, _ = add_fast(y, x, kept, slots)
    assert got.dtype == y.dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, **TOLERANCE[dtype])


def test_pairs_follow_the_rows_and_not_the_slots():
    slots = np.repeat([1, 3, 0, 9], 16)
    y, x, kept, _ = arguments(64, slots)
    _, pairs = add(y, x, kept, slots)
    assert int(pairs.num_pairs) == 3
    found = set(zip(pairs.token_tiles[:3].tolist(), pairs.rank_tiles[:3].tolist(), strict=True))
    assert found == {(0, 0), (1, 0), (3, 2)}
    assert int(add(y, x, kept, slots * 0)[1].num_pairs) == 0


def test_tokens_without_a_slot_keep_their_bits_beside_slots_that_hold_nan():
    slots = np.repeat([0, 2, 0], 16)
    y, x, kept, expected = arguments(48, slots)
    x = np.where(np.arange(48)[:, None] < 16, np.nan, x).astype(np.float32)
    y, got = map(np.asarray, (y, add(y, x, kept, slots, tile=48)[0]))
    np.testing.assert_array_equal(got[:16], y[:16])
    np.testing.assert_array_equal(got[32:], y[32:])
    np.testing.assert_allclose(got[16:32], expected[16:32], **TOLERANCE["float32"])


@pytest.mark.slow
def test_a_tokens_bits_depend_on_no_companion_or_bucket():
    slots = np.random.default_rng(3).integers(0, S + 1, 256)
    y, x, kept, _ = arguments(256, slots)
    y, x, whole = map(np.asarray, (y, x, add(y, x, kept, slots, tile=64)[0]))
    for size, seed in ((64, 0), (128, 1)):
        some = np.random.default_rng(seed).permutation(256)[:size]
        got, _ = add(y[some], x[some], kept, slots[some], tile=64)
        np.testing.assert_array_equal(np.asarray(got), whole[some])
