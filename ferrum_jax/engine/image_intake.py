"""Images of a request: checked against what the engine has room for, and placed among the prompt's tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ferrum_jax.ints import ceil_div
from ferrum_jax.prompt import IMAGE_RUN, EncodableImage, MediaSpan, PlacedImage


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What an engine has room for. max_tokens: of all images of a prompt; 0 of one that takes none. max_patches: of an
    image. merge: patches of a side of a token. grid: of each image, where all have the same. is_beside: a prompt has
    one, a clip without tokens, to which layers attend. counts_places: rotary
    positions count rows and columns of tokens. sees_both_ways: tokens of an image attend to all of it, and so stand in
    one step, which has max_whole_tokens beside those of other rows. breaks_rows: a token of text stands between two
    rows of an image's."""

    max_tokens: int = 0
    max_patches: int = 0
    merge: int = 1
    patches_per_token: int = 1
    grid: tuple[int, int, int] | None = None
    counts_places: bool = False
    sees_both_ways: bool = False
    max_whole_tokens: int = 0
    breaks_rows: bool = False
    is_beside: bool = False

    def num_embeddings(self, image: EncodableImage) -> int:
        return math.prod(image.grid) // self.patches_per_token

    def num_tokens(self, image: EncodableImage) -> int:
        """Tokens that an image has in a prompt, with those between its rows."""
        return self.num_embeddings(image) + (image.grid[1] // self.merge - 1 if self.breaks_rows else 0)


NO_IMAGES = ImageLimits()
_BETWEEN = ", with one more between rows"


def placed_images(
    images: Sequence[EncodableImage], media: Sequence[MediaSpan], limits: ImageLimits
) -> tuple[tuple[PlacedImage, ...], tuple[EncodableImage, ...]]:
    """Where the images of a prompt stand, and these themselves, in order. media: of the prompt as it runs; what was cut
    off has no span any more.

    Raises ValueError for images that the engine cannot take, and for spans that are not theirs.
    """
    if limits.is_beside:
        return _beside(images, media, limits)
    if not images:
        if limits.max_tokens and any(span.kind == "image" for span in media):
            raise ValueError(
                "the prompt has media spans of kind 'image' and no images, and this model would compute something else "
                "under their keys; give the images"
            )
        return (), ()
    if not limits.max_tokens:
        raise ValueError(
            f"the prompt has {len(images)} images, and this model takes none; leave them out, or serve one that sees "
            "images with max_image_tokens above 0"
        )
    spans = sorted((span for span in media if span.kind == "image"), key=lambda span: span.start)
    kept = tuple(images[len(images) - len(spans) :])
    if len(spans) > len(images) or any(
        (span.digest, span.length) != (image.digest, image.num_tokens) for span, image in zip(spans, kept, strict=True)
    ):
        raise ValueError("media spans of kind 'image' are not those of the images; give one for each, in their order")
    for number, image in enumerate(kept):
        if limits.grid is not None and image.grid != limits.grid:
            raise ValueError(
                f"image {number} has a grid of {image.grid} patches, and the model's tower takes {limits.grid} alone; "
                "process it as the checkpoint's processor file says"
            )
        if math.prod(image.grid) % limits.patches_per_token or image.num_tokens != limits.num_tokens(image):
            raise ValueError(
                f"image {number} has {image.num_tokens} tokens and {math.prod(image.grid)} patches, and the model "
                f"makes a token of {limits.merge} x {limits.merge}{_BETWEEN * limits.breaks_rows}; process it as the "
                "checkpoint's processor file says"
            )
        if math.prod(image.grid) > limits.max_patches:
            raise ValueError(
                f"image {number} has {math.prod(image.grid)} patches, and max_image_patches is {limits.max_patches}; "
                "give a smaller image, or raise it"
            )
        if limits.sees_both_ways and image.num_tokens > limits.max_whole_tokens:
            raise ValueError(
                f"image {number} has {image.num_tokens} tokens, which see each other and so are computed in one step, "
                f"and a step has room for {limits.max_whole_tokens} beside those of other rows; give a smaller image, "
                "raise max_num_batched_tokens, or lower max_num_seqs"
            )
    if (total := _room(kept, limits)) > limits.max_tokens:
        raise ValueError(
            f"the prompt's images take {total} tokens, and the engine keeps those of {limits.max_tokens}; give fewer "
            "or smaller images, shorter videos, or raise max_image_tokens"
        )
    return tuple(_placed(span, image, limits) for span, image in zip(spans, kept, strict=True)), kept


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
    return (PlacedImage(start=0, length=0, digest=clip.digest, grid=clip.grid, is_beside=True),), tuple(clips)


def _room(images: Sequence[EncodableImage], limits: ImageLimits) -> int:
    """Tokens that different images take, each in runs of its own."""
    different = {image.digest: limits.num_embeddings(image) for image in images}
    return sum(IMAGE_RUN * ceil_div(count, IMAGE_RUN) for count in different.values())


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
    )
