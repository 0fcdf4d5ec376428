"""Images or sounds of a request: checked against what the engine has room for, and placed among the prompt's tokens."""

import dataclasses
import math
from collections.abc import Sequence

from ferrum_jax.inputs.prompt import IMAGE_RUN, EncodableImage, MediaSpan, PlacedImage
from ferrum_jax.io.ints import ceil_div


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """An engine's limits of images or sounds. noun: "image", or "sound", which has frames for patches. max_tokens:
    of all images of a prompt, 0 if the engine takes no image. max_patches: of an image. merge: patches of a side of
    a token. chunk: patches that are encoded together, and the tokens that they become; of the last chunk of a sound
    some may be missing. grid: of each image, where all have the same. is_beside: a prompt has one, a clip without
    tokens, to which layers attend. counts_places: rotary positions count rows and columns of tokens.
    sees_both_ways: tokens of an image attend to all of it, and so stand in one step, which has max_whole_tokens
    beside those of other rows. breaks_rows: a token of text stands between two rows of an image's. ends_anywhere:
    frames do not fill the last chunk of a sound."""

    noun: str = "image"
    max_tokens: int = 0
    max_patches: int = 0
    merge: int = 1
    chunk: tuple[int, int] = (1, 1)
    grid: tuple[int, int, int] | None = None
    counts_places: bool = False
    sees_both_ways: bool = False
    max_whole_tokens: int = 0
    breaks_rows: bool = False
    is_beside: bool = False
    ends_anywhere: bool = False

    @property
    def kind(self) -> str:
        """The kind that their media spans have."""
        return "audio" if self.noun == "sound" else self.noun

    def num_embeddings(self, image: EncodableImage) -> int:
        if self.noun == "sound":
            return image.num_tokens
        return math.prod(image.grid) // self.chunk[0]

    def num_room(self, images: Sequence[EncodableImage]) -> int:
        """Tokens that different images take, each in runs of its own."""
        different = {image.digest: self.num_embeddings(image) for image in images}
        return sum(IMAGE_RUN * ceil_div(count, IMAGE_RUN) for count in different.values())

    def is_of_the_model(self, image: EncodableImage) -> bool:
        """Whether it has as many tokens in a prompt as the tower makes of it, with those between its rows."""
        chunks, rest = divmod(math.prod(image.grid), self.chunk[0])
        if self.noun == "sound":
            chunks += self.ends_anywhere and rest > 0
            return (self.ends_anywhere or not rest) and ceil_div(image.num_tokens, self.chunk[1]) == chunks
        return not rest and image.num_tokens == chunks + (image.grid[1] // self.merge - 1 if self.breaks_rows else 0)

    @property
    def in_words(self) -> tuple[str, str, str]:
        """How an item becomes tokens, the name of its patches, and how an item with fewer patches differs."""
        if self.noun == "sound":
            return f"up to {self.chunk[1]} tokens of {self.chunk[0]} frames, and of whole ones", "frames", "shorter"
        return f"a token of {self.merge} x {self.merge}{_BETWEEN * self.breaks_rows}", "patches", "smaller"


NO_IMAGES = ImageLimits()
_BETWEEN = ", with one more between rows"
_AS_IN_FILE = "process it as the checkpoint's processor file says"


def placed_media(
    images: Sequence[EncodableImage], media: Sequence[MediaSpan], limits: Sequence[ImageLimits]
) -> tuple[tuple[PlacedImage, ...], tuple[EncodableImage, ...]]:
    """`placed_images` of a model that may see and hear. limits: of images and of sounds, where it takes both."""
    if len(limits) == 1:
        return placed_images(images, media, limits[0])
    found, total = [], 0
    for own in limits:
        there = [image for image in images if (image.kind == "audio") == (own.kind == "audio")]
        placed, kept = placed_images(there, media, own)
        found += zip(placed, kept, strict=True)
        total += own.num_room(kept)
    if total > limits[0].max_tokens:
        raise ValueError(
            f"the prompt's images and sounds take {total} tokens, and the engine keeps those of "
            f"{limits[0].max_tokens}; give fewer or smaller ones, or raise max_image_tokens"
        )
    found.sort(key=lambda pair: pair[0].start)
    return tuple(place for place, _ in found), tuple(image for _, image in found)


def placed_images(
    images: Sequence[EncodableImage], media: Sequence[MediaSpan], limits: ImageLimits
) -> tuple[tuple[PlacedImage, ...], tuple[EncodableImage, ...]]:
    """Where the images of a prompt stand, and these themselves, in order. media: of the prompt as it runs; what was cut
    off has no span any more.

    Raises ValueError for images that the engine cannot take, and for spans that are not theirs.
    """
    if limits.is_beside:
        return _beside(images, media, limits)
    kind, nouns = limits.kind, limits.noun + "s"
    if not images:
        if limits.max_tokens and any(span.kind == kind for span in media):
            raise ValueError(
                f"the prompt has media spans of kind {kind!r} and no {nouns}, and this model would compute something "
                f"else under their keys; give the {nouns}"
            )
        return (), ()
    if not limits.max_tokens:
        raise ValueError(
            f"the prompt has {len(images)} images, and this model takes none; leave them out, or serve one that sees "
            "images with max_image_tokens above 0"
        )
    spans = sorted((span for span in media if span.kind == kind), key=lambda span: span.start)
    kept = tuple(images[len(images) - len(spans) :])
    if len(spans) > len(images) or any(
        (span.digest, span.length) != (image.digest, image.num_tokens) for span, image in zip(spans, kept, strict=True)
    ):
        raise ValueError(
            f"media spans of kind {kind!r} are not those of the {nouns}; give one for each, in their order"
        )
    for number, image in enumerate(kept):
        _check(number, image, limits)
    if (total := limits.num_room(kept)) > limits.max_tokens:
        less = "shorter sounds" if kind == "audio" else "smaller images, shorter videos"
        raise ValueError(
            f"the prompt's {nouns} take {total} tokens, and the engine keeps those of {limits.max_tokens}; give fewer "
            f"or {less}, or raise max_image_tokens"
        )
    return tuple(_placed(span, image, limits) for span, image in zip(spans, kept, strict=True)), kept


def _check(number: int, image: EncodableImage, limits: ImageLimits) -> None:
    """Raises ValueError for an image that the model's tower, or the engine, does not take."""
    noun, count = limits.noun, math.prod(image.grid)
    made, patches, less = limits.in_words
    if limits.grid is not None and image.grid != limits.grid:
        raise ValueError(
            f"{noun} {number} has a grid of {image.grid} {patches}, and the model's tower takes {limits.grid} alone; "
            f"{_AS_IN_FILE}"
        )
    if not limits.is_of_the_model(image):
        raise ValueError(
            f"{noun} {number} has {image.num_tokens} tokens and {count} {patches}, and the model makes {made}; "
            f"{_AS_IN_FILE}"
        )
    if count > limits.max_patches:
        raise ValueError(
            f"{noun} {number} has {count} {patches}, and max_image_patches is {limits.max_patches}; give a {less} "
            f"{noun}, or raise it"
        )
    if limits.sees_both_ways and image.num_tokens > limits.max_whole_tokens:
        raise ValueError(
            f"image {number} has {image.num_tokens} tokens, which see each other and so are computed in one step, "
            f"and a step has room for {limits.max_whole_tokens} beside those of other rows; give a smaller image, "
            "raise max_num_batched_tokens, or lower max_num_seqs"
        )


def _beside(
    clips: Sequence[EncodableImage], media: Sequence[MediaSpan], limits: ImageLimits
) -> tuple[tuple[PlacedImage, ...], tuple[EncodableImage, ...]]:
    """The clip of a prompt to whose layers it belongs. Raises ValueError where there is not one, or it is another."""
    if len(clips) != 1:
        raise ValueError(
            f"the prompt has {len(clips)} sounds, and this model transcribes one; give one window of a sound beside it"
        )
    clip = clips[0]
    if [(span.digest, span.start) for span in media] != [(clip.digest, 0)]:
        raise ValueError("the media span of a sound is not its own; give one, at the start of the prompt")
    if clip.grid != limits.grid:
        raise ValueError(
            f"the sound has {clip.grid[1]} frames, and the model's encoder takes {(limits.grid or clip.grid)[1]}; "
            "process it as the checkpoint's processor file says"
        )
    whole = PlacedImage(
        start=0, length=0, digest=clip.digest, grid=clip.grid, is_beside=True, kind=clip.kind, seconds=clip.seconds
    )
    return (whole,), tuple(clips)


def _placed(span: MediaSpan, image: EncodableImage, limits: ImageLimits) -> PlacedImage:
    frames, rows, columns = image.grid
    rope_grid = (frames, rows // limits.merge, columns // limits.merge) if limits.counts_places else None
    return PlacedImage(
        start=span.start,
        length=span.length,
        digest=span.digest,
        grid=image.grid,
        rope_grid=rope_grid,
        sees_both_ways=limits.sees_both_ways,
        columns=columns // limits.merge if limits.breaks_rows else 0,
        kind=image.kind,
        seconds=image.seconds,
    )
