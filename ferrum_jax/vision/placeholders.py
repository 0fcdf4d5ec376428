"""Where images stand in a prompt: each placeholder becomes as many tokens as its image has, and each run a span.

    GLM       <|begin_of_image|> <|image|> <|end_of_image|>      likewise
    Qwen      <|vision_start|> <|image_pad|> <|vision_end|>      one pad becomes n of them
    Gemma 3   <start_of_image>      becomes      \\n\\n <start_of_image> <image_soft_token> * 256 <end_of_image> \\n\\n
    Gemma 4   <|image|>             becomes      <|image> <|image|> * n <image|>
    Mistral 3 [IMG]                 becomes      [IMG] * n [IMG_BREAK] ... [IMG] * n [IMG_END], row by row

A text is expanded before it is tokenised, because line breaks of Gemma's expansion join those around it, as the
reference has it. Token ids are expanded as they are; there the expansion is encoded on its own.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from ferrum_jax.prompt import MediaSpan
from ferrum_jax.vision.image import ProcessedImage

_CROPS = (
    "Here is the original image ",
    " and here are some crops to help you see better ",
    " ",
)  # around Gemma's crops
Encode = Callable[[str], Sequence[int]]  # text to ids, no special tokens added


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placeholders:
    """The texts by which a family's prompts name an image.

    placeholder: what stands in a prompt for one. token: what stands for each of its embeddings.
    before, after: around a run of tokens. between: two rows of one, part of the run. with_crops: whether an image may
    be several runs.
    """

    placeholder: str
    token: str
    before: str = ""
    after: str = ""
    between: str = ""
    with_crops: bool = False


QWEN = Placeholders(placeholder="<|image_pad|>", token="<|image_pad|>")
GLM = Placeholders(placeholder="<|image|>", token="<|image|>")
GEMMA3 = Placeholders(
    placeholder="<start_of_image>",
    token="<image_soft_token>",
    before="\n\n<start_of_image>",
    after="<end_of_image>\n\n",
    with_crops=True,
)
GEMMA4 = Placeholders(placeholder="<|image|>", token="<|image|>", before="<|image>", after="<image|>")
PIXTRAL = Placeholders(placeholder="[IMG]", token="[IMG]", between="[IMG_BREAK]", after="[IMG_END]")
# By the processor's kind.
PLACEHOLDERS = {"qwen": QWEN, "glm": GLM, "gemma3": GEMMA3, "gemma4": GEMMA4, "pixtral": PIXTRAL}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpandedPrompt:
    """A prompt's token ids with their images: spans[i] stands for parts[i], in the order of the prompt.

    parts: one for each run of tokens: an image, or the whole or one crop of it (grid (1, h, w), a digest of its own).
    """

    token_ids: Sequence[int]
    spans: tuple[MediaSpan, ...]
    parts: tuple[ProcessedImage, ...]


def expand_text(text: str, images: Sequence[ProcessedImage], form: Placeholders, encode: Encode) -> ExpandedPrompt:
    """The ids of a text whose i-th placeholder is images[i]. Raises ValueError if there are not as many of both."""
    pieces = text.split(form.placeholder)
    _check_count(len(pieces) - 1, len(images), form)
    texts = [pieces[0]]
    for image, piece in zip(images, pieces[1:], strict=True):
        texts += [_text_of(image, form), piece]
    return _placed(encode("".join(texts)), images, form, encode)


def expand_ids(
    ids: Sequence[int], images: Sequence[ProcessedImage], form: Placeholders, encode: Encode
) -> ExpandedPrompt:
    """Like `expand_text`, for a prompt of token ids with one placeholder token for each image."""
    placeholder = _id_of(form.placeholder, encode)
    _check_count(sum(i == placeholder for i in ids), len(images), form)
    expanded, rest = array("q"), iter(images)
    for token_id in ids:
        if token_id == placeholder:
            expanded.extend(encode(_text_of(next(rest), form)))
        else:
            expanded.append(token_id)
    return _placed(expanded.tolist(), images, form, encode)


def parts_of(image: ProcessedImage) -> tuple[ProcessedImage, ...]:
    """An image as the whole and each crop of it, each with a grid (1, h, w) and a digest of its own."""
    count, rows, columns = image.grid
    if count == 1:
        return (image,)
    each = rows * columns
    return tuple(
        dataclasses.replace(
            image,
            pixels=image.pixels[index * each : (index + 1) * each],
            grid=(1, rows, columns),
            num_tokens=image.num_tokens // count,
            digest=image.digest + index.to_bytes(2, "little"),
        )
        for index in range(count)
    )


def _text_of(image: ProcessedImage, form: Placeholders) -> str:
    runs = image.grid[0] if form.with_crops else 1
    columns = (image.num_tokens // runs + 1) // image.token_rows - 1
    run = form.before + form.between.join([form.token * columns] * image.token_rows) + form.after
    if runs == 1:
        return run
    original, crops, between = _CROPS
    return original + run + crops + between.join([run] * (runs - 1))


def _placed(ids: Sequence[int], images: Sequence[ProcessedImage], form: Placeholders, encode: Encode) -> ExpandedPrompt:
    """The spans of images in ids in which every token of theirs stands already."""
    parts = [part for image in images for part in (parts_of(image) if form.with_crops else (image,))]
    own = [_id_of(token, encode) for token in (form.token, form.between) if token]
    found = np.flatnonzero(np.isin(np.asarray(ids, np.int64), own))
    runs = np.split(found, np.flatnonzero(np.diff(found) != 1) + 1) if len(found) else []
    lengths, expected = [len(run) for run in runs], [part.num_tokens for part in parts]
    if lengths != expected:
        raise ValueError(
            f"the prompt has runs of {lengths} tokens {form.token}, and its images are {expected}; write "
            f"{form.placeholder} once for each image, with a text or token between two, and {form.token} nowhere else"
        )
    spans = tuple(
        MediaSpan(kind="image", digest=part.digest, start=int(run[0]), length=part.num_tokens)
        for run, part in zip(runs, parts, strict=True)
    )
    return ExpandedPrompt(token_ids=ids, spans=spans, parts=tuple(parts))


def _check_count(found: int, given: int, form: Placeholders) -> None:
    if found != given:
        raise ValueError(
            f"the prompt has {found} placeholder{'s' * (found != 1)} {form.placeholder} and {given} "
            f"image{'s' * (given != 1)}; write one for each image, and keep the word out of texts"
        )


def _id_of(token: str, encode: Encode) -> int:
    ids = encode(token)
    if len(ids) != 1:
        raise ValueError(f"the tokenizer has no token {token}, which stands for images of this model")
    return ids[0]
