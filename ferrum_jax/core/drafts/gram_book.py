"""GramBook: at which places of texts runs of a few tokens, their grams, occurred before.

For each gram length there is a table of buckets, by hash, and each bucket holds the newest place whose gram fell into
it; behind each place stands the one before it in its bucket. Walking back from a bucket meets every place of a gram,
the newest first, among places of other grams of the same bucket, so whoever walks compares tokens. A place is a number
from 1 to capacity - 1; its owner says what it stands for, and may give it out again once it is the oldest. Hashes are
polynomials over token ids, equal in every process. A place takes 8 bytes for each gram length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

WALK = 32  # places of a bucket that a reader looks at, whatever their grams
BULK = 48  # tokens from which numpy is faster than a loop
_WORD = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_SPREAD = 0xD1342543DE82EF95


class GramBook:
    """Places by the hash of the gram before them, for each of some gram lengths."""

    def __init__(self, lengths: Sequence[int], capacity: int) -> None:
        """lengths: of grams, ascending. capacity: a power of two, above the largest place."""
        assert capacity & (capacity - 1) == 0, "capacity is a power of two"
        self.lengths = tuple(lengths)
        self.capacity = capacity
        self._shift = 64 - (capacity.bit_length() - 1)
        self._heads = [zeros(capacity) for _ in lengths]
        self.before = [zeros(capacity) for _ in lengths]  # by gram length, then place; 0 ends a walk

    def buckets(self, hashes: Sequence[int], seed: int = 0) -> list[int]:
        """The bucket of each hash."""
        shift = self._shift
        return [(value ^ seed) >> shift for value in hashes]

    def add(self, place: int, buckets: Sequence[int]) -> None:
        """Adds the newest place, with the buckets of its grams, shortest first; long ones may be missing."""
        for heads, before, bucket in zip(self._heads, self.before, buckets, strict=False):
            before[place] = heads[bucket]
            heads[bucket] = place

    def add_all(self, places: np.ndarray, level: int, hashes: np.ndarray, seed: int = 0) -> None:
        """Adds places, oldest first, at one gram length: `add` for each, done at once."""
        if not len(places):
            return
        buckets = ((hashes ^ np.uint64(seed)) >> np.uint64(self._shift)).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        buckets, places = buckets[order], places[order]
        heads, before = np.asarray(self._heads[level]), np.asarray(self.before[level])
        behind = heads[buckets]
        np.copyto(behind[1:], places[:-1], where=buckets[1:] == buckets[:-1])
        before[places] = behind
        heads[buckets] = places  # of equal buckets the last one stays

    def newest(self, buckets: Sequence[int]) -> list[int]:
        """The newest place in each of these buckets, shortest grams first; 0 where there is none."""
        return [heads[bucket] for heads, bucket in zip(self._heads, buckets, strict=False)]

    @property
    def bytes(self) -> int:
        return 8 * self.capacity * len(self.lengths)


def gram_hashes(tokens: array[int], end: int, lengths: Sequence[int]) -> list[int]:
    """The hash of the gram that ends before place `end`, for each length that fits, shortest first."""
    value, found, factor, word = 0, [0], _FACTOR, _WORD
    start = max(end - lengths[-1], 0)
    for token in tokens[start:end][::-1]:
        value = value * factor + token + 1 & word
        found.append(value)
    return [found[length] * _SPREAD & word for length in lengths if length <= end]


def all_gram_hashes(tokens: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """For each length, `gram_hashes` of the places length .. len(tokens)."""
    words = tokens.astype(np.uint64) + np.uint64(1)
    count, found, value = len(words), [], np.zeros(len(words), np.uint64)
    for back in range(lengths[-1]):
        if back < count:
            value = value[1:] if back else value  # by place; the first ones have no token so far back
            value = value * np.uint64(_FACTOR) + words[: count - back]
        else:
            value = value[:0]
        if back + 1 in lengths:
            found.append(value * np.uint64(_SPREAD))
    return found


def power_above(count: int) -> int:
    """The least power of two above a count, 64 at least."""
    return max(1 << max(count, 0).bit_length(), 64)


def zeros(count: int) -> memoryview:
    """Numbers of 32 bits that take memory as they are written; items are read as ints, faster than an array's."""
    return np.zeros(count, np.int32).data


def add_text(book: GramBook, tokens: array[int], start: int, places: np.ndarray, seed: int = 0) -> None:
    """Adds positions start, start + 1 .. of a text to a book, at the given places."""
    stop = start + len(places)
    first = max(start - book.lengths[-1], 0)  # the first token that a gram reaches
    hashes = all_gram_hashes(np.array(tokens[first : stop - 1]), book.lengths)
    for level, length in enumerate(book.lengths):
        of_level = hashes[level]  # at positions first + length ..
        skipped = max(first + length - start, 0)
        book.add_all(places[skipped:], level, of_level[max(start - first - length, 0) :], seed)
