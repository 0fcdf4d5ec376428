"""ChoiceText: the tokens of one choice and their text, which is made when it is asked for.

    deltas ─► token ids ─┬► text: without special tokens, up to a stop string
                         └► message: of a chat, taken apart by the forms of the model's template

Text that grows is fed its tokens one by one; a choice that is asked for at its end alone is decoded at once.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ferrum_jax.core.delta import Beside, Delta, Entry
from ferrum_jax.core.outputs import CompletionOutput, Logprob
from ferrum_jax.inputs.params.message import AssistantMessage
from ferrum_jax.inputs.params.tools import Tool
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.stream import TextStream
from ferrum_jax.text.structured.reading.message_stream import NO_FORMS, PROMPT_END_TOKENS, MessageForms, MessageStream
from ferrum_jax.text.tokenizer import Tokenizer

_MAX_TEXTS = 1 << 16


class TokenTexts:
    """The texts of a model's tokens, those of single ones kept; forms: in which its chats are written."""

    def __init__(self, tokenizer: Tokenizer | None, forms: MessageForms = NO_FORMS) -> None:
        self.tokenizer, self.forms = tokenizer, forms
        self._specials = () if tokenizer is None else tuple(tokenizer.special_texts())
        self._of = functools.lru_cache(maxsize=_MAX_TEXTS)(self._decoded)

    def _decoded(self, token_id: int, starts: bool) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode([token_id], skip_special_tokens=False, after=() if starts else (token_id,))

    def starts(self, before: Sequence[int], sampling: SamplingParams) -> bool:
        """Whether a text begins behind these tokens: its first token has no text for its space."""
        return self.tokenizer is not None and not self.tokenizer.context(before, sampling.skip_special_tokens)

    def entries(
        self, found: Sequence[Entry | None], *, named: bool, start: int | None = None
    ) -> list[dict[int, Logprob] | None]:
        """The log-probabilities of each place, with texts if `named`. start: the place at which a text begins."""

        def entry(said: Entry, starts: bool) -> dict[int, Logprob]:
            return {
                token_id: Logprob(
                    logprob=logprob, rank=rank, decoded_token=self._of(token_id, starts) if named else None
                )
                for token_id, logprob, rank in said
            }

        return [None if said is None else entry(said, place == start) for place, said in enumerate(found)]

    def message(
        self, sampling: SamplingParams, prompt: Sequence[int], tools: Sequence[Tool] | None
    ) -> MessageStream | None:
        """The reader of a chat's text; None if the model's template shows no forms, or no text is made."""
        if self.forms == NO_FORMS or self.tokenizer is None or not sampling.detokenize:
            return None
        end = self.tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        specials = self._specials if sampling.skip_special_tokens else ()
        return self.forms.stream(tools=tools, is_open=self.forms.is_open_after(end), specials=specials)


class NewText(NamedTuple):
    """A choice's new text. parts: of its message, in order; None for plain text."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    parts: Sequence[AssistantMessage] | None


class ChoiceText:
    """echoed: what its text begins with. message: takes a chat's text apart. grows: it is asked for before its end."""

    def __init__(
        self,
        index: int,
        sampling: SamplingParams,
        prompt: Sequence[int],
        texts: TokenTexts,
        *,
        echoed: str = "",
        message: MessageStream | None = None,
        grows: bool = True,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.beside = Beside()
        self._entries: list[Entry] = []
        self._logprobs: list[dict[int, Logprob]] = []  # of the first of them
        self._sampling, self._texts, self._echoed, self._grows = sampling, texts, echoed, grows
        self._prompt = prompt
        self._text: _Reading | None = None
        self._message: _MessageReading | None = None
        if texts.tokenizer is not None and sampling.detokenize:
            skips = sampling.skip_special_tokens
            self._text = _Reading(texts.tokenizer, sampling, prompt, skips=skips)
            if message is not None:  # its marks may be special tokens; beside stop strings these are not shown
                text = _Reading(texts.tokenizer, sampling, prompt, skips=skips and bool(sampling.stop))
                self._message = _MessageReading(text, message, texts.forms)

    def take(self, delta: Delta) -> None:
        """Keeps what a delta adds."""
        self.token_ids += delta.token_ids
        self._entries += delta.logprobs or ()
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.beside is not None:
            self.beside = delta.beside

    def push(self, delta: Delta) -> list[NewText]:
        """The text that a delta adds. Log-probabilities stand beside the part of a message that their token made."""
        by_token = self._message is not None and self._sampling.logprobs is not None
        return [self._push(each) for each in (delta.by_token() if by_token else (delta,))]

    def _push(self, delta: Delta) -> NewText:
        self.take(delta)
        text, parts = "", None
        if self._message is not None:
            parts = self._message.more(self)
            text = "".join([part.content for part in parts])
        elif self._text is not None:
            text = self._text.more(self)
        place = len(self._entries) - len(delta.logprobs or ())
        logprobs = None if delta.logprobs is None else self._logprobs_from(place, named=True)
        return NewText(self.index, text, delta.token_ids, logprobs, delta.finish_reason, delta.stop_reason, parts)

    @property
    def num_shown(self) -> int:
        """How many of its tokens have a text: one that has ended it has none unless asked for."""
        ends_by_token = self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
        return len(self.token_ids) - (ends_by_token and not self._sampling.include_stop_str_in_output)

    def whole(self, image_digests: tuple[str, ...] = ()) -> CompletionOutput:
        """The choice as far as it is."""
        logprobs = self._all_logprobs()
        chosen = [entry[token].logprob for token, entry in zip(self.token_ids, logprobs or (), strict=False)]
        return CompletionOutput(
            index=self.index,
            text="" if self._text is None else self._echoed + self._text.whole(self, self._grows),
            token_ids=tuple(self.token_ids),
            cumulative_logprob=None if logprobs is None else math.fsum(chosen),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            message=self._said(),
            weights_versions=self.beside.weights_versions,
            image_digests=image_digests,
            routed_experts=self.beside.routed_experts,
            sampling_mask=self.beside.sampling_mask,
        )

    def _all_logprobs(self) -> tuple[dict[int, Logprob], ...] | None:
        if self._sampling.logprobs is None:
            return None
        self._logprobs += self._logprobs_from(len(self._logprobs), named=self._sampling.detokenize)
        return tuple(self._logprobs)

    def _logprobs_from(self, place: int, *, named: bool) -> list[dict[int, Logprob]]:
        """The log-probabilities of the tokens from a place on."""
        start = 0 if place == 0 and self._texts.starts(self._prompt, self._sampling) else None
        return self._texts.entries(self._entries[place:], named=named, start=start)  # type: ignore[return-value]

    def _said(self) -> AssistantMessage | None:
        """The message, as far as it is certain where it grows; else None while it goes on."""
        if self._message is None or (self.finish_reason is None and not self._grows):
            return None
        return self._message.so_far(self)


class _Reading:
    """A text of a choice's tokens, made as it is asked for."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt: Sequence[int], *, skips: bool) -> None:
        """skips: special tokens have no text."""
        self._tokenizer, self._sampling, self._prompt, self._skips = tokenizer, sampling, prompt, skips
        self._stream: TextStream | None = None
        self._num_read = 0
        self._at_once: str | None = None  # of a choice that had ended when it was first asked for

    def more(self, choice: ChoiceText) -> str:
        """The new text."""
        if self._at_once is not None:
            return ""
        if self._stream is None and choice.finish_reason is not None and not isinstance(choice.stop_reason, str):
            self._at_once = self._decoded(choice)
            return self._at_once
        if self._stream is None:
            self._stream = text_stream(self._tokenizer, self._sampling, self._prompt, skips=self._skips)
        for token_id in choice.token_ids[self._num_read : choice.num_shown]:
            self._stream.push(token_id)
        self._num_read = choice.num_shown
        if choice.finish_reason is not None:
            self._stream.flush()
        return self._stream.take()

    def whole(self, choice: ChoiceText, grows: bool) -> str:
        """All of it so far. Where it goes on and is not asked for as it grows, this is the text of its tokens alone."""
        if choice.finish_reason is None and not grows:
            return self._decoded(choice)
        self.more(choice)
        return self._at_once or ("" if self._stream is None else self._stream.text)

    def _decoded(self, choice: ChoiceText) -> str:
        shown = choice.token_ids[: choice.num_shown]
        return self._tokenizer.decode(shown, skip_special_tokens=self._skips, after=self._prompt)


class _MessageReading:
    """An assistant's message, made as it is asked for."""

    def __init__(self, text: _Reading, stream: MessageStream, forms: MessageForms) -> None:
        self._text, self._stream, self._forms = text, stream, forms
        self._is_over = False
        self._parts: list[AssistantMessage] = []

    def more(self, choice: ChoiceText) -> list[AssistantMessage]:
        """The message's new parts, in order."""
        if self._is_over:
            return []
        self._is_over = choice.finish_reason is not None
        found = self._stream.feed(self._text.more(choice)) + (self._stream.flush() if self._is_over else [])
        self._parts += found
        return found

    def so_far(self, choice: ChoiceText) -> AssistantMessage:
        """The message so far, without text that may yet change."""
        self.more(choice)
        self._parts = [self._forms.joined(self._parts)]
        return self._parts[0]


def text_stream(
    tokenizer: Tokenizer, sampling: SamplingParams, prompt: Sequence[int], *, skips: bool | None = None
) -> TextStream:
    """The growing text of a choice. skips: whether special tokens have none; None as `sampling` says."""
    return TextStream(
        tokenizer,
        stop=tuple(sampling.stop),
        include_stop=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
        skip_special_tokens=sampling.skip_special_tokens if skips is None else skips,
        after=prompt,
    )
