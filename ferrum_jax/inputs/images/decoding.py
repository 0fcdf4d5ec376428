"""From a file's bytes, a Pillow image or an array to pixels: uint8 [H, W, 3], RGB.

A file is hostile until it is decoded. Its size in pixels is bounded by its header before anything is decoded, its kind
is one of KINDS, and whatever a decoder raises becomes a ValueError that says what is wrong with the image.

A file's orientation (EXIF, or XMP) is applied, as the reference does when it loads one; a Pillow image and an array are
taken as they lie in memory, as it does too. Transparent pixels show white. 16 bits a channel are cut to the upper 8. An
animation gives its first frame.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import struct
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrum_jax.inputs.media.kinds import Look, MediaRefused, do_not_look
from ferrum_jax.io.paths import install_command

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_READERS = ("Png", "Jpeg", "WebP", "Gif", "Bmp", "Tiff")  # modules, which Pillow imports when it needs them
MAX_PIXELS = 1 << 26  # 67 million; decoding takes up to 16 bytes for each
_LARGE_PIXELS = 1 << 23  # an image with more is decoded alone, so that many at once do not take memory for all
_BAND_ROWS = 256
_MAX_SCANS = 100  # of a progressive JPEG; each scan visits every pixel, and encoders write about ten
_ORIENTATION = 0x0112
_TILE_WIDTH, _TILE_LENGTH = 322, 323
_LARGE = threading.RLock()


@functools.cache
def pillow() -> ModuleType:
    """Pillow's module Image, with the readers of KINDS. Raises ValueError naming the extra if it is not installed."""
    try:
        image = importlib.import_module("PIL.Image")
        for reader in _READERS:
            importlib.import_module(f"PIL.{reader}ImagePlugin")
    except ImportError as error:
        raise ValueError(f"images need Pillow; {install_command('images')}") from error
    return image


def decoded_image(content: bytes, *, max_pixels: int = MAX_PIXELS, look: Look = do_not_look) -> np.ndarray:
    """The pixels of a file, uint8 [H, W, 3]. Raises ValueError for what is not an image that can be read whole."""
    with _readable(content, max_pixels), contextlib.ExitStack() as stack:
        # WebP's decoder takes memory for all pixels when it is opened, others when they are loaded
        stack.enter_context(_room_for(_webp_size(content) or (1, 1), max_pixels))
        image = stack.enter_context(pillow().open(_Watched(content, look), formats=KINDS))
        stack.enter_context(_room_for(image.size, max_pixels))
        _check_tiles(image, max_pixels)
        look()
        image.load()
        return _rgb(_upright(image), look)


def header_size(content: bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Width and height as a file's header has them, before it is turned upright. No pixel is decoded.

    Raises ValueError as `decoded_image`, but for damage behind the header.
    """
    with _readable(content, max_pixels):
        size = _webp_size(content)
        if size is None:
            with pillow().open(io.BytesIO(content), formats=KINDS) as image:
                size = image.size
        width, height = size
        _check_size(width, height, max_pixels)
        return width, height


class _Watched(io.BytesIO):
    """A file that looks at each read whether the reader may go on."""

    def __init__(self, content: bytes, look: Look) -> None:
        super().__init__(content)
        self._look = look

    def read(self, size: int | None = -1, /) -> bytes:
        self._look()
        return super().read(-1 if size is None else size)


class Stopped(Exception):
    """Nobody waits any more for what was being made."""


@contextlib.contextmanager
def _readable(content: bytes, max_pixels: int) -> Iterator[None]:
    """Raises ValueError for whatever a reader of files raises inside."""
    image_module = pillow()
    if not content:
        raise ValueError("the image is empty: it has no bytes")
    _check_scans(content)
    try:
        # Pillow's readers raise more than OSError for damaged files: struct.error, KeyError, TypeError and others
        yield
    except image_module.UnidentifiedImageError as error:
        raise ValueError(f"the image is not a file of a kind that is read here: {', '.join(KINDS)}") from error
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning) as error:
        raise ValueError(f"the image has too many pixels; at most {max_pixels:,} are taken: make it smaller") from error
    except (MediaRefused, Stopped):
        raise
    except Exception as error:
        raise ValueError(f"the image is damaged and cannot be decoded: {error or type(error).__name__}") from error


def pixels_of(image: Image, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The pixels of a Pillow image, uint8 [H, W, 3]. Raises ValueError for one that is too large or has no colours."""
    _check_size(image.width, image.height, max_pixels)
    try:
        return _rgb(image)
    except MediaRefused:
        raise
    except Exception as error:  # a file that Pillow opened and reads only now
        raise ValueError(f"the image is damaged and cannot be decoded: {error or type(error).__name__}") from error


def pixels_of_array(array: np.ndarray, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The pixels of an array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] of uint8. Raises ValueError for another."""
    check_array(array, max_pixels)
    if array.ndim == 3 and array.shape[2] == 3:
        return np.ascontiguousarray(array)
    channels = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    return _rgb(pillow().fromarray(np.ascontiguousarray(channels)))


def check_array(array: np.ndarray, max_pixels: int) -> None:
    """Raises ValueError for an array that is no image, and for one that is too large."""
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise ValueError(
            f"the image is an array {array.dtype}{list(array.shape)}; it must be uint8 [height, width, 3], or have "
            "one channel or four"
        )
    _check_size(array.shape[1], array.shape[0], max_pixels)


@contextlib.contextmanager
def _room_for(size: tuple[int, int], max_pixels: int) -> Iterator[None]:
    """Memory for an image of this width and height, which a large one has alone. Raises for one that is too large."""
    width, height = size
    _check_size(width, height, max_pixels)
    if width * height <= _LARGE_PIXELS:
        yield
    else:
        with _LARGE:
            yield


def _check_scans(content: bytes) -> None:
    """Raises for a JPEG whose scans would cost what its size in pixels does not show."""
    if content[:2] == b"\xff\xd8" and (scans := content.count(b"\xff\xda")) > _MAX_SCANS:
        raise MediaRefused(f"the image is a JPEG of {scans} scans; at most {_MAX_SCANS} are decoded: save it anew")


def _webp_size(content: bytes) -> tuple[int, int] | None:
    """Width and height by the first chunk of a WebP; None of another file, and where it does not say so.

    Source: RFC 9649, sections 2.5 to 2.7 and 3.4.
    """
    kind, chunk = content[12:16], content[20:30]
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(chunk) < 10:
        return None
    if kind == b"VP8X":
        return 1 + int.from_bytes(chunk[4:7], "little"), 1 + int.from_bytes(chunk[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(chunk[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", chunk[6:10])
        return width & 0x3FFF, height & 0x3FFF
    return None


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise MediaRefused(f"the image is {width} x {height} pixels; it must have at least one")
    if width * height > max_pixels:
        raise MediaRefused(
            f"the image is {width} x {height}, {width * height:,} pixels; at most {max_pixels:,} are taken: make it "
            "smaller"
        )


def _check_tiles(image: Image, max_pixels: int) -> None:
    """Raises for a TIFF whose tiles are larger than any image may be: a decoder takes memory for a whole tile."""
    tags: Any = getattr(image, "tag_v2", None)
    if tags is not None:
        width, length = tags.get(_TILE_WIDTH, 1), tags.get(_TILE_LENGTH, 1)
        if not (isinstance(width, int) and isinstance(length, int)) or width * length > max_pixels:
            raise MediaRefused(f"the image is a TIFF with tiles of {width} x {length}; save it with smaller ones")


def _upright(image: Image) -> Image:
    """The image as its orientation tag says that it is to be seen."""
    how = image.getexif().get(_ORIENTATION)
    transpose = pillow().Transpose
    turns = {
        2: transpose.FLIP_LEFT_RIGHT,
        3: transpose.ROTATE_180,
        4: transpose.FLIP_TOP_BOTTOM,
        5: transpose.TRANSPOSE,
        6: transpose.ROTATE_270,
        7: transpose.TRANSVERSE,
        8: transpose.ROTATE_90,
    }
    turn = turns.get(how) if isinstance(how, int) else None
    if turn is None:
        return image
    turned = image.transpose(turn)
    turned.info = dict(image.info)  # a palette's transparency
    return turned


def _rgb(image: Image, look: Look = do_not_look) -> np.ndarray:
    """uint8 [H, W, 3]: transparent pixels on white, 16 bits cut to the upper 8."""
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, _BAND_ROWS):  # each step below copies what it is given
        look()
        bottom = min(image.height, top + _BAND_ROWS)
        pixels[top:bottom] = _rgb_of_band(image.crop((0, top, image.width, bottom)))
    return pixels


def _rgb_of_band(image: Image) -> np.ndarray:
    if image.mode.startswith("I"):
        image = _of_16_bits(image)
    if image.mode == "F":
        raise MediaRefused("the image has floating-point pixels, whose range is not known; save it with 8 or 16 bits")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = pillow().new("RGBA", image.size, (255, 255, 255, 255))
        image = pillow().alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))


def _of_16_bits(image: Image) -> Image:
    values = np.asarray(image)
    if values.size and (values.min() < 0 or values.max() > 0xFFFF):
        raise MediaRefused("the image has pixels of 32 bits, whose range is not known; save it with 8 or 16 bits")
    return pillow().fromarray((values >> 8).astype(np.uint8))
