"""From a film to the frames that a checkpoint's video processor takes of it, and from these to groups for the tower.

    film  ->  indices of frames, and the size that all are resized to  ->  frames uint8 [N, H, W, 3]
          ->  groups of frames, each an image to the tower: of Qwen's two, of Gemma 4 one

A group's digest is of its own pixels and the processor's settings, not of its place in time: a longer cut of the same
film shares what is equal in both.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np

from ferrum_jax.inputs.images.image import Normalising, ProcessedImage, ProcessedVideo
from ferrum_jax.inputs.images.processors import Gemma4Images, check_aspect, digest_of, grown, squares
from ferrum_jax.inputs.media.kinds import MediaRefused

_ROOM_OF_FRAMES = 1.05  # times the least pixels, which a frame has at least where pixels are capped by the frame


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVideos:
    """Videos for Qwen3-VL's tower, two frames to a patch: sampled by the second, all pixels between bounds.

    fps: frames of a second. min_frames, max_frames: between which their number lies. min_pixels, max_pixels: of all
    frames together, likewise. tokens_of_frame: the most that one may have, where pixels are capped by the frame.
    """

    normalising: Normalising
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    resample: int
    fps: float
    min_frames: int
    max_frames: int
    tokens_of_frame: int | None

    kind: ClassVar[str] = "qwen"

    def indices(self, count: int, fps: float) -> np.ndarray:
        """Which frames are taken of a film of `count`, `fps` to a second: from the first to the last, evenly."""
        wanted = min(max(int(count / fps * self.fps), self.min_frames), self.max_frames, count)
        return np.linspace(0, count - 1, wanted).round().astype(np.int64)

    def size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of `count` frames after resizing. Raises ValueError for too few, and for narrow ones."""
        frames, unit = self.temporal_patch_size, self.patch_size * self.merge_size
        if count < frames:
            raise MediaRefused(f"the video has {count} frame{'s' * (count != 1)}; this model takes {frames} or more")
        height, width = grown(height, width, unit)
        check_aspect("video", height, width)
        rows, columns = round(height / unit) * unit, round(width / unit) * unit
        pixels, most = round(count / frames) * frames * rows * columns, self._max_pixels(count, unit)
        if pixels > most:
            shrink = math.sqrt(count * height * width / most)
            rows, columns = (max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
        elif pixels < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (count * height * width))
            rows, columns = (math.ceil(side * grow / unit) * unit for side in (height, width))
        return rows, columns

    def _max_pixels(self, count: int, unit: int) -> int:
        if self.tokens_of_frame is None:
            return self.max_pixels
        most = min(self.tokens_of_frame * unit**2, self.max_pixels // count)
        return max(most, int(self.min_pixels * _ROOM_OF_FRAMES)) * count

    def num_tokens(self, count: int, height: int, width: int) -> int:
        """Placeholder tokens of `count` frames of this size before resizing. Raises ValueError as `size`."""
        rows, columns = self.size(count, height, width)
        return math.ceil(count / self.temporal_patch_size) * rows * columns // (self.patch_size * self.merge_size) ** 2

    def process(self, frames: np.ndarray, indices: np.ndarray, fps: float) -> ProcessedVideo:
        """frames: uint8 [N, H, W, 3], those of `indices`, resized. The last stands twice where their number is odd."""
        each = self.temporal_patch_size
        places = [*range(len(frames)), *[len(frames) - 1] * (-len(frames) % each)]
        times = [int(indices[place]) / fps for place in places]
        starts = range(0, len(places), each)
        groups = (frames[places[start : start + each]] for start in starts)
        return ProcessedVideo(
            groups=tuple(_group(self, group, self.normalising, self.patch_size, self.merge_size) for group in groups),
            seconds=tuple((times[start] + times[start + each - 1]) / 2 for start in starts),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Videos:
    """Videos for Gemma 4's tower: frames as images of fewer soft tokens.

    frame: how each is processed. num_frames: that are taken of a film; of one that has fewer, where the reference has
    no answer, all are.
    """

    frame: Gemma4Images
    num_frames: int

    kind: ClassVar[str] = "gemma4"

    @property
    def resample(self) -> int:
        return self.frame.resample

    def indices(self, count: int, fps: float) -> np.ndarray:
        """Which frames are taken of a film of `count`, `fps` to a second: each the first of an equal part."""
        wanted = min(self.num_frames, count)
        return np.arange(wanted) * count // wanted

    def size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of frames after resizing."""
        return self.frame.size(height, width)

    def num_tokens(self, count: int, height: int, width: int) -> int:
        """Placeholder tokens of `count` frames of this size before resizing."""
        return count * self.frame.num_tokens(height, width)

    def process(self, frames: np.ndarray, indices: np.ndarray, fps: float) -> ProcessedVideo:
        """frames: uint8 [N, H, W, 3], those of `indices`, resized."""
        own = self.frame
        return ProcessedVideo(
            groups=tuple(_group(self, frame, own.normalising, own.patch_size, own.pooling) for frame in frames),
            seconds=tuple(int(index) / fps for index in indices),
        )


VideoProcessor = QwenVideos | Gemma4Videos


def _group(
    processor: VideoProcessor, frames: np.ndarray, normalising: Normalising, patch: int, side: int
) -> ProcessedImage:
    """An image to the tower, of frames uint8 [n, H, W, 3] or of one [H, W, 3]. side: of a square, in patches."""
    is_single = frames.ndim == 3
    rows, columns = (length // patch for length in frames.shape[-3:-1])
    settings = {"kind": processor.kind, "patch": patch, "merge": side, "frames": frames.shape}
    return ProcessedImage(
        pixels=squares(frames, patch, side)
        if is_single
        else np.stack([squares(frame, patch, side) for frame in frames], axis=2),
        normalising=normalising,
        temporal=1 if is_single else len(frames),
        grid=(1, rows, columns),
        num_tokens=rows * columns // side**2,
        digest=digest_of(frames, settings | dataclasses.asdict(normalising)),
        kind="video",
    )
