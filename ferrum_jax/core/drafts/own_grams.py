"""OwnGrams: where the last tokens of a text stand earlier in it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ferrum_jax.core.drafts.gram_book import BULK, WALK, GramBook, add_text, gram_hashes, power_above

_OBJECTS = 4500  # bytes of what a row has beside its tables


class OwnGrams:
    """The grams of one text that grows; the places of its book are positions: p tokens stand before place p."""

    def __init__(self, lengths: Sequence[int], tokens: array[int]) -> None:
        """tokens: of the text, kept and read as it grows."""
        self.tokens = tokens
        self.num_taken = 0
        self._book = GramBook(lengths, power_above(len(tokens) * 5 // 4))

    def take_in(self) -> list[list[int]]:
        """Adds the tokens that came since the last call; returns the hashes behind each, none where they are many."""
        tokens, count = self.tokens, len(self.tokens)
        if count >= self._book.capacity:  # all over again in twice the room
            self._book = GramBook(self._book.lengths, power_above(count))
            self.num_taken = 0
        start = self.num_taken + 1
        self.num_taken = count
        if count - start >= BULK:
            add_text(self._book, tokens, start, np.arange(start, count + 1))
            return []
        hashes = [gram_hashes(tokens, end, self._book.lengths) for end in range(start, count + 1)]
        for end, values in enumerate(hashes, start):
            self._book.add(end, self._book.buckets(values))
        return hashes

    def newest(self) -> list[int]:
        """For each gram length, the newest earlier position in the bucket of the last gram; 0 where there is none."""
        end = self.num_taken
        return [before[end] for before in self._book.before]

    def earlier(self, level: int, place: int, most: int) -> list[int]:
        """The newest positions, `most` of them, that stand behind the last gram of this level; place: from `newest`."""
        tokens, end, before = self.tokens, self.num_taken, self._book.before[level]
        length = self._book.lengths[level]
        gram = tokens[end - length : end]
        found: list[int] = []
        for _ in range(WALK):
            if not place:
                break
            if tokens[place - length : place] == gram:
                found.append(place)
                if len(found) == most:
                    break
            place = before[place]
        return found

    @property
    def bytes(self) -> int:
        return self._book.bytes + _OBJECTS
