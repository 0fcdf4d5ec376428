"""The videos that a user may give: files, and frames that are decoded already.

A file is bytes, a `pathlib.Path` or a URL, as of all media; it is decoded in a child process with bounds on its time
and memory. Frames are an array uint8 [N, H, W, 3] or a list of images, alone or with how many there are to a second:
{"frames": ..., "fps": 2}. Without, 24 are taken, as in the reference.
"""

import dataclasses
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ferrum_jax.inputs.images.decoding import Look, do_not_look
from ferrum_jax.inputs.images.resizing import resized_frame
from ferrum_jax.inputs.images.sources import ImageSources, is_picture
from ferrum_jax.inputs.media.kinds import VIDEO, MediaKind, MediaRefused
from ferrum_jax.inputs.media.media_sources import MediaSources
from ferrum_jax.io.paths import install_command
from ferrum_jax.io.sandbox.in_child import ChildBounds, NoAnswer, in_child

_CHILD = "ferrum_jax.inputs.images.film_decoding"
KINDS = {"MP4": "mov", "MOV": "mov", "WEBM": "matroska", "MKV": "matroska", "AVI": "avi", "GIF": "gif"}
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")  # that an MP4 may begin with
_FPS = 24.0  # of frames that come without
_MAX_FPS = 1000.0
_OWN_MEMORY = 512 << 20  # bytes that a decoder may take beside its file and its frames
_BYTES_OF_PIXEL = 64  # in a decoder, which keeps up to sixteen frames
_FACTS_BYTES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Film:
    """A video as it was found: its file, or its frames [H, W, 3]; and what is known of it without decoding all."""

    content: bytes | None
    frames: Sequence[Any] | np.ndarray
    count: int
    fps: float
    height: int
    width: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoSources(MediaSources):
    """max_frames: of a film. max_pixels: of a frame. max_kept_pixels: of all frames that a model sees, resized.
    decode_s: in which a film is decoded."""

    kind: ClassVar[MediaKind] = VIDEO
    max_bytes: int = 256 << 20
    max_prompt_bytes: int = 512 << 20
    max_frames: int = 1 << 17
    max_pixels: int = 1 << 24
    max_kept_pixels: int = 1 << 27
    timeout_s: float = 60.0
    decode_s: float = 60.0

    def found(self, given: Any, look: Look = do_not_look) -> Film:
        """The video that a Python user gives, counted. Raises ValueError saying what is wrong with it."""
        content = self.content(given)
        if content is not None:
            return self._counted(content, look)
        frames, fps = given, _FPS
        if isinstance(given, Mapping):
            if set(given) - {"frames", "fps"} or "frames" not in given:
                raise MediaRefused(f"the video has the fields {sorted(map(str, given))}; it must have frames and fps")
            frames, fps = given["frames"], given.get("fps", _FPS)
        if type(fps) not in (int, float) or not 0 < fps <= _MAX_FPS:
            raise MediaRefused(f"the video's fps is {fps!r}; it must be a number over 0 and at most {_MAX_FPS:g}")
        return self._of_frames(frames, float(fps))

    def _of_frames(self, frames: Any, fps: float) -> Film:
        is_array = isinstance(frames, np.ndarray) and frames.ndim == 4
        if not is_array and not (isinstance(frames, list | tuple) and all(map(is_picture, frames))):
            raise MediaRefused(
                f"the video is a {type(frames).__name__}; it must be bytes, a pathlib.Path, a URL, a uint8 array "
                "[frames, height, width, 3], a list of images, or either of these as frames beside fps"
            )
        if not 1 <= len(frames) <= self.max_frames:
            raise MediaRefused(f"the video has {len(frames):,} frames; it must have 1 to {self.max_frames:,}")
        images = ImageSources(max_pixels=self.max_pixels)
        sizes = {images.size(frame) for frame in frames}
        if len(sizes) > 1:
            raise MediaRefused(f"the video has frames of several sizes, {sorted(sizes)[:4]}; give them one")
        (width, height) = sizes.pop()
        return Film(content=None, frames=frames, count=len(frames), fps=fps, height=height, width=width)

    def _counted(self, content: bytes, look: Look) -> Film:
        answer = self._asked("facts", content, {"max_frames": self.max_frames}, _FACTS_BYTES, look)
        return Film(content=content, frames=(), **json.loads(answer))

    def frames(
        self, film: Film, indices: np.ndarray, size: tuple[int, int], resample: int, look: Look = do_not_look
    ) -> np.ndarray:
        """uint8 [N, height, width, 3]: the frames `indices` of a film, resized. Raises ValueError for damaged ones."""
        height, width = size
        shape = (len(indices), height, width, 3)
        pixels = len(indices) * height * width
        if pixels > self.max_kept_pixels:
            raise MediaRefused(
                f"the video's {len(indices)} frames of {width} x {height} have {pixels:,} pixels; at most "
                f"{self.max_kept_pixels:,} are taken: {self.kind.smaller}"
            )
        if film.content is None:
            images, found = ImageSources(max_pixels=self.max_pixels), np.empty(shape, np.uint8)
            for place, index in enumerate(indices.tolist()):
                look()
                found[place] = resized_frame(images.pixels(film.frames[index]), height, width, resample)
            return found
        order = {"indices": indices.tolist(), "height": height, "width": width, "resample": resample}
        order["shape"] = [film.height, film.width]
        answer = self._asked("frames", film.content, order, 3 * pixels, look)
        if len(answer) != 3 * pixels:
            raise MediaRefused(f"the video cannot be decoded: its frames have {len(answer):,} bytes")
        return np.frombuffer(answer, np.uint8).reshape(shape)

    def _asked(self, function: str, content: bytes, order: dict[str, Any], answer_bytes: int, look: Look) -> bytes:
        """The answer of a function of `film_decoding` in a child."""
        order |= {"format": format_of(content), "max_pixels": self.max_pixels}
        if importlib.util.find_spec("av") is None:
            raise ValueError(f"videos need PyAV; {install_command('video')}")
        own = _OWN_MEMORY + _BYTES_OF_PIXEL * self.max_pixels
        memory = own + 2 * answer_bytes
        bounds = ChildBounds(seconds=self.decode_s, memory_bytes=memory, answer_bytes=answer_bytes)
        try:
            return in_child(f"{_CHILD}:{function}", content, order, bounds, look=look)
        except NoAnswer as error:
            raise MediaRefused(f"the video cannot be decoded: {error}; {self.kind.smaller}") from error


def format_of(content: bytes) -> str:
    """FFmpeg's name of the format that a file begins as. Raises ValueError for one that is not read here."""
    if content[4:8] in _BOXES:
        return "mov"
    if content[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if content[:4] == b"RIFF" and content[8:12] == b"AVI ":
        return "avi"
    if content[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if not content:
        raise MediaRefused("the video is empty: it has no bytes")
    raise MediaRefused(f"the video is not a file of a kind that is read here: {', '.join(KINDS)}")
