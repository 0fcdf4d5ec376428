"""LongTexts: what is asked of a text that may be too long for its model, without encoding more than the answer needs.

    encoding(text, most)     all of it: not begun where its length says that it has more tokens, piece by piece else
    start(text, count)       as much of its start as has more tokens than `count`
    end(text, count)         likewise, of its end

A text is taken in pieces only at `cuts`, where that changes no token. What has none is encoded as a whole, up to
MOST_WHOLE characters, or where its length says that it may fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import tokenizers

from ferrum_jax.text.cuts import Cuts
from ferrum_jax.text.fewest_tokens import FewestTokens

LONG = 1 << 16  # characters; shorter texts are encoded at once
MOST_WHOLE = 1 << 21


class TextTooLong(ValueError):
    """how: how long it is, in words that follow "the text has"."""

    def __init__(self, how: str) -> None:
        super().__init__(f"the text has {how}; shorten it")
        self.how = how


class LongTexts:
    """Encodes long texts with one tokenizer."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library

    @functools.cached_property
    def _cuts(self) -> Cuts | None:
        return Cuts.of(self._library)

    @functools.cached_property
    def _fewest(self) -> FewestTokens:
        return FewestTokens(self._library)

    def encoding(self, text: str, most: int) -> tokenizers.Encoding:
        """The text without special tokens. Raises TextTooLong for one of more than `most` tokens."""
        self._require_room(text, most)
        found, count = [], 0
        for piece in self._pieces(text):
            if self._fewest.is_known:
                self._require_room(text[piece], most - count)
            else:
                require_whole(text[piece])
            found.append(self._encoded(text[piece]))
            count += len(found[-1].ids)
            if count > most:
                raise TextTooLong(f"more than {most:,} tokens")
        return found[0] if len(found) == 1 else tokenizers.Encoding.merge(found, growing_offsets=False)

    def start(self, text: str, count: int) -> str:
        """The start of the text, of more than `count` tokens; all of it where it has no more.

        Raises TextTooLong for a text without cuts that is too long to be encoded as a whole.
        """
        return text[: self._place(text, self._pieces(text), count, lambda piece: piece.stop, len(text))]

    def end(self, text: str, count: int) -> str:
        """Like `start`, for the end."""
        pieces = self._pieces(text, backwards=True)
        return text[self._place(text, pieces, count, lambda piece: piece.start, 0) :]

    def _place(
        self, text: str, pieces: Iterator[slice], count: int, edge: Callable[[slice], int], otherwise: int
    ) -> int:
        """The edge of the piece with which they have more than `count` tokens."""
        found = 0
        for piece in pieces:
            require_whole(text[piece])
            found += len(self._encoded(text[piece]).ids)
            if found > count:
                return edge(piece)
        return otherwise

    def _require_room(self, text: str, most: int) -> None:
        """Raises TextTooLong for what has more tokens than `most` whatever they are."""
        if (fewest := self._fewest.of(text)) > most:
            raise TextTooLong(f"at least {fewest:,} tokens, as its {len(text):,} characters say")

    def _pieces(self, text: str, *, backwards: bool = False) -> Iterator[slice]:
        if self._cuts is None:
            return iter((slice(0, len(text)),))
        return self._cuts.pieces_backwards(text, LONG) if backwards else self._cuts.pieces(text, LONG)

    def _encoded(self, piece: str) -> tokenizers.Encoding:
        return self._library.encode(piece, add_special_tokens=False)


def require_whole(text: str, what: str = "without a space between two words") -> None:
    """Raises TextTooLong for what is too long to be encoded at once. what: it is."""
    if len(text) > MOST_WHOLE:
        raise TextTooLong(f"{len(text):,} characters {what}, and {MOST_WHOLE:,} such are taken at most")
