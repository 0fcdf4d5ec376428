"""Prompts to token ids: text through the tokenizer, chat messages through the checkpoint's template first."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ferrum_jax.inputs import prompt as plain
from ferrum_jax.inputs.audio.clip import ProcessedClip
from ferrum_jax.inputs.audio.prompt_sounds import Encode, PromptSounds
from ferrum_jax.inputs.images.decoding import Look, do_not_look
from ferrum_jax.inputs.images.prompt_images import PromptImages
from ferrum_jax.text.chat import ChatTemplate
from ferrum_jax.text.long_texts import TextTooLong
from ferrum_jax.text.tokenizer import Tokenizer

MOST_TIMES = 8  # max_model_len that a text may have whose tokens are only counted, or are cut behind images


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt as an engine takes it. images: of the media spans, in their order, with what is heard."""

    token_ids: Sequence[int]
    media: tuple[plain.MediaSpan, ...] = ()
    images: tuple[plain.EncodableImage, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """A checkpoint's tokenizer, chat template and how its prompts have images; each may be missing.

    max_model_len: of the model that reads them; longer texts are refused before all of them is encoded. sounds: of one
    whose prompts have tokens for them. hears: whether its layers attend to a sound.
    """

    tokenizer: Tokenizer | None
    chat: ChatTemplate | None
    images: PromptImages | None = None
    max_model_len: int | None = None
    sounds: PromptSounds | None = None
    hears: bool = False

    def token_ids(
        self, prompt: plain.Prompt, now: datetime.datetime | None = None, *, kept: int | None = None
    ) -> Sequence[int]:
        """The ids of a prompt. Raises ValueError for what is not a prompt, or if the checkpoint lacks what it needs.

        now: the time of day that a chat template sees; None reads the clock. kept: only this many at its end will run,
        and of a long text more may be left out.
        """
        return self.encoded(prompt, now, kept=kept).token_ids

    def encoded(
        self,
        prompt: plain.Prompt,
        now: datetime.datetime | None = None,
        *,
        kept: int | None = None,
        times: int = 1,
        look: Look = do_not_look,
    ) -> EncodedPrompt:
        """The ids of a prompt with its images, which are read and made ready for the model. Raises as `token_ids`.

        times: how often max_model_len a text may have. look: called between steps; what it raises ends the work.
        """
        parts = plain.take_apart(prompt)
        if parts.sounds and self.sounds is None:
            return self._heard(parts)
        if kept is not None and (parts.seen or parts.media):  # their spans are counted from the start
            kept, times = None, MOST_TIMES
        if (parts.images or parts.videos) and self.images is None:
            raise ValueError(
                f"the prompt has {parts.seen}, and this model takes none: it sees no images, is served "
                "with max_image_tokens=0, or its folder has no preprocessor_config.json"
            )
        if parts.vector:
            raise ValueError(f"{' and '.join(parts.vector)} is for texts whose vectors are made; leave it out")
        for noun, given in zip(plain.SEEN, (parts.images, parts.videos, parts.sounds), strict=True):
            places = len(plain.media_parts(parts.content, noun))
            if places and places != len(given):
                raise ValueError(
                    f"the messages have {places} parts that are {noun}s, and {len(given)} {noun}s are given; give one "
                    "for each, in the parts or beside the messages"
                )
        content, adds = self._content(parts, now)
        most = None if self.max_model_len is None else self.max_model_len * times

        def encode(text: str, adds: bool) -> list[int]:
            return self._encode(text, adds, most, kept)

        if not parts.seen:
            ids = encode(content, adds) if isinstance(content, str) else content
            return EncodedPrompt(token_ids=ids, media=parts.media)
        if parts.media:
            raise ValueError(f"the prompt has {parts.seen} and media; their spans are found, leave media out")
        return self._with_media(parts, content, encode, adds=adds, most=most, look=look)

    def _with_media(
        self,
        parts: plain.PromptParts,
        content: str | Sequence[int],
        encode: Encode,
        *,
        adds: bool,
        most: int | None,
        look: Look,
    ) -> EncodedPrompt:
        """Sounds have their tokens first, since images are placed among the ids of the whole."""
        clips: tuple[ProcessedClip, ...] = ()
        if parts.sounds:
            assert self.sounds is not None, "sounds are refused where nothing hears them"
            content, clips = self.sounds.filled(content, parts.sounds, encode, most=most, look=look)
            most = None if most is None else most - sum(clip.num_tokens for clip in clips)
        ids = content
        found: list[tuple[plain.MediaSpan, plain.EncodableImage]] = []
        if parts.images or parts.videos:
            assert self.images is not None, "images are refused where nothing sees them"
            given = {"videos": parts.videos, "adds": adds, "most": most, "look": look}
            seen = self.images.expanded(content, parts.images, encode, **given)  # type: ignore[arg-type]
            ids = seen.token_ids
            found += zip(seen.spans, seen.parts, strict=True)
        elif isinstance(content, str):
            ids = encode(content, adds)
        assert not isinstance(ids, str), "a text is encoded by now"
        if clips:
            assert self.sounds is not None, "it has made them"
            found += zip(self.sounds.spans(ids, clips, encode), clips, strict=True)
        found.sort(key=lambda pair: pair[0].start)
        return EncodedPrompt(
            token_ids=ids, media=tuple(span for span, _ in found), images=tuple(image for _, image in found)
        )

    def _heard(self, parts: plain.PromptParts) -> EncodedPrompt:
        """Token ids with a sound beside them. Raises ValueError where there is another content, or nothing hears it."""
        if not self.hears:
            raise ValueError(
                f"the prompt has {len(parts.sounds)} sounds, and this model hears none: it has no encoder of them, is "
                "served with max_image_tokens=0, or its folder has no preprocessor_config.json of sounds"
            )
        others = parts.images or parts.videos or parts.media
        if isinstance(parts.content, str) or plain.is_messages(parts.content) or others:
            raise ValueError("the prompt has sounds beside text, messages, images or media; give them token ids alone")
        if not all(hasattr(each, "patches") for each in parts.sounds):
            raise ValueError(
                f"sounds has a {type(parts.sounds[0]).__name__}; this model takes windows, as LLM.transcribe makes them"
            )
        spans = tuple(plain.MediaSpan(kind="audio", digest=clip.digest, start=0, length=1) for clip in parts.sounds)
        return EncodedPrompt(token_ids=parts.content, media=spans, images=parts.sounds)  # type: ignore[arg-type]

    def _content(self, parts: plain.PromptParts, now: datetime.datetime | None) -> tuple[str | Sequence[int], bool]:
        """A prompt's text, and whether special tokens are added to it, or its ids. Raises as `token_ids`."""
        content, adds = parts.content, parts.add_special_tokens
        if isinstance(content, str):
            return content, adds is not False
        if isinstance(content, bytes) or not isinstance(content, Sequence | np.ndarray):
            raise ValueError(f"the prompt is {content!r}; it must be a string, a list of token ids, or chat messages")
        if len(content) and isinstance(content[0], Mapping):
            return self.render_chat(content, now, **parts.template), adds is True  # type: ignore[arg-type]
        if parts.template or adds is not None:
            raise ValueError("the prompt is token ids, and its options are for chat messages or text; leave them out")
        return content, False  # type: ignore[return-value]

    def render_chat(
        self,
        messages: Sequence[plain.Message],
        now: datetime.datetime | None = None,
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the checkpoint's chat template makes of messages; the arguments are those of `LLM.chat`.

        Raises ValueError for an argument that the template never reads, so that none is ignored silently.
        """
        if self.chat is None:
            raise ValueError("the checkpoint has no chat template; give a plain prompt, or LLM(tokenizer=...) with one")
        for name, value in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; it must be true or false")
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt are both true; a text either goes on in its last "
                "message or begins a new one"
            )
        arguments = _template_variables(chat_template_kwargs)
        chat = self.chat.with_tools() if tools else self.chat
        unread = sorted({*arguments, *(["tools"] if tools else [])} - chat.variables)
        if unread:
            raise ValueError(
                f"the chat template reads no {' and no '.join(unread)}; leave it out, or put it into a message"
            )
        if not chat.writes_calls and any(isinstance(each, Mapping) and each.get("tool_calls") for each in messages):
            raise ValueError("the chat template writes no tool_calls; leave them out, or put them into a content")
        arguments |= {"tools": tools or None}
        if continue_final_message:
            return chat.render_open(messages, now, **arguments)
        return chat.render(messages, now, add_generation_prompt=add_generation_prompt is not False, **arguments)

    def _encode(self, text: str, adds: bool, most: int | None, kept: int | None) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer; give token ids, or LLM(tokenizer=...)")
        try:
            return self.tokenizer.encode(text, add_special_tokens=adds, at_most=most, last=kept)
        except TextTooLong as error:
            raise ValueError(
                f"this model's maximum context length is {self.max_model_len} tokens, its max_model_len; the prompt's "
                f"text has {error.how}; shorten it or set truncate_prompt_tokens"
            ) from error


def _template_variables(given: object) -> dict[str, Any]:
    """A user's chat_template_kwargs. Raises ValueError if it is not a mapping, or names what an argument gives."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"chat_template_kwargs is {given!r}; it must be an object of names and values")
    taken = sorted({"messages", *plain.TEMPLATE_ARGUMENTS} & set(given))
    if taken:
        raise ValueError(f"chat_template_kwargs has {' and '.join(taken)}; give that as an argument of its own")
    return dict(given)
