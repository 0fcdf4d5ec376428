"""A processed image: the pixels of the patches that a tower reads, and how many tokens of a prompt stand for it.

A processed video is several of them: to a tower each group of its frames is an image, with a second beside it.

Pixels stay bytes until the tower's call is packed: between processes and while an image waits, an eighth of what
their float32 values take.
"""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normalising:
    """value = (byte * scale - mean) / std for each channel of RGB."""

    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def table(self) -> np.ndarray:
        """float32 [3, 256]: the value of each byte in each channel."""
        scaled = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        mean, std = (np.array(values, np.float32)[:, None] for values in (self.mean, self.std))
        return (scaled - mean) / std


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProcessedImage:
    """One image as a model's tower takes it.

    pixels: uint8 [t * h * w, 3, patch, patch], of patches: channel, y, x; of a group of frames [.., 3, time, ..].
      Qwen: patches in groups of merge * merge that one token stands for, groups row by row.
      Gemma 4, Mistral 3: likewise, of squares that are pooled or merged.
      Gemma 3: patches row by row, crop after crop.
    normalising: of their values. temporal: how often a patch has each channel's values, as frames of a video.
    grid: (t, h, w) in patches. Gemma 3: (crops, 64, 64), the whole image first, then what pan-and-scan cut from it.
    num_tokens: placeholder tokens of the prompt that stand for it: t * h * w / merge^2, or 256 a crop.
      Mistral 3: with those between rows.
    token_rows: rows of these, with a token between two; 1 where they stand in a run.
    digest: blake2b of the decoded pixels, the grid and the processor's settings: equal images have equal digests.
    kind: "image", or "video" of a group of frames.
    """

    pixels: np.ndarray
    normalising: Normalising
    temporal: int = 1
    grid: tuple[int, int, int]
    num_tokens: int
    token_rows: int = 1
    digest: bytes
    kind: str = "image"

    def __post_init__(self) -> None:
        t, h, w = self.grid
        assert self.pixels.dtype == np.uint8, f"pixels of patches are uint8, not {self.pixels.dtype}"
        assert self.pixels.ndim in (4, 5) and self.pixels.shape[1] == 3, "pixels of patches are [patches, 3, .., y, x]"
        assert self.pixels.ndim == 4 or self.pixels.shape[2] == self.temporal, "patches have each frame once"
        assert len(self.pixels) == t * h * w, f"{len(self.pixels)} patches do not fill a grid of {self.grid}"

    @property
    def seconds(self) -> float:
        """Sounds alone have some."""
        return 0.0

    @property
    def patches(self) -> np.ndarray:
        """float32 [t * h * w, values of a patch], made at each call.

        A patch's values are the input of the tower's first product, in the order of its weight's flattened inputs, so
        the convolution over patches is one matrix product: (channel, time, y, x).
        """
        pixels = self.pixels if self.pixels.ndim == 5 else self.pixels[:, :, None]  # else each frame is the same
        count, channels, _, *sides = pixels.shape
        values, table = np.empty((count, channels, self.temporal, *sides), np.float32), _table(self.normalising)
        for channel in range(channels):
            values[:, channel] = table[channel][pixels[:, channel]]
        return values.reshape(count, -1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProcessedVideo:
    """One video as a model's tower takes it: groups of frames, each an image to it, and the second of each."""

    groups: tuple[ProcessedImage, ...]
    seconds: tuple[float, ...]


@functools.lru_cache(maxsize=8)
def _table(normalising: Normalising) -> np.ndarray:
    return normalising.table()
