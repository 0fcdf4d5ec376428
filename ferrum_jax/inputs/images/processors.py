"""From pixels to patches, as a checkpoint's processor file says: one class for each kind of tower.

    pixels uint8 [H, W, 3]  ->  resized by Pillow  ->  cut: uint8 [t * h * w, 3, patch, patch]
                            ->  scaled and normalised, when the tower's call is packed: float32 [t * h * w, values]

Scaling and normalising are one table of 256 values a channel, computed in the reference's order of operations, so its
bits are the reference's. Every key of the file is honoured or refused by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import ClassVar

import numpy as np

from ferrum_jax.inputs.images.decoding import pillow
from ferrum_jax.inputs.images.image import Normalising, ProcessedImage
from ferrum_jax.inputs.media.kinds import MediaRefused
from ferrum_jax.io.ints import ceil_div

DIGEST_BYTES = 32
MOST_ASPECT = 200  # of Qwen's images


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenImages:
    """Images of any size for Qwen2-VL's towers and later ones: the next multiple of a merged patch, between bounds.

    min_pixels, max_pixels: between which the resized image lies. resample: Pillow's number of the filter.
    """

    normalising: Normalising
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    resample: int

    kind: ClassVar[str] = "qwen"

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing. Raises ValueError for an image that is too narrow."""
        if max(height, width) > MOST_ASPECT * min(height, width):
            raise MediaRefused(
                f"the image is {width} x {height}; its longer side may be {MOST_ASPECT} times the shorter at most"
            )
        unit = self.patch_size * self.merge_size
        rounded = round(height / unit) * unit, round(width / unit) * unit
        if rounded[0] * rounded[1] > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            return tuple(max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))  # type: ignore[return-value]
        if rounded[0] * rounded[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return tuple(math.ceil(side * grow / unit) * unit for side in (height, width))  # type: ignore[return-value]
        return rounded

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """(t, h, w) in patches of an image of this size. Raises ValueError as `size` does."""
        resized = self.size(height, width)
        return 1, resized[0] // self.patch_size, resized[1] // self.patch_size

    def num_tokens(self, height: int, width: int) -> int:
        """Placeholder tokens of an image of this size, from its header alone."""
        return math.prod(self.grid(height, width)) // self.merge_size**2

    def process(self, pixels: np.ndarray) -> ProcessedImage:
        """pixels: uint8 [H, W, 3]. Raises ValueError as `size` does."""
        grid = self.grid(*pixels.shape[:2])
        _, rows, columns = grid
        patch, merge = self.patch_size, self.merge_size
        return ProcessedImage(
            pixels=squares(_resized(pixels, rows * patch, columns * patch, self.resample), patch, merge),
            normalising=self.normalising,
            temporal=self.temporal_patch_size,
            grid=grid,
            num_tokens=rows * columns // merge**2,
            digest=_digest(pixels, grid, self),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmImages(QwenImages):
    """As Qwen's, but that an image with a side shorter than a merged patch grows to one first."""

    kind: ClassVar[str] = "glm"

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing. Raises ValueError for an image that is too narrow."""
        unit = self.patch_size * self.merge_size
        if min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        return super().size(height, width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Images:
    """Square images of one size for Gemma 3's tower; with pan_and_scan a long image's crops beside the whole.

    height, width: after resizing. tokens_per_crop: placeholder tokens of the whole image and of each crop.
    """

    normalising: Normalising
    patch_size: int
    height: int
    width: int
    tokens_per_crop: int
    resample: int
    pan_and_scan: bool
    min_crop_size: int
    max_crops: int
    min_ratio: float

    kind: ClassVar[str] = "gemma3"

    def crops(self, height: int, width: int) -> list[tuple[slice, slice]]:
        """Rows and columns of each crop of an image of this size, beside the whole; mostly none."""
        long, short = max(height, width), min(height, width)
        if not self.pan_and_scan or long / short < self.min_ratio:
            return []
        count = min(math.floor(long / self.min_crop_size), math.floor(long / short + 0.5))
        count = min(self.max_crops, max(2, count))
        step = math.ceil(long / count)
        if min(step, short) < self.min_crop_size:
            return []
        parts = [slice(start, start + step) for start in range(0, count * step, step)]
        return [(slice(None), part) if width >= height else (part, slice(None)) for part in parts]

    def num_tokens(self, height: int, width: int) -> int:
        """Placeholder tokens of an image of this size, from its header alone."""
        return self.tokens_per_crop * (1 + len(self.crops(height, width)))

    def process(self, pixels: np.ndarray) -> ProcessedImage:
        """pixels: uint8 [H, W, 3]."""
        crops = [pixels, *(pixels[rows, columns] for rows, columns in self.crops(*pixels.shape[:2]))]
        patch, rows, columns = self.patch_size, self.height // self.patch_size, self.width // self.patch_size
        resized = np.stack([_resized(crop, self.height, self.width, self.resample) for crop in crops])
        parts = resized.reshape(len(crops), rows, patch, columns, patch, 3).transpose(0, 1, 3, 5, 2, 4)
        grid = len(crops), rows, columns
        return ProcessedImage(
            pixels=parts.reshape(-1, 3, patch, patch),
            normalising=self.normalising,
            grid=grid,
            num_tokens=self.tokens_per_crop * len(crops),
            digest=_digest(pixels, grid, self),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Images:
    """Images of any size for Gemma 4's tower: the most pixels of the same shape that some soft tokens have.

    pooling: patches of a side of a soft token. max_tokens: soft tokens of an image.
    """

    normalising: Normalising
    patch_size: int
    pooling: int
    max_tokens: int
    resample: int

    kind: ClassVar[str] = "gemma4"

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing, multiples of a soft token's; max_tokens of them at most, one at least."""
        unit = self.patch_size * self.pooling
        most = self.max_tokens * unit**2  # pixels
        factor = math.sqrt(most / (height * width))
        rows, columns = (math.floor(factor * side / unit) for side in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, self.max_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.max_tokens), 1
        return rows * unit, columns * unit

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """(1, h, w) in patches of an image of this size."""
        resized = self.size(height, width)
        return 1, resized[0] // self.patch_size, resized[1] // self.patch_size

    def num_tokens(self, height: int, width: int) -> int:
        """Placeholder tokens of an image of this size, from its header alone."""
        return math.prod(self.grid(height, width)) // self.pooling**2

    def process(self, pixels: np.ndarray) -> ProcessedImage:
        """pixels: uint8 [H, W, 3]."""
        height, width = self.size(*pixels.shape[:2])
        grid = 1, height // self.patch_size, width // self.patch_size
        return ProcessedImage(
            pixels=squares(_resized(pixels, height, width, self.resample), self.patch_size, self.pooling),
            normalising=self.normalising,
            grid=grid,
            num_tokens=math.prod(grid) // self.pooling**2,
            digest=_digest(pixels, grid, self),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixtralImages:
    """Images of any size for Mistral 3's tower: the next multiple of a merged patch, longest_edge of a side at most.

    An image's tokens stand in rows, with a token between two.
    """

    normalising: Normalising
    patch_size: int
    merge_size: int
    longest_edge: int
    resample: int

    kind: ClassVar[str] = "pixtral"

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing. Raises ValueError for an image that is too narrow."""
        unit, shrink = self.patch_size * self.merge_size, max(height / self.longest_edge, width / self.longest_edge)
        shrunk = [math.floor(side / shrink) if shrink > 1 else side for side in (height, width)]
        if not min(shrunk):
            raise MediaRefused(
                f"the image is {width} x {height}; its longer side may be {self.longest_edge} times the shorter at most"
            )
        rows, columns = (ceil_div(side, unit) for side in shrunk)
        return rows * unit, columns * unit

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """(1, h, w) in patches of an image of this size. Raises ValueError as `size` does."""
        resized = self.size(height, width)
        return 1, resized[0] // self.patch_size, resized[1] // self.patch_size

    def num_tokens(self, height: int, width: int) -> int:
        """Placeholder tokens of an image of this size, with those between rows, from its header alone."""
        _, rows, columns = self.grid(height, width)
        return self._tokens_of(rows, columns)

    def process(self, pixels: np.ndarray) -> ProcessedImage:
        """pixels: uint8 [H, W, 3]. Raises ValueError as `size` does."""
        grid = self.grid(*pixels.shape[:2])
        _, rows, columns = grid
        patch, merge = self.patch_size, self.merge_size
        return ProcessedImage(
            pixels=squares(_resized(pixels, rows * patch, columns * patch, self.resample), patch, merge),
            normalising=self.normalising,
            grid=grid,
            num_tokens=self._tokens_of(rows, columns),
            token_rows=rows // merge,
            digest=_digest(pixels, grid, self),
        )

    def _tokens_of(self, rows: int, columns: int) -> int:
        return rows // self.merge_size * (columns // self.merge_size + 1) - 1


ImageProcessor = QwenImages | Gemma3Images | Gemma4Images | PixtralImages


def squares(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """uint8 [patches, channel, y, x] of [H, W, 3]; squares of merge x merge patches stand together, row by row."""
    rows, columns = (side // (patch * merge) for side in pixels.shape[:2])
    parts = pixels.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(parts.reshape(-1, 3, patch, patch))


def _resized(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """uint8 [height, width, 3]."""
    if pixels.shape[:2] == (height, width):
        return pixels
    image = pillow().fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize((width, height), resample=resample))


def _digest(pixels: np.ndarray, grid: Sequence[int], processor: ImageProcessor) -> bytes:
    settings = {"kind": processor.kind, **dataclasses.asdict(processor), "grid": grid, "shape": pixels.shape}
    digest = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()
