"""PromptImages: what a user gives as images of a prompt, as the model takes them, and the prompt with their tokens."""

from __future__ import annotations

import base64
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ferrum_jax.vision.decoding import decoded_image, pixels_of, pixels_of_array
from ferrum_jax.vision.placeholders import PLACEHOLDERS, ExpandedPrompt, expand_ids, expand_text
from ferrum_jax.vision.processor_files import read_processor
from ferrum_jax.vision.processors import ImageProcessor

Encode = Callable[[str, bool], Sequence[int]]  # a text to ids, with special tokens or without


def read_pixels(given: Any) -> np.ndarray:
    """The pixels of a file's bytes, path or data: URL, of an array or of a Pillow image, uint8 [H, W, 3].

    A string is no path, for it may have come over the network. Raises ValueError for what is none of these, and for an
    image that cannot be read.
    """
    if isinstance(given, np.ndarray):
        return pixels_of_array(given)
    if isinstance(given, bytes):
        return decoded_image(given)
    if isinstance(given, str):
        return decoded_image(_of_data_url(given))
    if isinstance(given, os.PathLike):
        try:
            return decoded_image(Path(given).read_bytes())
        except OSError as error:
            raise ValueError(f"the image {os.fspath(given)!r} cannot be read: {error.strerror or error}") from error
    if hasattr(given, "size") and hasattr(given, "mode"):
        return pixels_of(given)
    raise ValueError(
        f"an image is a {type(given).__name__}; give the bytes of a file, a pathlib.Path, a data: URL, an array uint8 "
        "[height, width, 3] or a Pillow image"
    )


def _of_data_url(url: str) -> bytes:
    """The content of a data: URL. Raises ValueError for another URL and for one that is not base64."""
    head, comma, content = url.partition(",")
    if not (head.startswith("data:") and head.endswith(";base64") and comma):
        raise ValueError(
            f"an image is the text {url[:60]!r}; of texts only data: URLs with ;base64 are taken: give the content, or "
            "a pathlib.Path of a file"
        )
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise ValueError(f"the image's data: URL is not base64: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptImages:
    """How prompts of a model have images. folder: of the processor's file. read: from what a user gives to pixels."""

    processor: ImageProcessor
    folder: Path
    read: Callable[[Any], np.ndarray] = read_pixels

    @classmethod
    def of_folder(cls, folder: str | Path) -> PromptImages | None:
        """As a checkpoint's folder says; None where it says nothing. Raises ValueError for what is not understood."""
        processor = read_processor(folder)
        return None if processor is None else cls(processor=processor, folder=Path(folder))

    def expanded(
        self, content: str | Sequence[int], images: Sequence[Any], encode: Encode, *, adds: bool
    ) -> ExpandedPrompt:
        """The ids of a text or of ids with a placeholder for each image, with their tokens in its place.

        adds: a text gets special tokens. Raises ValueError for images that cannot be read, and for others than the
        prompt has places for.
        """
        form = PLACEHOLDERS[self.processor.kind]
        processed = []
        for number, image in enumerate(images):
            try:
                processed.append(self.processor.process(self.read(image)))
            except ValueError as error:
                raise ValueError(f"image {number}: {error}") from error

        def to_ids(text: str) -> Sequence[int]:
            return encode(text, adds and text not in (form.placeholder, form.token))  # a token is looked up as it is

        if isinstance(content, str):
            return expand_text(content, processed, form, to_ids)
        return expand_ids(content, processed, form, lambda text: encode(text, False))
