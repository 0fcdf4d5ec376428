"""Text of a request while its tokens arrive: what is emitted never changes and ends before a stop string.

A `TextStream` is fed one token id after the other and emits the text that has become certain. A character
whose bytes are not complete is held back, and so is what may be the beginning of a stop string. After
`flush` the text is `Tokenizer.decode` of all ids, cut at the first stop string. The cost of a token does not
depend on how many came before, nor on how many stop strings there are.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from ferrum_jax.text.stop_strings import StopStrings, stop_strings
from ferrum_jax.text.tokenizer import Tokenizer


class TextStream:
    """The growing text of one choice.

    stop: strings that end the text; the one that is complete first wins, the longest among equals.
    include_stop: whether the text ends with the stop string or before it.
    min_tokens: a stop string that is complete within this many first tokens does not count.
    after: the prompt's token ids, where the text is to continue the prompt's text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._stops = stop_strings(tuple(stop)) if stop else None
        self._state = 0  # of the search for them, after all text that is certain
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # certain text that may be the beginning of a stop string
        self._decoder: _Detokenizer = (
            _ByteText(tokenizer)
            if tokenizer.byte_level
            else _WindowText(tokenizer, tokenizer.context(after, skip_special_tokens))
        )
        self._pieces: list[str] = []  # emitted
        self._new: list[str] = []  # emitted since `take`
        self.stopped: str | None = None  # the stop string that ended the text

    @property
    def may_stop(self) -> bool:
        """Whether a stop string could end the text."""
        return self._stops is not None

    @property
    def text(self) -> str:
        """All text emitted so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def take(self) -> str:
        """The text emitted since it was last taken."""
        new, self._new = self._new, []
        return "".join(new)

    def push(self, token_id: int) -> str | None:
        """Takes the next token; the stop string that has ended the text, if one has. What comes after it is dropped."""
        self._num_tokens += 1
        if self.stopped is None and self._tokenizer.visible((token_id,), self._skips):
            self._add(self._decoder.push(token_id))
        return self.stopped

    def flush(self) -> str | None:
        """Emits what is held back, since no more tokens will come; the stop string that has ended the text, if any."""
        if self.stopped is None:
            self._add(self._decoder.flush())
            self._emit(self._held)
            self._held = ""
        return self.stopped

    def _add(self, text: str) -> None:
        if self._stops is not None:
            text = self._certain(self._stops, text)
        if text:
            self._emit(text)

    def _emit(self, text: str) -> None:
        self._pieces.append(text)
        self._new.append(text)

    def _certain(self, stops: StopStrings, new: str) -> str:
        """The emittable part of the held text and `new`; the rest is held. Notes a stop string that ends in `new`."""
        counts = self._num_tokens > self._min_tokens
        text, end, state = self._held + new, len(self._held), self._state
        for character in new:
            state = stops.step(state, character)
            end += 1
            if counts and (found := stops.ends[state]) is not None:
                self.stopped, self._held = found, ""
                return text[: end if self._include_stop else end - len(found)]
        self._state, kept = state, len(text) - stops.held[state]
        self._held = text[kept:]
        return text[:kept]


class _Detokenizer(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteText:
    """Text of a byte-level tokenizer: the tokens' bytes through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._piece(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowText:
    """Text of any other tokenizer: a window of tokens decoded with and without those not yet emitted.

    The window is the last group of tokens that was emitted, then those that wait. A run of byte tokens waits
    until it ends, because one bad byte makes the tokenizer replace the whole run.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = context
        self._emitted = len(context)  # tokens of the window whose text is out
        self._emitted_text = tokenizer.raw_text(context)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            return ""
        text = self._tokenizer.raw_text(self._window)
        if text.endswith("\ufffd"):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._tokenizer.raw_text(self._window))

    def _advance(self, text: str) -> str:
        added = text[len(self._emitted_text) :]
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        self._emitted_text = self._tokenizer.raw_text(self._window)
        return added
