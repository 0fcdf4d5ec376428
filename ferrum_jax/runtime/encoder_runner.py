"""Runs texts through an encoder's executables: which texts share a step, and its batch."""

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ferrum_jax.io.ints import ceil_div
from ferrum_jax.runtime.compile.deferred import Prepared
from ferrum_jax.runtime.encoder_runtime import POOLINGS, EncoderBucket
from ferrum_jax.runtime.transfers import NamedTransfers

_MAX_SMALL_STEPS = 4  # in place of one large one: each has its dispatch, and on accelerators reads all weights


class WholeText(NamedTuple):
    """A text that runs in one step. second: where the second text of a pair begins; None of a text that is no pair."""

    id: int
    token_ids: Sequence[int]
    pooling: str
    second: int | None


class VectorsInFlight(NamedTuple):
    """A step in flight. places: of the texts' vectors among all that the step makes, [shards * R, D]."""

    texts: Sequence[WholeText]
    places: Sequence[int]
    vectors: jax.Array
    transfers: NamedTransfers

    def fetch(self) -> np.ndarray:  # [n, D] float32
        """The vectors of the texts, in their order; waits for the device."""
        return self.transfers.fetch(self.vectors)[np.asarray(self.places)]


class EncoderRunner:
    """Dispatches steps of whole texts. weights: of the layout's targets, in their order."""

    def __init__(
        self, weights: tuple[jax.Array, ...], executables: Prepared[EncoderBucket], num_shards: int = 1
    ) -> None:
        self.weights, self.transfers = weights, NamedTransfers()
        self.num_steps = 0
        self.num_tokens = 0
        self.num_padded_tokens = 0
        self.num_missing, self.compiled = 0, list[dict[str, Any]]()  # all executables are made before the first text
        self._executables = executables
        self._num_shards = num_shards
        self._lengths = sorted({bucket.length for bucket in executables})

    @property
    def num_executables(self) -> int:
        return len(self._executables)

    @property
    def num_loaded(self) -> int:
        return self._executables.num_loaded

    def length_of(self, num_tokens: int) -> int:
        """The length of the buckets in which a text runs, whatever runs beside it."""
        return self._lengths[bisect.bisect_left(self._lengths, num_tokens)]

    def dispatch(self, texts: Sequence[WholeText]) -> tuple[VectorsInFlight, list[WholeText]]:
        """Starts a step of the first texts that it has room for; the step, and the other texts.

        texts: one at least, all of one pooling and one bucket length.
        """
        bucket = self._bucket(
            self.length_of(len(texts[0].token_ids)), len(texts), sum(len(text.token_ids) for text in texts)
        )
        batch = np.zeros((self._num_shards, bucket.num_words), np.int32)
        batch[:, 0] = POOLINGS.index(texts[0].pooling)
        left, taken, places = list(texts), list[WholeText](), list[int]()
        for shard in range(self._num_shards):
            chosen, left = _fill(bucket, left)
            _write(bucket, batch[shard, 1:], chosen)
            taken += chosen
            places += range(shard * bucket.num_texts, shard * bucket.num_texts + len(chosen))
        vectors = self.transfers.call(self._executables[bucket], self.weights, batch.reshape(-1))
        self.transfers.send((vectors,))
        self.num_steps += 1
        self.num_tokens += sum(len(text.token_ids) for text in taken)
        self.num_padded_tokens += self._num_shards * bucket.num_tokens
        return VectorsInFlight(taken, places, vectors, self.transfers), left

    def _bucket(self, length: int, num_texts: int, num_tokens: int) -> EncoderBucket:
        """The bucket of a length for what is left of it: many texts at once, or few at a time where that pads less."""
        buckets = [bucket for bucket in self._executables if bucket.length == length]
        few, many = min(buckets), max(buckets)
        of_tokens = ceil_div(num_tokens, self._num_shards * few.num_tokens)
        small_steps = max(of_tokens, ceil_div(num_texts, self._num_shards * few.num_texts))
        fits = small_steps <= _MAX_SMALL_STEPS and small_steps * few.num_tokens < many.num_tokens
        return few if fits else many


def _fill(bucket: EncoderBucket, texts: Sequence[WholeText]) -> tuple[list[WholeText], list[WholeText]]:
    """The first texts that a shard's part of a step has room for, and the others."""
    chosen, others, room = list[WholeText](), list[WholeText](), bucket.num_tokens
    for place, text in enumerate(texts):
        if len(chosen) == bucket.num_texts or 2 * room <= bucket.length:
            others += texts[place:]
            break
        if len(text.token_ids) <= room:
            chosen.append(text)
            room -= len(text.token_ids)
        else:
            others.append(text)
    return chosen, others


def _write(bucket: EncoderBucket, words: np.ndarray, texts: Sequence[WholeText]) -> None:
    """Writes a shard's texts into its batch behind the pooling, `words` [2R + T] int32."""
    lengths, seconds, tokens = np.split(words, [bucket.num_texts, 2 * bucket.num_texts])
    lengths[: len(texts)] = [len(text.token_ids) for text in texts]
    seconds[: len(texts)] = [len(text.token_ids) if text.second is None else text.second for text in texts]
    if texts:
        ids = np.concatenate([np.asarray(text.token_ids, np.int32) for text in texts])
        tokens[: len(ids)] = ids
