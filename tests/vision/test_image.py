"""A processed image says what it is, or is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_jax.vision.image import Normalising, ProcessedImage

HALVES = Normalising(scale=1 / 255, mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))


def image(pixels: np.ndarray, temporal: int = 1) -> ProcessedImage:
    return ProcessedImage(
        pixels=pixels, normalising=HALVES, temporal=temporal, grid=(1, 2, 4), num_tokens=2, digest=b"cat"
    )


def test_patches_fill_their_grid():
    assert image(np.zeros((8, 3, 2, 2), np.uint8)).num_tokens == 2
    for pixels in (np.zeros((7, 3, 2, 2), np.uint8), np.zeros((8, 3, 2, 2)), np.zeros((8, 12), np.uint8)):
        with pytest.raises(AssertionError, match="patches"):
            image(pixels)


def test_values_are_normalised_bytes_in_the_order_channel_time_row_column():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 3, 2, 2), np.uint8)
    mean, std = (np.array(values)[:, None, None] for values in (HALVES.mean, HALVES.std))
    values = image(pixels, temporal=2).patches
    assert values.dtype == np.float32 and values.shape == (8, 24)
    wanted = ((pixels / 255 - mean) / std)[:, :, None].repeat(2, axis=2).reshape(8, -1)
    np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-6)
