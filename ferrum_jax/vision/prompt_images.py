"""PromptImages: what a user gives as images of a prompt, as the model takes them, and the prompt with their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.identity import digest_of
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
        """As a checkpoint's folder says; None where it says nothing. Raises ValueError for what is not understood."""
        processor = read_processor(folder)
        return None if processor is None else cls(processor=processor, folder=Path(folder), sources=sources)

    @property
    def digest(self) -> str:
        """Of all that makes patches of pixels, in hexadecimal."""
        return digest_of(self.processor.kind, dataclasses.asdict(self.processor))

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
                processed.append(self.processor.process(self.sources.read(image)))
            except ValueError as error:
                raise ValueError(f"image {number}: {error}") from error

        def to_ids(text: str) -> Sequence[int]:
            return encode(text, adds and text not in (form.placeholder, form.token))  # a token is looked up as it is

        if isinstance(content, str):
            return expand_text(content, processed, form, to_ids)
        return expand_ids(content, processed, form, lambda text: encode(text, False))
