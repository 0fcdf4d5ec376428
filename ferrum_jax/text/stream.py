"""Text of a request while its tokens arrive: what is emitted never changes and ends before a stop string.

A `TextStream` is fed one token id after the other and emits the text that has become certain. A character
whose bytes are not complete is held back, and so is what may be the beginning of a stop string. After
`flush` the text is `Tokenizer.decode` of all ids, cut at the first stop string. The cost of a token does not
depend on how many came before, nor on how many stop strings there are.
"""

import codecs
import functools
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ferrum_jax.text.tokenizer import Tokenizer

_MAX_KEPT = 32  # automata; the choices of a request, and the rows of a job, have the same one
_MAX_BYTES = 4  # of a character


class StopStrings:
    """A request's stop strings as one automaton, which reads each character of a text once.

    A state is the longest end of the text that begins a stop string. ends[state]: the longest stop string that is
    complete there, if any. held[state]: how many of the text's last characters may be the beginning of a stop string
    that is not complete.
    Source: Aho and Corasick 1975, Efficient string matching.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.ends: list[str | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        depths = [0]
        for stop in stops:
            state = 0
            for depth, character in enumerate(stop, 1):
                found = self._next[state].get(character)
                if found is None:
                    found = self._next[state][character] = len(self._next)
                    self._next.append({})
                    self.ends.append(None)
                    depths.append(depth)
                state = found
            self.ends[state] = stop
        self.held = [depth if further else 0 for depth, further in zip(depths, self._next, strict=True)]
        self._failure = [0] * len(self._next)
        self._link()

    def _link(self) -> None:
        """Gives each state its failure, the longest shorter end of its text that is a state, the shortest texts first.

        What is complete there is complete here too; what ends a longest stop string may yet begin another one there.
        """
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            failure = self._failure[state]
            if self.ends[state] is None:
                self.ends[state] = self.ends[failure]
            if not self._next[state]:
                self.held[state] = self.held[failure]
            for character, further in self._next[state].items():
                self._failure[further] = self.step(failure, character)
                queue.append(further)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (found := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._failure[state]
        return found


@functools.lru_cache(maxsize=_MAX_KEPT)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of these, one for all who have the same."""
    return StopStrings(stops)


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
        self._num_ahead = 0  # characters that wait in the decoder and were looked through,
        self._ahead = 0  # and the state of the search after them
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
            text, ahead = self._decoder.push(token_id), self._decoder.ahead
            if ahead is None:
                self._num_ahead = 0
            self._add(text)
            if ahead and self._stops is not None and self._ends_ahead(self._stops, ahead):
                self._add(self._decoder.flush())
        return self.stopped

    def _ends_ahead(self, stops: StopStrings, ahead: str) -> bool:
        """Whether a stop string ends in the text that waits, with `ahead` at its end, if no more tokens come."""
        state = self._ahead if self._num_ahead else self._state
        for character in ahead:
            state = stops.step(state, character)
            if self._num_tokens > self._min_tokens and stops.ends[state] is not None:
                return True
            self._num_ahead += 1
        self._ahead = state
        return False

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
        if not new:
            return ""
        counts = self._num_tokens > self._min_tokens
        text, end, state = self._held + new, len(self._held), self._state
        looked, self._num_ahead = end + self._num_ahead, 0
        for character in new:
            state = stops.step(state, character)
            end += 1
            if counts and end > looked and (found := stops.ends[state]) is not None:
                self.stopped, self._held = found, ""
                return text[: end if self._include_stop else end - len(found)]
        self._state, kept = state, len(text) - stops.held[state]
        self._held = text[kept:]
        return text[:kept]


class _Detokenizer(Protocol):
    """ahead: the waiting text with the last token, certain if no more tokens come, or None."""

    ahead: str | None

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteText:
    """Text of a byte-level tokenizer: the tokens' bytes through an incremental UTF-8 decoder."""

    ahead: str | None = ""

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
    until it ends, because one bad byte makes the tokenizer replace each of the run; after such a byte none waits.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = context
        self._emitted = len(context)  # tokens of the window whose text is out,
        self._num_out = len(tokenizer.raw_text(context))  # and its characters that are
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._num_waiting = 0  # bytes of a run
        self.ahead: str | None = ""
        for token_id in context:
            self._read(tokenizer.byte_ids.get(token_id))

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        byte = self._tokenizer.byte_ids.get(token_id)
        self._read(byte)
        if byte is not None:
            self._num_waiting += 1
            return "" if self.ahead is not None else self._bad_bytes()
        self._num_waiting = 0
        text = self._tokenizer.raw_text(self._window)
        return self._all_but_last(text) if text.endswith("\ufffd") else self._advance(text)

    def flush(self) -> str:
        self._num_waiting = 0
        return self._advance(self._tokenizer.raw_text(self._window))

    def _read(self, byte: int | None) -> None:
        """Notes the next byte of a run, or its end."""
        if byte is None:
            self._utf8.reset()
            self.ahead = ""
        elif self.ahead is not None:
            try:
                self.ahead = self._utf8.decode(bytes((byte,)))
            except UnicodeDecodeError:
                self.ahead = None

    def _bad_bytes(self) -> str:
        added, self._num_waiting = "\ufffd" * self._num_waiting, 0
        self._num_out += len(added)
        return added

    def _all_but_last(self, text: str) -> str:
        """The last character is part of one whose other bytes may come; a few tokens before it say where it stands."""
        added = text[self._num_out : -1]
        self._window = self._window[-2 * _MAX_BYTES :]
        self._emitted = max(len(self._window) - _MAX_BYTES, 0)
        self._num_out = len(self._tokenizer.raw_text(self._window)) - 1
        return added

    def _advance(self, text: str) -> str:
        added = text[self._num_out :]
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        self._num_out = len(self._tokenizer.raw_text(self._window))
        return added
