"""What a user may give as a prompt, and what an engine takes from it.

A prompt is a string, token ids, or chat messages; or one of these under its name in a mapping, as in vLLM,
with what else belongs to it:

    {"prompt": text, "cache_salt": "tenant-a"}
    {"prompt_token_ids": ids, "media": [MediaSpan(...), ...]}
    {"messages": messages}

Prompts with different salts never share cached blocks. A media span says that tokens stand for content that
their ids do not show; it enters the keys of the blocks that it touches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Message = Mapping[str, Any]
Content = str | Sequence[int] | Sequence[Message]
Prompt = Content | Mapping[str, Any]

CONTENTS = ("prompt", "prompt_token_ids", "messages")
_FIELDS = (*CONTENTS, "cache_salt", "media")


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
                raise ValueError(f"a media span's {field} is {value!r}; it must be {type_.__name__} and not empty")
        for field, least in (("start", 0), ("length", 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"a media span's {field} is {value!r}; it must be a whole number, {least} or more")

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptParts:
    """A prompt taken apart; cache_salt "" is none."""

    content: Content
    cache_salt: str = ""
    media: tuple[MediaSpan, ...] = ()


def is_prompt_mapping(prompt: object) -> bool:
    """Whether this is a prompt in a mapping; a chat message has none of its names."""
    return isinstance(prompt, Mapping) and any(name in prompt for name in CONTENTS)


def take_apart(prompt: Prompt) -> PromptParts:
    """Content, salt and media of a prompt. Raises ValueError with the field, its value and what is allowed."""
    if not isinstance(prompt, Mapping):
        return PromptParts(content=prompt)
    unknown = sorted(str(key) for key in set(prompt) - set(_FIELDS))
    if unknown:
        raise ValueError(f"the prompt has unknown fields {unknown}; known are {', '.join(_FIELDS)}")
    given = [name for name in CONTENTS if prompt.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"the prompt has {' and '.join(given) or 'no content'}; give exactly one of {CONTENTS}")
    content = prompt[given[0]]
    if (given[0] == "prompt") != isinstance(content, str):
        raise ValueError(f"{given[0]} is {content!r}; text goes into prompt, token ids into prompt_token_ids")
    return PromptParts(
        content=content, cache_salt=_salt(prompt.get("cache_salt")), media=_media(prompt.get("media") or ())
    )


def single(prompts: object) -> bool:
    """Whether `prompts` is one prompt, not a sequence of them."""
    if isinstance(prompts, str | Mapping):
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
        raise ValueError(f"prompts is {prompts!r}; it must be a string, token ids, messages, or a list of such prompts")
    return list(prompts)


def _salt(salt: object) -> str:
    if salt is None:
        return ""
    if not isinstance(salt, str) or not salt:
        raise ValueError(f"cache_salt is {salt!r}; it must be a string that is not empty")
    return salt


def _media(media: object) -> tuple[MediaSpan, ...]:
    if not isinstance(media, Sequence) or not all(isinstance(span, MediaSpan) for span in media):
        raise ValueError(f"media is {media!r}; it must be a list of MediaSpan")
    return tuple(media)
