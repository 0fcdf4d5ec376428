"""Where images and videos stand in a prompt: a placeholder becomes as many tokens as its image has, each run a span.

    GLM       <|begin_of_image|> <|image|> <|end_of_image|>      likewise
    Qwen      <|vision_start|> <|image_pad|> <|vision_end|>      one pad becomes n of them
    Gemma 3   <start_of_image>      becomes      \\n\\n <start_of_image> <image_soft_token> * 256 <end_of_image> \\n\\n
    Gemma 4   <|image|>             becomes      <|image> <|image|> * n <image|>
    Mistral 3 [IMG]                 becomes      [IMG] * n [IMG_BREAK] ... [IMG] * n [IMG_END], row by row

A video's becomes a run for each group of its frames, and before each stands when in the video it is:

    Qwen      <|vision_start|> <|video_pad|> <|vision_end|>, or the pad alone, becomes
              <0.5 seconds><|vision_start|> <|video_pad|> * n <|vision_end|> <1.5 seconds> ..
    Gemma 4   <|video|>       becomes   00:00 <|image> <|video|> * n <image|> 00:01 <|image> ..

A text is expanded before it is tokenised, because line breaks of Gemma's expansion join those around it, as the
reference has it. Token ids are expanded as they are; there the expansion is encoded on its own.
"""

import dataclasses
import re
from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ferrum_jax.inputs.images.image import ProcessedImage, ProcessedVideo
from ferrum_jax.inputs.prompt import MediaSpan

_CROPS = (
    "Here is the original image ",
    " and here are some crops to help you see better ",
    " ",
)  # around Gemma's crops
Encode = Callable[[str], Sequence[int]]  # text to ids, no special tokens added


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoPlaceholders:
    """The texts by which a family's prompts name a video.

    placeholder: what stands in a prompt for one. token: what stands for each of its embeddings. stamp: from a group's
    second to the text before it. before, after: around a run of tokens. between: two groups. replaces_wrap: `before`
    and `after` around the placeholder itself are part of it, as a template of images writes them.
    """

    placeholder: str
    token: str
    stamp: Callable[[float], str]
    before: str
    after: str
    between: str = ""
    replaces_wrap: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placeholders:
    """The texts by which a family's prompts name an image.

    placeholder: what stands in a prompt for one. token: what stands for each of its embeddings.
    before, after: around a run of tokens. between: two rows of one, part of the run. with_crops: whether an image may
    be several runs. video: how a video is named, None of a family that takes none here.
    """

    placeholder: str
    token: str
    before: str = ""
    after: str = ""
    between: str = ""
    with_crops: bool = False
    video: VideoPlaceholders | None = None

    def tokens(self, with_videos: bool) -> tuple[str, ...]:
        """The texts that stand for a token of an image, or of a video: a tokenizer need not know those of videos."""
        of_videos = self.video.token if with_videos and self.video is not None else ""
        return tuple(text for text in (self.token, self.between, of_videos) if text)


QWEN = Placeholders(
    placeholder="<|image_pad|>",
    token="<|image_pad|>",
    video=VideoPlaceholders(
        placeholder="<|video_pad|>",
        token="<|video_pad|>",
        stamp=lambda second: f"<{second:.1f} seconds>",
        before="<|vision_start|>",
        after="<|vision_end|>",
        replaces_wrap=True,
    ),
)
GLM = Placeholders(placeholder="<|image|>", token="<|image|>")
GEMMA3 = Placeholders(
    placeholder="<start_of_image>",
    token="<image_soft_token>",
    before="\n\n<start_of_image>",
    after="<end_of_image>\n\n",
    with_crops=True,
)
GEMMA4 = Placeholders(
    placeholder="<|image|>",
    token="<|image|>",
    before="<|image>",
    after="<image|>",
    video=VideoPlaceholders(
        placeholder="<|video|>",
        token="<|video|>",
        stamp=lambda second: f"{int(second // 60):02d}:{int(second % 60):02d} ",
        before="<|image>",
        after="<image|>",
        between=" ",
    ),
)
PIXTRAL = Placeholders(placeholder="[IMG]", token="[IMG]", between="[IMG_BREAK]", after="[IMG_END]")
# By the processor's kind.
PLACEHOLDERS = {"qwen": QWEN, "glm": GLM, "gemma3": GEMMA3, "gemma4": GEMMA4, "pixtral": PIXTRAL}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpandedPrompt:
    """A prompt's token ids with their images: spans[i] stands for parts[i], in the order of the prompt.

    parts: one for each run of tokens: an image, the whole or one crop of it, or a group of a video's frames, the last
    two with a grid (1, h, w) and a digest of their own.
    """

    token_ids: Sequence[int]
    spans: tuple[MediaSpan, ...]
    parts: tuple[ProcessedImage, ...]


def expand_text(
    text: str,
    images: Sequence[ProcessedImage],
    form: Placeholders,
    encode: Encode,
    videos: Sequence[ProcessedVideo] = (),
) -> ExpandedPrompt:
    """The ids of a text whose i-th placeholder of either kind is images[i] or videos[i].

    Raises ValueError if there are not as many of both.
    """
    if videos and form.video is not None and form.video.replaces_wrap:
        how = form.video
        text = text.replace(f"{how.before}{how.placeholder}{how.after}", how.placeholder)
    named = "|".join(map(re.escape, _names(form)))
    pieces = re.split(f"({named})", text)
    media = _Media(pieces[1::2], images, videos, form)
    texts = [pieces[0]]
    for name, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        texts += [media.text_of_next(name), piece]
    return _placed(encode("".join(texts)), media.parts, form, encode, form.tokens(bool(videos)))


def expand_ids(
    ids: Sequence[int],
    images: Sequence[ProcessedImage],
    form: Placeholders,
    encode: Encode,
    videos: Sequence[ProcessedVideo] = (),
) -> ExpandedPrompt:
    """Like `expand_text`, for a prompt of token ids with one placeholder token for each image and video."""
    names = {_id_of(form.placeholder, encode): form.placeholder}
    if form.video is not None and videos:
        names[_id_of(form.video.placeholder, encode)] = form.video.placeholder
        ids = _without_wraps(ids, form.video, encode)
    media = _Media([names[i] for i in ids if i in names], images, videos, form)
    expanded = array("q")
    for token_id in ids:
        if token_id in names:
            expanded.extend(encode(media.text_of_next(names[token_id])))
        else:
            expanded.append(token_id)
    return _placed(expanded.tolist(), media.parts, form, encode, form.tokens(bool(videos)))


def _without_wraps(ids: Sequence[int], how: VideoPlaceholders, encode: Encode) -> Sequence[int]:
    """The ids without those that wrap a video's placeholder, where they are part of it."""
    if not how.replaces_wrap:
        return ids
    wrapped = [_id_of(text, encode) for text in (how.before, how.placeholder, how.after)]
    found, place = list[int](), 0
    while place < len(ids):
        is_wrapped = list(ids[place : place + 3]) == wrapped
        found.append(wrapped[1] if is_wrapped else ids[place])
        place += 3 if is_wrapped else 1
    return found


class _Media:
    """Images and videos of a prompt as their placeholders come. parts: of those that came until now, in order."""

    def __init__(
        self,
        found: Sequence[str],
        images: Sequence[ProcessedImage],
        videos: Sequence[ProcessedVideo],
        form: Placeholders,
    ) -> None:
        """found: placeholders of the prompt. Raises ValueError if there are not as many of each kind."""
        _check_count(found, form.placeholder, len(images), "image")
        if form.video is not None:
            _check_count(found, form.video.placeholder, len(videos), "video")
        self.parts: list[ProcessedImage] = []
        self._form, self._images, self._videos = form, iter(images), iter(videos)

    def text_of_next(self, name: str) -> str:
        """The text of the next image, or of the next video where the placeholder is one's."""
        if name == self._form.placeholder:
            image = next(self._images)
            self.parts += parts_of(image) if self._form.with_crops else (image,)
            return _text_of(image, self._form)
        video, how = next(self._videos), self._form.video
        assert how is not None, "only forms with videos have their placeholders"
        self.parts += video.groups
        return how.between.join(
            how.stamp(second) + how.before + how.token * group.num_tokens + how.after
            for group, second in zip(video.groups, video.seconds, strict=True)
        )


def _names(form: Placeholders) -> Iterator[str]:
    yield form.placeholder
    if form.video is not None:
        yield form.video.placeholder


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


def _placed(
    ids: Sequence[int], parts: Sequence[ProcessedImage], form: Placeholders, encode: Encode, tokens: Sequence[str]
) -> ExpandedPrompt:
    """The spans of parts in ids in which every token of theirs stands already. tokens: that stand for any of theirs."""
    own = [_id_of(token, encode) for token in tokens]
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


def _check_count(found: Sequence[str], name: str, given: int, noun: str) -> None:
    count = sum(each == name for each in found)
    if count != given:
        raise ValueError(
            f"the prompt has {count} placeholder{'s' * (count != 1)} {name} and {given} {noun}{'s' * (given != 1)}; "
            f"write one for each {noun}, and keep the word out of texts"
        )


def _id_of(token: str, encode: Encode) -> int:
    ids = encode(token)
    if len(ids) != 1:
        raise ValueError(f"the tokenizer has no token {token}, which stands for images of this model")
    return ids[0]
