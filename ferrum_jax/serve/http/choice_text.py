"""ChoiceText: one choice on its way to a reader: its tokens so far become text and log-probabilities with texts.

The text of a chat is taken apart by the forms of the model's chat template into parts of a message.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from ferrum_jax.asked.message import AssistantMessage
from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.asked.tools import Tool
from ferrum_jax.outputs import CompletionOutput, Logprob
from ferrum_jax.serve.link.wire import Delta, Entry
from ferrum_jax.structured.reading.message_parser import NO_FORMS, PROMPT_END_TOKENS, MessageForms
from ferrum_jax.structured.reading.message_stream import MessageStream
from ferrum_jax.text.stream import TextStream
from ferrum_jax.text.tokenizer import Tokenizer

_MOST_TEXTS = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceOutput(CompletionOutput):
    """What is new of a choice, or all of it. parts: of its message, in their order; None where it is plain text."""

    parts: tuple[AssistantMessage, ...] | None = None


class TokenTexts:
    """The texts of a model's tokens, those of single ones kept; forms: in which its chats are written."""

    def __init__(self, tokenizer: Tokenizer | None, forms: MessageForms = NO_FORMS) -> None:
        self.tokenizer, self.forms = tokenizer, forms
        self._specials = () if tokenizer is None else tuple(tokenizer.special_texts())
        self.of = functools.lru_cache(maxsize=_MOST_TEXTS)(self._of)

    def _of(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token_id], skip_special_tokens=False)

    def entry(self, entry: Entry) -> dict[int, Logprob]:
        """What the engine said of one place, with texts."""
        return {
            token_id: Logprob(logprob=logprob, rank=rank, decoded_token=self.of(token_id))
            for token_id, logprob, rank in entry
        }

    def message(
        self, params: SamplingParams, prompt: Sequence[int], tools: Sequence[Tool] | None
    ) -> MessageStream | None:
        """What takes a chat's text apart; None of a model whose template shows no forms, and where no text is made."""
        if self.forms == NO_FORMS or self.tokenizer is None or not params.detokenize:
            return None
        end = self.tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        specials = self._specials if params.skip_special_tokens else ()
        return self.forms.stream(tools=tools, is_open=self.forms.is_open_after(end), specials=specials)


class ChoiceText:
    """Takes deltas and gives what is new. The text ends where the engine's own would (`engine/making_outputs.py`)."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        prompt: Sequence[int],
        texts: TokenTexts,
        message: MessageStream | None = None,
    ) -> None:
        """message: takes the text apart where it is one. Special tokens are shown to it, for its marks may be such.

        With stop strings they are not, since those are looked for in the text without them.
        """
        self.index = index
        self.token_ids: list[int] = []
        self._pieces: list[str] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._params, self._texts = params, texts
        self._message = message
        self._parts: list[AssistantMessage] = []
        skips = params.skip_special_tokens and (message is None or bool(params.stop))
        self._stream = _stream(params, prompt, texts.tokenizer, skips=skips)

    def deltas(self, delta: Delta) -> list[Delta]:
        """What is pushed for this delta: log-probabilities belong to the part that their token made."""
        return delta.by_token() if self._message is not None and self._params.logprobs is not None else [delta]

    def push(self, delta: Delta) -> ChoiceOutput:
        """What this delta adds, as an output of its own."""
        self.token_ids += delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        text, parts = self._text_of(delta), None
        if self._message is not None:
            parts = self._message.feed(text) + ([] if delta.finish_reason is None else self._message.flush())
            self._parts += parts
            text = "".join([part.content for part in parts])
        self._pieces.append(text)
        entries = None if delta.logprobs is None else [self._texts.entry(entry) for entry in delta.logprobs]
        self.logprobs += entries or ()
        return ChoiceOutput(
            index=self.index,
            text=text,
            token_ids=tuple(delta.token_ids),
            cumulative_logprob=None,
            logprobs=None if entries is None else tuple(entries),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            parts=None if parts is None else tuple(parts),
        )

    def whole(self) -> ChoiceOutput:
        """All of it."""
        return ChoiceOutput(
            index=self.index,
            text="".join(self._pieces),
            token_ids=tuple(self.token_ids),
            cumulative_logprob=None,
            logprobs=None if self._params.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            message=None if self._message is None else self._texts.forms.joined(self._parts),
            parts=None if self._message is None else tuple(self._parts),
        )

    def _text_of(self, delta: Delta) -> str:
        stream = self._stream
        if stream is None:
            return ""
        is_shown = self._params.include_stop_str_in_output
        ends_by_token = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str) and not is_shown
        for token_id in delta.token_ids[: -1 if ends_by_token else None]:
            stream.push(token_id)
        if delta.finish_reason is not None:
            stream.flush()
        return stream.take()


def _stream(
    params: SamplingParams, prompt: Sequence[int], tokenizer: Tokenizer | None, *, skips: bool
) -> TextStream | None:
    """skips: whether special tokens are no text."""
    if tokenizer is None or not params.detokenize:
        return None
    return TextStream(
        tokenizer,
        stop=tuple(params.stop),
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        skip_special_tokens=skips,
        after=prompt,
    )
