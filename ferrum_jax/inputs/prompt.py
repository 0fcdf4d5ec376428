"""Users' prompts, and the parts of one that an engine reads.

A prompt is a string, token ids, or chat messages; or one of these under its name in a mapping, as in vLLM,
with what else belongs to it:

    {"prompt": text, "cache_salt": "tenant-a"}
    {"prompt_token_ids": ids, "media": [MediaSpan(...), ...]}
    {"prompt": text, "add_special_tokens": False}
    {"prompt": "<|vision_start|><|image_pad|><|vision_end|>What is it?", "images": [Path("photo.jpg")]}
    {"messages": [{"role": "user", "content": [{"type": "image", "image": array}, {"type": "text", "text": "What?"}]}]}
    {"messages": messages, "continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    {"prompt": text, "prompt_name": "query", "truncate": True}

add_special_tokens says whether the tokenizer adds BOS and EOS to the text; by default it does to a prompt and not to a
chat, whose template writes its own. Messages go with the template's arguments, as in `LLM.chat`, and texts to embed
with those of `LLM.embed`.
Prompts with different salts never share cached blocks. A media span says that tokens stand for content that
their ids do not show; it enters the keys of the blocks that it touches. images are bytes of files, pathlib.Path,
arrays, Pillow images or data: URLs, one for each placeholder of the text, in order; a chat has them in its messages,
also as OpenAI's {"type": "image_url", "image_url": {"url": "data:..."}}. videos are likewise files, arrays or lists of
frames, or {"frames": [...], "fps": 2}. sounds are files or (samples, rate), in a chat also OpenAI's {"type":
"input_audio", "input_audio": {"data": base64, "format": "wav"}}; for a model whose layers attend to one they are
processed windows, as `LLM.transcribe` makes them, beside token ids. A string is no path: it may be a stranger's.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from ferrum_jax.io.error_text import quoted
from ferrum_jax.io.ints import ceil_div

Message = Mapping[str, Any]
Content = str | Sequence[int] | Sequence[Message]
Prompt: TypeAlias = "Content | Mapping[str, Any] | PromptParts"  # the last where it was taken apart before

SEEN = ("image", "video", "audio")  # what parts of messages are, beside texts
INPUT_AUDIO = "input_audio"  # the type of a part that has a sound as OpenAI writes it
CONTENTS = ("prompt", "prompt_token_ids", "messages")
TEMPLATE_ARGUMENTS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
VECTOR_ARGUMENTS = ("prompt_name", "pooling", "normalize", "truncate")
_LONGEST_FORMAT = 16  # letters of a sound's format
_FIELDS = (*CONTENTS, "adapter", "cache_salt", "media", "images", "videos", "sounds", "add_special_tokens")
_FIELDS += TEMPLATE_ARGUMENTS + VECTOR_ARGUMENTS


class PromptIds(Protocol):
    """From a prompt to its token ids as the model will see them. Raises ValueError for one that it cannot."""

    def __call__(
        self,
        prompt: Prompt,
        /,
        *,
        embeds: bool = False,
        now: datetime.datetime | None = None,
        kept: int | None = None,
    ) -> Sequence[int]:
        """embeds: of a text whose vector is asked for, as the checkpoint says. now, kept: see
        `PromptEncoder.token_ids`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaSpan:
    """Tokens [start, start + length) of a prompt stand for one item of content.

    kind: "image", "audio", ... digest: of the item as the model sees it, so equal content has equal bytes.
    Raises ValueError with the field and its value.
    """

    kind: str
    digest: bytes
    start: int
    length: int

    def __post_init__(self) -> None:
        for field, type_ in (("kind", str), ("digest", bytes)):
            value = getattr(self, field)
            if not isinstance(value, type_) or not value:
                raise ValueError(
                    f"a media span's {field} is {quoted(value)}; it must be {type_.__name__} and not empty"
                )
        for field, least in (("start", 0), ("length", 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"a media span's {field} is {quoted(value)}; it must be a whole number, {least} or more"
                )

    @property
    def end(self) -> int:
        return self.start + self.length


IMAGE_RUN = 16  # tokens of an image whose embeddings lie together on the device


class EncodableImage(Protocol):
    """An image as a model's processor made it, ready for the tower."""

    @property
    def patches(self) -> np.ndarray: ...  # [patches, values of one] float32

    @property
    def grid(self) -> tuple[int, int, int]: ...  # frames, rows, columns of patches

    @property
    def num_tokens(self) -> int: ...  # that it has in a prompt

    @property
    def digest(self) -> bytes: ...  # of pixels, grid and the processor's settings

    @property
    def kind(self) -> str: ...  # one of SEEN

    @property
    def seconds(self) -> float: ...  # of a sound


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedImage:
    """An image whose tokens stand at [start, start + length) of a prompt.

    digest: of its pixels, grid and the processor's settings. grid: frames, rows and columns of its patches. rope_grid:
    of its tokens, for models whose rotary positions count these; None where tokens of images count as others do.
    sees_both_ways: each of its tokens attends to all of them, so a step computes its last tokens together. columns: of
    its tokens, where one of text stands between two rows and counts as the image's; 0 where all stand in a run.
    is_beside: it has no tokens; layers attend to it beside those of its sequence. length is 0 then.
    kind: one of SEEN; each group of a video's frames is placed by itself. seconds: of a sound.
    """

    start: int
    length: int
    digest: bytes
    grid: tuple[int, int, int]
    rope_grid: tuple[int, int, int] | None = None
    sees_both_ways: bool = False
    columns: int = 0
    is_beside: bool = False
    kind: str = "image"
    seconds: float = 0.0

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_embeddings(self) -> int:
        """How many of its tokens are not text."""
        return self.length - (self.length // (self.columns + 1) if self.columns else 0)

    @property
    def num_runs(self) -> int:
        """Runs that it takes on the device."""
        return 1 if self.is_beside else ceil_div(self.num_embeddings, IMAGE_RUN)

    def embeddings_of(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64: which of its embeddings its tokens [start, stop) have, -1 for one of text."""
        within = np.arange(start, stop)
        if not self.columns:
            return within
        row, column = np.divmod(within, self.columns + 1)
        return np.where(column == self.columns, -1, row * self.columns + column)

    @property
    def num_patches(self) -> int:
        return math.prod(self.grid)

    @property
    def rope_shift(self) -> int:
        """The change of rotary positions behind the image beyond its number of tokens; mostly below 0."""
        return 0 if self.rope_grid is None else max(self.rope_grid) - self.length


def rope_shift(images: Sequence[PlacedImage], position: int) -> int:
    """The rotary position of a token outside of images less its position. images: of its sequence."""
    return sum(image.rope_shift for image in images if image.end <= position)


def rope_positions(images: Sequence[PlacedImage], start: int, stop: int) -> np.ndarray:
    """[3, stop - start] int32: time, row and column of tokens [start, stop) of a sequence with these images, in order.

    Tokens of text have three equal numbers. An image's tokens have the next place in time, and count rows and columns
    from it; text goes on behind the largest of these. Source: Wang et al. 2024 (Qwen2-VL), M-RoPE.
    """
    found = np.broadcast_to(np.arange(start, stop, dtype=np.int32), (3, stop - start)).copy()
    for image in images:
        if image.rope_grid is not None and image.start < stop:
            first = found[:, max(image.start - start, 0) : max(image.end - start, 0)]
            if first.shape[1]:
                places = np.indices(image.rope_grid, np.int32).reshape(3, -1)
                base = image.start + rope_shift(images, image.start)
                cut = max(start - image.start, 0)
                first[:] = places[:, cut : cut + first.shape[1]] + base
            found[:, max(image.end - start, 0) :] += image.rope_shift
    return found


def seen_ends(images: Sequence[PlacedImage], start: int, stop: int) -> np.ndarray:
    """[stop - start] int32: of tokens [start, stop) the position behind the last that each sees, 0 for its own.

    Tokens of images that see both ways see their whole image.
    """
    found = np.zeros(stop - start, np.int32)
    for image in images:
        if image.sees_both_ways:
            found[max(image.start - start, 0) : max(image.end - start, 0)] = image.end
    return found


def whole_chunk(images: Sequence[PlacedImage], start: int, count: int, most: int) -> int:
    """How many tokens from `start` on a step computes, so that it ends inside no image that is seen whole.

    count: of tokens without that rule. An image that they would only begin is computed whole if it has at most `most`
    tokens, else not at all.
    """
    for image in images:
        if image.sees_both_ways and image.start < start + count < image.end:
            if image.start > start:
                return image.start - start
            return image.end - start if image.end - start <= most else 0
    return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptParts:
    """A prompt taken apart; adapter and cache_salt "" are none.

    add_special_tokens: None is the default of its kind. template: arguments of the chat template by name. vector: how
    its vector is made, by names of arguments of `LLM.embed`.
    """

    content: Content
    adapter: str = ""
    cache_salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    images: tuple[Any, ...] = ()
    sounds: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    add_special_tokens: bool | None = None
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    vector: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def seen(self) -> str:
        """The numbers of media, for errors: "2 images", "1 videos" or both; "" of a text."""
        counts = (len(self.images), "images"), (len(self.videos), "videos"), (len(self.sounds), "sounds")
        return " and ".join(f"{count} {nouns}" for count, nouns in counts if count)


def is_prompt_mapping(prompt: object) -> bool:
    """Whether this is a prompt in a mapping; a chat message has none of its names."""
    return isinstance(prompt, Mapping) and any(name in prompt for name in CONTENTS)


def take_apart(prompt: Prompt) -> PromptParts:
    """Content, salt and media of a prompt. Raises ValueError with the field, its value and what is allowed."""
    if isinstance(prompt, PromptParts):
        return prompt
    if not isinstance(prompt, Mapping):
        images, videos, sounds = _seen_in(prompt)
        return PromptParts(content=prompt, images=images, videos=videos, sounds=sounds)
    unknown = sorted(str(key) for key in set(prompt) - set(_FIELDS))
    if unknown:
        raise ValueError(f"the prompt has unknown fields {unknown}; known are {', '.join(_FIELDS)}")
    given = [name for name in CONTENTS if prompt.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"the prompt has {' and '.join(given) or 'no content'}; give exactly one of {CONTENTS}")
    content = prompt[given[0]]
    if (given[0] == "prompt") != isinstance(content, str):
        raise ValueError(f"{given[0]} is {quoted(content)}; text goes into prompt, token ids into prompt_token_ids")
    template = {name: prompt[name] for name in TEMPLATE_ARGUMENTS if prompt.get(name) is not None}
    if template and given[0] != "messages":
        raise ValueError(f"{' and '.join(template)} is for messages, and the prompt is {given[0]}; leave it out")
    adds = prompt.get("add_special_tokens")
    if adds is not None and (not isinstance(adds, bool) or given[0] == "prompt_token_ids"):
        raise ValueError(f"add_special_tokens is {quoted(adds)}; it must be true or false, beside a text or messages")
    images, videos, sounds = _seen_in(content)
    return PromptParts(
        content=content,
        adapter=named_text("adapter", prompt.get("adapter")),
        cache_salt=named_text("cache_salt", prompt.get("cache_salt")),
        media=_media(prompt.get("media") or ()),
        images=_listed_media("images", prompt.get("images"), images),
        videos=_listed_media("videos", prompt.get("videos"), videos),
        sounds=_listed_media("sounds", prompt.get("sounds"), sounds),
        add_special_tokens=adds,
        template=template,
        vector={name: prompt[name] for name in VECTOR_ARGUMENTS if prompt.get(name) is not None},
    )


def with_adapter(prompt: Any, name: str | None) -> Any:
    """The prompt with this adapter, or as it is for None."""
    if name is None:
        return prompt
    if isinstance(prompt, PromptParts):
        return dataclasses.replace(prompt, adapter=name)
    if is_prompt_mapping(prompt):
        return {**prompt, "adapter": name}
    kind = "prompt" if isinstance(prompt, str) else "messages" if is_messages(prompt) else "prompt_token_ids"
    return {kind: prompt, "adapter": name}


def side_prompts(known: Collection[str]) -> tuple[str | None, str | None]:
    """Names of a checkpoint's prompts for a query and for the documents that are ranked for it, or None.

    known: names of the checkpoint's prompts, as in sentence-transformers.
    """
    first = "query" if "query" in known else None
    return first, next((name for name in ("document", "passage", "corpus") if name in known), None)


def is_messages(content: object) -> bool:
    """Whether a prompt's content is chat messages."""
    return isinstance(content, Sequence) and len(content) > 0 and isinstance(content[0], Mapping)


def single(prompts: object) -> bool:
    """Whether `prompts` is one prompt, not a sequence of them."""
    if isinstance(prompts, str | Mapping | PromptParts):
        return True
    if not isinstance(prompts, Sequence | np.ndarray) or not len(prompts):
        return False
    first = prompts[0]
    return isinstance(first, int | np.integer) or (isinstance(first, Mapping) and not is_prompt_mapping(first))


def listed(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """One prompt or many as a list of them. Raises ValueError for what is neither."""
    if single(prompts):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts is {quoted(prompts)}; it must be a string, token ids, messages, or a list of such prompts"
        )
    return list(prompts)


def is_unicode(text: str) -> bool:
    """Whether the text has no half of a surrogate pair, which no encoding writes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def named_text(field: str, value: object) -> str:
    """The text of a field, "" for None. Raises ValueError for what is none, or cannot be encoded."""
    if value is None:
        return ""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field} is {quoted(value)}; it must be a string that is not empty")
    if not is_unicode(value):
        raise ValueError(f"{field} is {quoted(value)}, which holds half of a surrogate pair; write both halves")
    return value


def media_parts(content: object, noun: str) -> tuple[Mapping[str, Any], ...]:
    """The parts of chat messages that are of a kind, or places of some, in the order in which they stand."""
    if not is_messages(content):
        return ()
    return tuple(
        part
        for message in content  # type: ignore[attr-defined]
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        for part in message["content"]
        if media_of_part(part) == noun
    )


def joined_text(content: object) -> str | None:
    """A message's text, or its text parts joined by new lines; None for any other content."""
    if not isinstance(content, list | tuple):
        return content if isinstance(content, str) else None
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]


def media_of_part(part: object) -> str | None:
    """ "image", "video" or "audio" of a part of a message that is one, or the place of one that is given beside the
    messages."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == INPUT_AUDIO:
        return "audio"
    return next((noun for noun in SEEN if kind in (noun, f"{noun}_url")), None)


def _seen_in(content: object) -> tuple[tuple[Any, ...], ...]:
    """The images, videos and sounds of chat messages."""
    return tuple(tuple(_given_by(part, noun) for part in media_parts(content, noun) if len(part) > 1) for noun in SEEN)


def _given_by(part: Mapping[str, Any], noun: str) -> Any:
    """A part's image, video or sound. Raises ValueError for other fields."""
    kind = part["type"]
    value = part.get(kind)
    if kind == INPUT_AUDIO:
        return url_of_input_audio(part)
    if kind == f"{noun}_url" and isinstance(value, Mapping):
        unknown = sorted(set(value) - {"url", *(["detail"] if noun == "image" else [])})
        check_detail(value.get("detail")) if noun == "image" else None
        value = None if unknown else value.get("url")
    if value is None or set(part) != {"type", kind}:
        example = {"type": f"{noun}_url", f"{noun}_url": {"url": "data:..."}}
        article = "a" if noun == "video" else "an"
        raise ValueError(f"{article} {noun} part has the fields {sorted(part)}; it must be like {example}")
    return value


def url_of_input_audio(part: Mapping[str, Any]) -> str:
    """The data: URL of a part that has a sound as OpenAI writes it. Raises ValueError for one that has none."""
    given = part.get(INPUT_AUDIO)
    fields = given if isinstance(given, Mapping) and set(given) == {"data", "format"} else {}
    data, kind = fields.get("data"), fields.get("format")
    if set(part) != {"type", INPUT_AUDIO} or not isinstance(data, str) or not isinstance(kind, str):
        example = {"type": INPUT_AUDIO, INPUT_AUDIO: {"data": "<base64>", "format": "wav"}}
        raise ValueError(f"an input_audio part is not like {example}; it has the fields {sorted(part)}")
    if not (kind.isascii() and kind.isalnum() and len(kind) <= _LONGEST_FORMAT):
        raise ValueError(f"input_audio's format is {quoted(kind)}; it must be a word such as 'wav' or 'mp3'")
    return f"data:audio/{kind};base64,{data}"


def check_detail(detail: object) -> None:
    """Raises ValueError for a `detail` of OpenAI's image parts that would change nothing here."""
    if detail not in (None, "auto", "high"):
        raise ValueError(
            f"an image's detail is {quoted(detail)}; an image is read at the size that the model's processor gives it, "
            "which is what 'auto' and 'high' ask for: leave detail out, and give a smaller picture for fewer tokens"
        )


def _listed_media(nouns: str, given: object, in_messages: tuple[Any, ...]) -> tuple[Any, ...]:
    if given is None:
        return in_messages
    if not isinstance(given, list | tuple):
        raise ValueError(f"{nouns} is a {type(given).__name__}; it must be a list of {nouns}")
    if in_messages and given:
        raise ValueError(f"{nouns} stand in the messages and beside them; give all of them in one place")
    return tuple(given) or in_messages


def _media(media: object) -> tuple[MediaSpan, ...]:
    if not isinstance(media, Sequence) or not all(isinstance(span, MediaSpan) for span in media):
        raise ValueError(f"media is {quoted(media)}; it must be a list of MediaSpan")
    return tuple(media)
