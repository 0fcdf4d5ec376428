"""Runs texts through an encoder's executables: which texts share a step, and its batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from ferrum_jax.io.ints import ceil_div
from ferrum_jax.runtime.compile.deferred import Prepared
from ferrum_jax.runtime.encoder_runtime import POOLINGS, EncoderBucket

_MOST_SMALL_STEPS = 4  # in place of one large one: each has its dispatch, and on accelerators reads all weights
_NO_PAIRS: Mapping[int, int] = MappingProxyType({})
Members = Sequence[Sequence[int]]  # the texts of a step, of each data shard


class EncoderRunner:
    """Runs texts through an encoder; one step is in flight while the next is packed."""

    def __init__(
        self,
        weights: tuple[jax.Array, ...],
        executables: Prepared[EncoderBucket],
        num_shards: int = 1,
    ) -> None:
        self.weights = weights
        self.executables = executables
        self._num_shards = num_shards
        self.num_steps = 0
        self.num_tokens = 0
        self.num_padded_tokens = 0

    @property
    def num_missing(self) -> int:
        """Executables that are not there: all are made before the first text."""
        return 0

    @property
    def compiled(self) -> list[dict[str, Any]]:
        """What was compiled while steps ran: nothing."""
        return []

    @property
    def num_executables(self) -> int:
        return len(self.executables)

    @property
    def num_loaded(self) -> int:
        return self.executables.num_loaded

    def run(
        self, texts: Sequence[Sequence[int]], pooling: str, seconds: Mapping[int, int] = _NO_PAIRS
    ) -> Iterator[tuple[Sequence[int], np.ndarray]]:
        """(which of the texts, their vectors [n, D] float32) of each step; a text comes once, in no order.

        texts: token ids, at least one and at most max_model_len of each. seconds: of those that are pairs, where the
        second one begins.
        """
        in_flight: deque[tuple[Sequence[int], np.ndarray, jax.Array]] = deque()
        for bucket, members in self._steps([len(text) for text in texts]):
            batch = np.zeros((self._num_shards, bucket.num_words), np.int32)
            batch[:, 0] = POOLINGS.index(pooling)
            for shard, chosen in enumerate(members):
                ids = np.concatenate([np.asarray(texts[i], np.int32) for i in chosen]) if chosen else ()
                batch[shard, 1 : 1 + len(chosen)] = [len(texts[i]) for i in chosen]
                begins = [seconds.get(i, len(texts[i])) for i in chosen]
                batch[shard, 1 + bucket.num_texts :][: len(chosen)] = begins
                batch[shard, 1 + 2 * bucket.num_texts :][: len(ids)] = ids
            vectors = self.executables[bucket](self.weights, batch.reshape(-1))
            vectors.copy_to_host_async()
            places = [shard * bucket.num_texts + i for shard, each in enumerate(members) for i in range(len(each))]
            in_flight.append(([i for each in members for i in each], np.asarray(places), vectors))
            self.num_steps += 1
            self.num_tokens += sum(len(texts[i]) for each in members for i in each)
            self.num_padded_tokens += self._num_shards * bucket.num_tokens
            if len(in_flight) > 1:
                yield _fetch(*in_flight.popleft())
        while in_flight:
            yield _fetch(*in_flight.popleft())

    def _steps(self, lengths: Sequence[int]) -> Iterator[tuple[EncoderBucket, Members]]:
        """Texts by the bucket length that is theirs; many at once, or few at a time where that pads less."""
        by_length: dict[int, list[EncoderBucket]] = {}
        for bucket in self.executables:
            by_length.setdefault(bucket.length, []).append(bucket)
        shortest = 0
        for length, buckets in sorted(by_length.items()):
            left = [i for i, n in enumerate(lengths) if shortest < n <= length]
            shortest = length
            while left:
                bucket = self._bucket(min(buckets), max(buckets), len(left), sum(lengths[i] for i in left))
                members = []
                for _ in range(self._num_shards):
                    chosen, left = _fill(bucket, left, lengths)
                    members.append(chosen)
                yield bucket, members

    def _bucket(self, few: EncoderBucket, many: EncoderBucket, num_texts: int, num_tokens: int) -> EncoderBucket:
        """The one that is taken for what is left of a length."""
        of_tokens = ceil_div(num_tokens, self._num_shards * few.num_tokens)
        small_steps = max(of_tokens, ceil_div(num_texts, self._num_shards * few.num_texts))
        fits = small_steps <= _MOST_SMALL_STEPS and small_steps * few.num_tokens < many.num_tokens
        return few if fits else many


def _fill(bucket: EncoderBucket, texts: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """The first texts that a step has room for, and the others."""
    chosen: list[int] = []
    room = bucket.num_tokens
    for text in texts:
        if len(chosen) == bucket.num_texts or 2 * room <= bucket.length:
            break
        if lengths[text] <= room:
            chosen.append(text)
            room -= lengths[text]
    taken = set(chosen)
    return chosen, [text for text in texts if text not in taken]


def _fetch(members: Sequence[int], places: np.ndarray, vectors: jax.Array) -> tuple[Sequence[int], np.ndarray]:
    return members, np.asarray(vectors)[places]
