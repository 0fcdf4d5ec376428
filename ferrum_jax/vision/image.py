"""A processed image: the patches that a tower reads, and how many tokens of a prompt stand for it."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProcessedImage:
    """One image as a model's tower takes it.

    patches: float32 [t * h * w, values of a patch], normalised; a patch's values are the input of the tower's first
      product, in the order of its weight's flattened inputs, so the convolution over patches is one matrix product.
      Qwen: 3 * temporal_patch * patch * patch values (channel, time, y, x); patches in groups of merge * merge that
      one token stands for, groups row by row.
      Gemma 3: 3 * patch * patch values (channel, y, x); patches row by row, crop after crop.
    grid: (t, h, w) in patches. Gemma 3: (crops, 64, 64), the whole image first, then what pan-and-scan cut from it.
    num_tokens: placeholder tokens of the prompt that stand for it: t * h * w / merge^2, or 256 a crop.
    digest: blake2b of the decoded pixels, the grid and the processor's settings: equal images have equal digests.
    """

    patches: np.ndarray
    grid: tuple[int, int, int]
    num_tokens: int
    digest: bytes

    def __post_init__(self) -> None:
        t, h, w = self.grid
        assert self.patches.dtype == np.float32 and self.patches.ndim == 2, "patches are float32 [patches, values]"
        assert len(self.patches) == t * h * w, f"{len(self.patches)} patches do not fill a grid of {self.grid}"
