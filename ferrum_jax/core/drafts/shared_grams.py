"""SharedGrams: where grams stand in the texts of other requests, running and finished.

A place of its book stands for a position of a text. Places are given out in a ring, so that the oldest make room;
a walk ends where the next place is no older, for that one was given out again.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

import numpy as np

from ferrum_jax.core.drafts.gram_book import WALK, GramBook, add_text, gram_hashes, power_above, zeros
from ferrum_jax.core.drafts.suffix_matches import Match


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class SharedText:
    """A text that other requests of its salt may draft from."""

    id: int
    tokens: array[int]
    num_prompt_tokens: int
    seed: int  # stands for its salt
    last_buckets: list[int]  # of the grams before the end of what was taken in
    num_taken: int = 0


class SharedGrams:
    """One index over all shared texts, bounded in places, finished texts and their tokens."""

    def __init__(self, lengths: Sequence[int], max_texts: int, max_tokens: int) -> None:
        """lengths: of grams, ascending. max_texts, max_tokens: of finished texts that are kept."""
        self._max_texts, self._max_tokens = max_texts, max_tokens
        self._book = GramBook(lengths, power_above(max_tokens - 1))
        self._lengths = self._book.lengths
        self._text_of = zeros(self._book.capacity)  # by place
        self._position_of = zeros(self._book.capacity)
        self._next = 1  # the place that is given out next
        self._texts: dict[int, SharedText] = {}  # by id
        self._finished: dict[int, int] = {}  # id to number of tokens, the oldest first
        self._num_finished_tokens = 0
        self._num_opened = 0

    def open(self, tokens: array[int], num_prompt_tokens: int, seed: int) -> SharedText:
        """A running text; nothing is shared before it is taken in."""
        self._num_opened += 1
        text = SharedText(
            id=self._num_opened, tokens=tokens, num_prompt_tokens=num_prompt_tokens, seed=seed, last_buckets=[]
        )
        self._texts[text.id] = text
        return text

    def take_in(self, text: SharedText, hashes: list[list[int]]) -> None:
        """Adds the positions of a text at which generated tokens stand; hashes: behind each of its new tokens, or none.

        The end of the text is no such position yet, so every place has a token to go on with.
        """
        count, num_taken = len(text.tokens), text.num_taken
        start = max(num_taken, text.num_prompt_tokens, 1)
        if len(hashes) == count - num_taken:
            buckets = [text.last_buckets, *(self._book.buckets(values, text.seed) for values in hashes)]
            for position in range(start, count):
                self._add(text, position, buckets[position - num_taken])
            text.last_buckets = buckets[-1]
        else:
            self._add_all(text, start, count)
            last = gram_hashes(text.tokens, count, self._lengths)
            text.last_buckets = self._book.buckets(last, text.seed)
        text.num_taken = count

    def finish(self, text: SharedText) -> None:
        """Shares the prompt of a text too, and keeps the text until it is one of the oldest."""
        if len(text.tokens) > self._max_tokens:  # it alone would drive all others out
            del self._texts[text.id]
            return
        self._add_all(text, 1, min(text.num_prompt_tokens, len(text.tokens)))
        text.tokens = array("i", text.tokens)
        self._finished[text.id] = len(text.tokens)
        self._num_finished_tokens += len(text.tokens)
        while len(self._finished) > self._max_texts or self._num_finished_tokens > self._max_tokens:
            oldest = next(iter(self._finished))
            self._num_finished_tokens -= self._finished.pop(oldest)
            del self._texts[oldest]

    def newest(self, reader: SharedText) -> list[int]:
        """For each gram length, the newest place in the bucket of the reader's last gram; 0 where there is none."""
        return self._book.newest(reader.last_buckets)

    def positions(self, reader: SharedText, level: int, place: int, most: int) -> list[Match]:
        """The newest positions of other texts, `most` of them, behind the reader's last gram; place: from `newest`."""
        length, end, texts = self._lengths[level], reader.num_taken, self._texts
        gram = reader.tokens[end - length : end]
        before, mask, newest = self._book.before[level], self._book.capacity - 1, self._next
        age, found = 0, []
        for _ in range(WALK):
            last_age, age = age, newest - place & mask
            if not place or age <= last_age:
                break
            text = texts.get(self._text_of[place])
            if text is not None and text is not reader:
                position = self._position_of[place]
                if text.tokens[position - length : position] == gram and text.seed == reader.seed:
                    found.append((text.tokens, position))
                    if len(found) == most:
                        break
            place = before[place]
        return found

    @property
    def bytes(self) -> int:
        return self._book.bytes + 8 * self._book.capacity + 4 * self._num_finished_tokens + 640 * len(self._texts)

    def _add(self, text: SharedText, position: int, buckets: list[int]) -> None:
        place = self._next
        self._text_of[place] = text.id
        self._position_of[place] = position
        self._book.add(place, buckets)
        self._next = place + 1 & self._book.capacity - 1 or 1

    def _add_all(self, text: SharedText, start: int, stop: int) -> None:
        """Adds positions start .. stop - 1; the first ones are left out where there are more than places."""
        room = self._book.capacity - 1
        start = max(start, stop - room)
        if start >= stop:
            return
        places = (self._next - 1 + np.arange(stop - start)) % room + 1
        np.asarray(self._text_of)[places] = text.id
        np.asarray(self._position_of)[places] = np.arange(start, stop)
        add_text(self._book, text.tokens, start, places, text.seed)
        self._next = int(places[-1]) % room + 1
