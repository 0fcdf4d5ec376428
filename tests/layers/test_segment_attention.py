"""Attention within segments, tile by tile, against NumPy in float64: packed images, padding, sizes of the array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.models.layers.segment_attention import map_tiles, segment_attention, tile_of
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE

HEADS, HEAD_DIM = 2, 8


def drawn(num_tokens: int, lengths: tuple[int, ...], dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """[3, T, N, H], q, k and v, and segments of these lengths, padding behind."""
    rng = np.random.default_rng(num_tokens)
    segments = np.repeat(np.arange(len(lengths)), lengths) + 1
    arrays = rng.normal(size=(3, num_tokens, HEADS, HEAD_DIM))
    return arrays.astype(np.dtype(dtype)), np.pad(segments, (0, num_tokens - len(segments))).astype(np.int32)


attention, fast_attention = jax.jit(segment_attention), jax.jit(segment_attention, compiler_options=FAST_COMPILE)


def attend(arrays: np.ndarray, segments: np.ndarray) -> np.ndarray:
    return np.asarray(attention(*arrays, segments), np.float64)


def poisoned(arrays: np.ndarray, tokens: slice) -> np.ndarray:
    arrays = arrays.copy()
    arrays[:, tokens] = np.nan
    return arrays


def oracle(arrays: np.ndarray, segments: np.ndarray) -> np.ndarray:
    q, k, v = arrays.astype(np.float64)
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(HEAD_DIM)
    weights = np.exp(np.where(segments[:, None] == segments, scores - scores.max(), -np.inf))
    return np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_tokens", "lengths"),
    [
        pytest.param(1024, (1000,), id="an image over all tiles"),
        pytest.param(1024, (100, 300, 5, 400), id="images that begin and end within tiles, the last tile empty"),
        pytest.param(768, (256, 256, 1), id="images that end where tiles do"),
        pytest.param(40, (24, 8), id="one tile"),
        pytest.param(600, (500, 100), id="an array that is no multiple of a tile"),
    ],
)
def test_every_token_attends_to_all_of_its_segment_and_to_nothing_else(num_tokens, lengths, dtype):
    arrays, segments = drawn(num_tokens, lengths, dtype)
    found = np.asarray(fast_attention(*arrays, segments), np.float64)
    total, close = sum(lengths), TOLERANCE[dtype]
    wanted = oracle(arrays, segments)[:total]
    np.testing.assert_allclose(found[:total], wanted, rtol=close["rtol"], atol=close["atol"])
    assert np.isfinite(found).all()


def test_tiles_of_padding_are_not_read():
    arrays, segments = drawn(1024, (300,))
    found = attend(poisoned(arrays, slice(512, None)), segments)
    np.testing.assert_array_equal(found[:300], attend(arrays, segments)[:300])
    assert not found[512:].any()


def test_a_tile_meets_no_tile_of_other_segments():
    arrays, segments = drawn(1024, (256, 256, 512))
    found, wanted = attend(poisoned(arrays, slice(256, 512)), segments), attend(arrays, segments)
    others = np.r_[:256, 512:1024]
    np.testing.assert_array_equal(found[others], wanted[others])


def test_bits_of_an_image_do_not_depend_on_the_size_of_the_array():
    arrays, segments = drawn(768, (700,))
    longer = np.pad(arrays, ((0, 0), (0, 1280), (0, 0), (0, 0)), constant_values=3)
    found = attend(longer, np.pad(segments, (0, 1280)))
    np.testing.assert_array_equal(found[:700], attend(arrays, segments)[:700])


def test_an_array_has_at_most_sixteen_tiles_of_at_least_256_tokens():
    assert [tile_of(n) for n in (4, 256, 1024, 4096, 16384)] == [4, 256, 256, 256, 1024]
    assert [tile_of(n, 9) for n in (261, 1044, 16389)] == [261, 261, 1026], "what is merged does not lie in one tile"


def test_what_is_mapped_over_tiles_is_zeros_behind_the_last_one():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    doubled, sums = jax.jit(lambda n, x: map_tiles(lambda tile: (tile * 2, jnp.sum(tile)), n, x))(np.int32(2), x)
    np.testing.assert_array_equal(doubled, [[0, 2, 4, 6], [8, 10, 12, 14], [0, 0, 0, 0]])
    np.testing.assert_array_equal(sums, [6, 22, 0])
