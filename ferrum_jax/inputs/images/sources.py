"""The images that a user may give: Pillow images, uint8 arrays, and what `MediaSources` has for media of all kinds."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from ferrum_jax.inputs.images import decoding
from ferrum_jax.inputs.media.kinds import IMAGE, MediaKind
from ferrum_jax.inputs.media.media_sources import MediaSources


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSources(MediaSources):
    """max_pixels: of an image, before it is decoded. max_prompt_pixels: of all files of a prompt together."""

    kind: ClassVar[MediaKind] = IMAGE
    max_pixels: int = decoding.MAX_PIXELS
    max_prompt_pixels: int = 4 * decoding.MAX_PIXELS

    def read(self, given: Any) -> np.ndarray:
        """The pixels, uint8 [H, W, 3], of what a Python user gives. Raises ValueError saying what is wrong with it."""
        return self.pixels(self.found(given))

    def found(self, given: Any) -> Any:
        """The image that a Python user gives, with a file's bytes for its path or URL. Raises ValueError for others."""
        if is_picture(given):
            return given
        content = self.content(given)
        if content is None:
            raise ValueError(
                f"the image is a {type(given).__name__}; it must be a Pillow image, a uint8 array [height, width, 3], "
                "bytes, a pathlib.Path or a URL"
            )
        return content

    def size(self, found: Any) -> tuple[int, int]:
        """Width and height of what was found, from its header. Raises ValueError as `pixels`."""
        if isinstance(found, bytes):
            return decoding.header_size(found, max_pixels=self.max_pixels)
        if isinstance(found, np.ndarray):
            decoding.check_array(found, self.max_pixels)
            return found.shape[1], found.shape[0]
        return found.width, found.height

    def pixels(self, found: Any, look: decoding.Look = decoding.do_not_look) -> np.ndarray:
        """The pixels, uint8 [H, W, 3], of what was found. Raises ValueError saying what is wrong with it."""
        if isinstance(found, bytes):
            return decoding.decoded_image(found, max_pixels=self.max_pixels, look=look)
        if isinstance(found, np.ndarray):
            return decoding.pixels_of_array(found, max_pixels=self.max_pixels)
        return decoding.pixels_of(found, max_pixels=self.max_pixels)


def is_picture(given: object) -> bool:
    """Whether it is an array or a Pillow image, known as Pillow's without importing Pillow to ask."""
    return isinstance(given, np.ndarray) or (hasattr(given, "getbands") and hasattr(given, "convert"))
