"""A processed image says what it is, or is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_jax.vision.image import ProcessedImage


def test_patches_fill_their_grid():
    image = ProcessedImage(patches=np.zeros((8, 12), np.float32), grid=(1, 2, 4), num_tokens=2, digest=b"cat")
    assert image.num_tokens == 2
    for patches in (np.zeros((7, 12), np.float32), np.zeros((8, 12)), np.zeros((2, 4, 12), np.float32)):
        with pytest.raises(AssertionError, match="patches"):
            ProcessedImage(patches=patches, grid=(1, 2, 4), num_tokens=2, digest=b"cat")
