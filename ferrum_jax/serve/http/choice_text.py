"""ChoiceText: one choice on its way to a reader: its tokens so far become text and log-probabilities with texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ferrum_jax.request import CompletionOutput, Logprob, SamplingParams
from ferrum_jax.serve.link.wire import Delta, Entry
from ferrum_jax.text.stream import TextStream
from ferrum_jax.text.tokenizer import Tokenizer

_MOST_TEXTS = 1 << 16


class TokenTexts:
    """The text of single tokens, kept."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.of = functools.lru_cache(maxsize=_MOST_TEXTS)(self._of)

    def _of(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token_id], skip_special_tokens=False)

    def entry(self, entry: Entry) -> dict[int, Logprob]:
        """What the engine said of one place, with texts."""
        return {
            token_id: Logprob(logprob=logprob, rank=rank, decoded_token=self.of(token_id))
            for token_id, logprob, rank in entry
        }


class ChoiceText:
    """Takes deltas and gives what is new. The text ends where the engine's own would (`engine/outputs.py`)."""

    def __init__(self, index: int, params: SamplingParams, prompt: Sequence[int], texts: TokenTexts) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self._pieces: list[str] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._params, self._texts = params, texts
        self._stream = _stream(params, prompt, texts.tokenizer)

    def push(self, delta: Delta) -> CompletionOutput:
        """What this delta adds, as an output of its own."""
        self.token_ids += delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        text = self._text_of(delta)
        self._pieces.append(text)
        entries = None if delta.logprobs is None else [self._texts.entry(entry) for entry in delta.logprobs]
        self.logprobs += entries or ()
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=tuple(delta.token_ids),
            cumulative_logprob=None,
            logprobs=None if entries is None else tuple(entries),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def whole(self) -> CompletionOutput:
        """All of it."""
        return CompletionOutput(
            index=self.index,
            text="".join(self._pieces),
            token_ids=tuple(self.token_ids),
            cumulative_logprob=None,
            logprobs=None if self._params.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
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


def _stream(params: SamplingParams, prompt: Sequence[int], tokenizer: Tokenizer | None) -> TextStream | None:
    if tokenizer is None or not params.detokenize:
        return None
    return TextStream(
        tokenizer,
        stop=tuple(params.stop),
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        skip_special_tokens=params.skip_special_tokens,
        after=prompt,
    )
