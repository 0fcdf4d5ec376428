"""PromptImages: what a user gives as images of a prompt, as the model takes them, and the prompt with their tokens."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.spec.identity import digest_of
from ferrum_jax.vision.decoding import Look, do_not_look
from ferrum_jax.vision.placeholders import PLACEHOLDERS, ExpandedPrompt, expand_ids, expand_text
from ferrum_jax.vision.processor_files import read_processor
from ferrum_jax.vision.processors import ImageProcessor
from ferrum_jax.vision.sources import ImageSources

Encode = Callable[[str, bool], Sequence[int]]  # a text to ids, with special tokens or without


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptImages:
    """How prompts of a model have images. folder: of the processor's file. sources: where images may come from."""

    processor: ImageProcessor
    folder: Path
    sources: ImageSources

    @classmethod
    def of_folder(cls, folder: str | Path, sources: ImageSources) -> PromptImages | None:
        """The processor that a checkpoint's folder names; None without one. Raises ValueError for unknown settings."""
        processor = read_processor(folder)
        return None if processor is None else cls(processor=processor, folder=Path(folder), sources=sources)

    @property
    def digest(self) -> str:
        """Digest of everything that turns pixels into patches, in hexadecimal."""
        return digest_of(self.processor.kind, dataclasses.asdict(self.processor))

    def expanded(
        self,
        content: str | Sequence[int],
        images: Sequence[Any],
        encode: Encode,
        *,
        adds: bool,
        most: int | None = None,
        look: Look = do_not_look,
    ) -> ExpandedPrompt:
        """The ids of a text or of ids with a placeholder for each image, with their tokens in its place.

        adds: a text gets special tokens. most: tokens that images may have together, None for any number. look: called
        between steps; what it raises ends the work. All images are counted by their headers before one is decoded.
        Raises ValueError for images that cannot be read, for more than a prompt may have, and for others than the
        prompt has places for.
        """
        form = PLACEHOLDERS[self.processor.kind]
        found = self._counted(images, most, look)
        processed = []
        for number in range(len(found)):
            with _naming(number):
                processed.append(self.processor.process(self.sources.pixels(found[number], look)))
            found[number] = None  # its file is not needed any more
            look()

        def to_ids(text: str) -> Sequence[int]:
            return encode(text, adds and text not in (form.placeholder, form.token, form.between))  # a token as it is

        if isinstance(content, str):
            return expand_text(content, processed, form, to_ids)
        return expand_ids(content, processed, form, lambda text: encode(text, False))

    def _counted(self, images: Sequence[Any], most: int | None, look: Look) -> list[Any]:
        """Files, arrays and Pillow images. Raises ValueError where all of them are more than a prompt may have."""
        sources, found = self.sources, []
        num_bytes = num_pixels = num_tokens = 0
        for number, image in enumerate(images):
            look()
            with _naming(number):
                found.append(sources.found(image))
                width, height = sources.size(found[-1])
                num_tokens += self.processor.num_tokens(height, width)
            if isinstance(found[-1], bytes):
                num_bytes, num_pixels = num_bytes + len(found[-1]), num_pixels + width * height
            _check("bytes", num_bytes, sources.max_prompt_bytes, number + 1, "may be decoded of a prompt")
            _check("pixels", num_pixels, sources.max_prompt_pixels, number + 1, "may be decoded of a prompt")
            if most is not None:
                _check("tokens", num_tokens, most, number + 1, "fit, the model's max_model_len")
        return found


@contextlib.contextmanager
def _naming(number: int) -> Iterator[None]:
    """Raises ValueError with the image's number."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"image {number}: {error}") from error


def _check(what: str, count: int, most: int, num_images: int, why: str) -> None:
    if count > most:
        raise ValueError(
            f"the first {num_images} images of the prompt have {count:,} {what}, and {most:,} {why}; give fewer images "
            "or smaller ones"
        )
