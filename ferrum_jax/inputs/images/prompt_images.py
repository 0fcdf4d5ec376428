"""PromptImages: images and videos that a user gives, as the model takes them, and the prompt with their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.inputs.identity import digest_of
from ferrum_jax.inputs.images.films import Film, VideoSources
from ferrum_jax.inputs.images.image import ProcessedVideo
from ferrum_jax.inputs.images.placeholders import PLACEHOLDERS, ExpandedPrompt, expand_ids, expand_text
from ferrum_jax.inputs.images.processor_files import read_processor, read_video_processor
from ferrum_jax.inputs.images.processors import ImageProcessor, VideoProcessor
from ferrum_jax.inputs.images.sources import ImageSources
from ferrum_jax.inputs.media.kinds import Look, do_not_look, naming

Encode = Callable[[str, bool], Sequence[int]]  # a text to ids, with special tokens or without


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptImages:
    """How prompts of a model have images and videos.

    folder: of the processors' files. sources: where images may come from. videos: None of a model that takes none.
    no_videos: why it takes none, as far as its folder says so; its images are taken nonetheless.
    """

    processor: ImageProcessor
    folder: Path
    sources: ImageSources
    videos: VideoProcessor | None = None
    no_videos: str = "its family's videos are not known here, or its folder has no video_preprocessor_config.json"

    @classmethod
    def of_folder(cls, folder: str | Path, sources: ImageSources) -> PromptImages | None:
        """The processor that a checkpoint's folder names, or None. Raises ValueError for unknown settings."""
        processor = read_processor(folder)
        if processor is None:
            return None
        found = cls(processor=processor, folder=Path(folder), sources=sources)
        try:
            videos = read_video_processor(folder)
        except ValueError as error:  # an error of who asks for a video, and of nobody else
            return dataclasses.replace(found, no_videos=str(error))
        return found if videos is None or videos.kind != processor.kind else dataclasses.replace(found, videos=videos)

    @property
    def digest(self) -> str:
        """Digest of everything that turns pixels into patches, in hexadecimal."""
        of_videos = () if self.videos is None else (dataclasses.asdict(self.videos),)
        return digest_of(self.processor.kind, dataclasses.asdict(self.processor), *of_videos)

    @property
    def video_sources(self) -> VideoSources:
        """Where videos may come from: from where images may."""
        return VideoSources(hosts=self.sources.hosts, root=self.sources.root)

    def expanded(
        self,
        content: str | Sequence[int],
        images: Sequence[Any],
        encode: Encode,
        *,
        adds: bool,
        videos: Sequence[Any] = (),
        most: int | None = None,
        look: Look = do_not_look,
    ) -> ExpandedPrompt:
        """The ids of a text or of ids with a placeholder for each image and video, with their tokens in its place.

        adds: a text gets special tokens. most: tokens that images and videos may have together, None for any number.
        look: called between steps; what it raises ends the work. All are counted by their headers before one is
        decoded.
        Raises ValueError for images and videos that cannot be read, for more than a prompt may have, and for others
        than the prompt has places for.
        """
        form = PLACEHOLDERS[self.processor.kind]
        found, num_tokens = self._counted(images, most, look)
        films = self._counted_films(videos, num_tokens, most, look)
        processed, shown = [], []
        for number in range(len(found)):
            with naming("image", number):
                processed.append(self.processor.process(self.sources.pixels(found[number], look)))
            found[number] = None  # its file is not needed any more
            look()
        for number, film in enumerate(films):
            with naming("video", number):
                shown.append(self._processed(film, look))

        def to_ids(text: str) -> Sequence[int]:
            return encode(text, adds and text not in (form.placeholder, *form.tokens(True)))  # a token as it is

        if isinstance(content, str):
            return expand_text(content, processed, form, to_ids, shown)
        return expand_ids(content, processed, form, lambda text: encode(text, False), shown)

    def _processed(self, film: Film, look: Look) -> ProcessedVideo:
        assert self.videos is not None, "films are counted by it"
        indices = self.videos.indices(film.count, film.fps)
        size = self.videos.size(len(indices), film.height, film.width)
        frames = self.video_sources.frames(film, indices, size, self.videos.resample, look)
        return self.videos.process(frames, indices, film.fps)

    def _counted_films(self, videos: Sequence[Any], num_tokens: int, most: int | None, look: Look) -> list[Film]:
        """num_tokens: of the prompt's images. Raises ValueError where all of them are more than a prompt may have."""
        if videos and self.videos is None:
            raise ValueError(
                f"the prompt has {len(videos)} videos, and this model takes none: {self.no_videos}; give frames as "
                "images"
            )
        found, num_bytes, sources = [], 0, self.video_sources
        for number, video in enumerate(videos):
            look()
            with naming("video", number):
                film = sources.found(video, look)
                assert self.videos is not None
                count = len(self.videos.indices(film.count, film.fps))
                num_tokens += self.videos.num_tokens(count, film.height, film.width)
            found.append(film)
            num_bytes += len(film.content or b"")
            _check("bytes", num_bytes, sources.max_prompt_bytes, number + 1, "may be decoded of a prompt", "videos")
            if most is not None:
                _check("tokens", num_tokens, most, number + 1, "fit, the model's max_model_len", "videos")
        return found

    def _counted(self, images: Sequence[Any], most: int | None, look: Look) -> tuple[list[Any], int]:
        """Files, arrays and Pillow images, and how many tokens they have.

        Raises ValueError where all of them are more than a prompt may have.
        """
        sources, found = self.sources, []
        num_bytes = num_pixels = num_tokens = 0
        for number, image in enumerate(images):
            look()
            with naming("image", number):
                found.append(sources.found(image))
                width, height = sources.size(found[-1])
                num_tokens += self.processor.num_tokens(height, width)
            if isinstance(found[-1], bytes):
                num_bytes, num_pixels = num_bytes + len(found[-1]), num_pixels + width * height
            _check("bytes", num_bytes, sources.max_prompt_bytes, number + 1, "may be decoded of a prompt")
            _check("pixels", num_pixels, sources.max_prompt_pixels, number + 1, "may be decoded of a prompt")
            if most is not None:
                _check("tokens", num_tokens, most, number + 1, "fit, the model's max_model_len")
        return found, num_tokens


def _check(what: str, count: int, most: int, number: int, why: str, nouns: str = "images") -> None:
    if count > most:
        raise ValueError(
            f"the first {number} {nouns} of the prompt have {count:,} {what}, and {most:,} {why}; give fewer {nouns} "
            "or smaller ones"
        )
