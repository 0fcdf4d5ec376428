"""From pixels to patches, as a checkpoint's processor file says: one class for each kind of tower.

    pixels uint8 [H, W, 3]  ->  resized by Pillow  ->  cut: uint8 [t * h * w, 3, patch, patch]
                            ->  scaled and normalised, when the tower's call is packed: float32 [t * h * w, values]

Scaling and normalising are one table of 256 values a channel, computed in the reference's order of operations, so its
bits are the reference's. Every key of the file is honoured or refused by name.

    film  ->  indices of frames, and the size that all are resized to  ->  frames uint8 [N, H, W, 3]
          ->  groups of frames, each an image to the tower: two frames for Qwen, one for Gemma 4

A group's digest is of its pixels and the processor's settings, not of its place in time: a longer cut of the same film
shares what is equal in both.
"""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from ferrum_jax.inputs.images.decoding import pillow
from ferrum_jax.inputs.images.image import Normalising, ProcessedImage, ProcessedVideo
from ferrum_jax.inputs.media.kinds import MediaRefused, media_digest
from ferrum_jax.io.ints import ceil_div

_MAX_ASPECT = 200  # of Qwen's images and videos
_ROOM_OF_FRAMES = 1.05  # times the least pixels, which a frame has at least where pixels are capped by the frame


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResizedImages:
    """Images of any size, resized to whole squares of patches; a token stands for a square.

    resample: Pillow's number of the filter. Each kind says the size after resizing and the patches of a square's side.
    """

    normalising: Normalising
    patch_size: int
    resample: int

    kind: ClassVar[str]
    side_field: ClassVar[str] = "merge_size"  # the field that says the patches of a square's side

    @property
    def side(self) -> int:
        """Patches of a square's side."""
        return getattr(self, self.side_field)

    @property
    def temporal(self) -> int:
        """How often a patch has each channel's values."""
        return 1

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing, in pixels. Raises ValueError for an image that is too narrow."""
        raise NotImplementedError

    def num_tokens(self, height: int, width: int) -> int:
        """Placeholder tokens of an image of this size, from its header alone. Raises ValueError as `size` does."""
        return self._tokens_of(*self._squares(*self.size(height, width)))

    def process(self, pixels: np.ndarray) -> ProcessedImage:
        """pixels: uint8 [H, W, 3]. Raises ValueError as `size` does."""
        height, width = self.size(*pixels.shape[:2])
        rows, columns = self._squares(height, width)
        grid = 1, rows * self.side, columns * self.side
        return ProcessedImage(
            pixels=squares(_resized(pixels, height, width, self.resample), self.patch_size, self.side),
            normalising=self.normalising,
            temporal=self.temporal,
            grid=grid,
            num_tokens=self._tokens_of(rows, columns),
            token_rows=self._token_rows(rows),
            digest=_digest(pixels, grid, self),
        )

    def _squares(self, height: int, width: int) -> tuple[int, int]:
        unit = self.patch_size * self.side
        return height // unit, width // unit

    def _tokens_of(self, rows: int, columns: int) -> int:
        return rows * columns

    def _token_rows(self, rows: int) -> int:
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenImages(ResizedImages):
    """Images for Qwen2-VL's towers and later ones: sides are rounded, and pixels kept between bounds."""

    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int

    kind: ClassVar[str] = "qwen"

    @property
    def temporal(self) -> int:
        return self.temporal_patch_size

    def size(self, height: int, width: int) -> tuple[int, int]:
        check_aspect("image", height, width)
        unit = self.patch_size * self.merge_size
        return _rounded(height, width, unit, self.min_pixels, self.max_pixels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmImages(QwenImages):
    """Images as Qwen's; a side shorter than a square grows to one first."""

    kind: ClassVar[str] = "glm"

    def size(self, height: int, width: int) -> tuple[int, int]:
        return super().size(*grown(height, width, self.patch_size * self.merge_size))


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
class Gemma4Images(ResizedImages):
    """Images for Gemma 4's tower: the largest of their shape that 1 to max_tokens soft tokens stand for.

    pooling: patches of a side of a soft token.
    """

    pooling: int
    max_tokens: int

    kind: ClassVar[str] = "gemma4"
    side_field: ClassVar[str] = "pooling"

    def size(self, height: int, width: int) -> tuple[int, int]:
        unit = self.patch_size * self.pooling
        most = self.max_tokens * unit**2  # pixels
        factor = math.sqrt(most / (height * width))
        rows, columns = (math.floor(factor * side / unit) for side in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, self.max_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.max_tokens), 1
        return rows * unit, columns * unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixtralImages(ResizedImages):
    """Images for Mistral 3's tower: sides grow to the next whole square, longest_edge pixels at most.

    An image's tokens stand in rows, with a token between two.
    """

    merge_size: int
    longest_edge: int

    kind: ClassVar[str] = "pixtral"

    def size(self, height: int, width: int) -> tuple[int, int]:
        unit, shrink = self.patch_size * self.merge_size, max(height / self.longest_edge, width / self.longest_edge)
        shrunk = [math.floor(side / shrink) if shrink > 1 else side for side in (height, width)]
        if not min(shrunk):
            raise MediaRefused(
                f"the image is {width} x {height}; its longer side may be {self.longest_edge} times the shorter at most"
            )
        rows, columns = (ceil_div(side, unit) for side in shrunk)
        return rows * unit, columns * unit

    def _tokens_of(self, rows: int, columns: int) -> int:
        return rows * (columns + 1) - 1

    def _token_rows(self, rows: int) -> int:
        return rows


ImageProcessor = ResizedImages | Gemma3Images


def check_aspect(noun: str, height: int, width: int) -> None:
    """Raises ValueError for an image or video that is too narrow for Qwen's towers."""
    if max(height, width) > _MAX_ASPECT * min(height, width):
        raise MediaRefused(
            f"the {noun} is {width} x {height}; its longer side may be {_MAX_ASPECT} times the shorter at most"
        )


def grown(height: int, width: int, unit: int) -> tuple[int, int]:
    """Height and width, of the same shape, with no side shorter than a unit."""
    scale = max(1, unit / height, unit / width)
    return int(height * scale), int(width * scale)


def _rounded(
    height: int, width: int, unit: int, least: float, most: float, frames: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Sides as multiples of a unit, so that all frames have between `least` and `most` pixels.

    frames: their number, and how many a group has, which the number is rounded to.
    """
    count, each = frames
    rows, columns = round(height / unit) * unit, round(width / unit) * unit
    pixels = round(count / each) * each * rows * columns
    if pixels > most:
        shrink = math.sqrt(count * height * width / most)
        rows, columns = (max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
    elif pixels < least:
        grow = math.sqrt(least / (count * height * width))
        rows, columns = (math.ceil(side * grow / unit) * unit for side in (height, width))
    return rows, columns


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


def _digest(pixels: np.ndarray, grid: tuple[int, int, int], processor: ImageProcessor) -> bytes:
    settings = {"kind": processor.kind, **dataclasses.asdict(processor), "grid": grid, "shape": pixels.shape}
    return media_digest(pixels, settings)


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
        return _rounded(height, width, unit, self.min_pixels, self._max_pixels(count, unit), (count, frames))

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
        digest=media_digest(frames, settings | dataclasses.asdict(normalising)),
        kind="video",
    )
