"""Dispatched and not yet fetched results: a step, and log-probabilities of a prompt; and the arrays that steps lend.

`Spares` has as many sets of a part's results and inputs as its steps are in flight or still read: a set comes back when
its step was committed, so what the host reads is never written.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from ferrum_jax.core.plan import StepPlan
from ferrum_jax.runtime.buckets import Bucket
from ferrum_jax.runtime.compile.deferred import Executable
from ferrum_jax.runtime.sample import SCORE_TILE
from ferrum_jax.runtime.transfers import NamedTransfers

_ALIGNMENT = 64  # bytes; from there the CPU's devices read the host's memory in place


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFlight:
    """A step that was dispatched and not yet fetched."""

    plan: StepPlan
    bucket: Bucket
    _transfers: NamedTransfers
    _rows: jax.Array
    _last: jax.Array | None  # None of one launch, whose rows nobody embeds
    _experts: Sequence[jax.Array] = ()  # one, where they are asked for
    _drafts: Sequence[jax.Array] = ()  # one, where a layer predicts one token more
    _done: Callable[[], None] = lambda: None  # called when the device is known to have finished it
    _give: Callable[[], None] = lambda: None  # called when nobody reads it any more

    def release(self) -> None:
        """Lets later steps write where its results and inputs lie; nothing of it may be read from now on."""
        _ = self.drafts  # which are computed behind the rows, so that nothing is written there any more
        self._give()

    def rows(self) -> np.ndarray:
        """[places, words] int32 as `sampling.unpack` reads it, of all shards. Waits for the device."""
        rows = self._of_places(self._rows)
        self._done()
        return rows

    @property
    def gives_experts(self) -> bool:
        """Whether it has the experts of its tokens."""
        return bool(self._experts)

    def experts(self) -> np.ndarray:
        """[tokens, layers with experts * X] of `expert_dtype`, of all shards in order. Waits for the device."""
        experts = self._transfers.fetch(self._experts[0])
        return _without_padding(experts, [shard.num_tokens for shard in self.plan.shards])

    @functools.cached_property
    def drafts(self) -> np.ndarray | None:
        """[places] int32: the likeliest token behind the one drawn at each place; -1 of a row that computes nothing.

        None where no layer predicts one token more. Waits for the device.
        """
        if not self._drafts:
            return None
        computed = [np.repeat(shard.counts > 0, 1 + shard.num_drafts) for shard in self.plan.shards]
        return np.where(np.concatenate(computed), self._of_places(self._drafts[0])[:, 0], -1)

    def send_last_states(self) -> None:
        """Starts their copy to the host, which a row may want; one launch has none, and no such row."""
        if self._last is not None:
            self._transfers.send((self._last,))

    @functools.cached_property
    def last_states(self) -> np.ndarray:
        """[places, D] float32, the final hidden state before each place, which were sent. Waits for the device."""
        assert self._last is not None, "it was sent"
        return self._of_places(self._last).astype(np.float32)

    def _of_places(self, array: jax.Array) -> np.ndarray:
        return _without_padding(self._transfers.fetch(array), [shard.num_places for shard in self.plan.shards])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Prompt log-probabilities that were dispatched and not yet fetched. counts: tokens of each shard."""

    counts: Sequence[int]
    _transfers: NamedTransfers
    _tiles: Sequence[jax.Array]

    def words(self) -> np.ndarray:
        """[tokens, words] int32 as `sampling.unpack` reads it, of all shards in order. Waits for the device."""
        tiles = [self._transfers.fetch(tile).reshape(len(self.counts), SCORE_TILE, -1) for tile in self._tiles]
        return _without_padding(np.concatenate(tiles, axis=1).reshape(-1, tiles[0].shape[2]), self.counts)


def _without_padding(array: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """The first items of each shard's part of an array, by its count."""
    parts = np.split(array, len(counts))
    return np.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])


class Spares:
    """Arrays of results, and of packed inputs, that nobody reads any more. results_of: their shapes, of a part."""

    def __init__(self, results_of: Callable[[Any], Sequence[jax.ShapeDtypeStruct]], transfers: NamedTransfers) -> None:
        self._results_of, self._transfers = results_of, transfers
        self._free: collections.defaultdict[Hashable, list[Any]] = collections.defaultdict(list)
        self._lent: list[tuple[Hashable, Any]] = []

    def call(self, part: Hashable, executable: Executable, *arguments: Any) -> tuple[Any, ...]:
        """Runs a part's executable and returns its pools and results; spare arrays are lent for the results."""
        free = self._free[part]
        spares = free.pop() if free else tuple(map(self._transfers.zeros, self._results_of(part)))
        found = self._transfers.call(executable, *arguments, spares)
        self._lent.append((part, found[len(found) - len(spares) :]))
        return found

    def words(self, packed: np.ndarray) -> np.ndarray:
        """The packed input of a step in memory that stays, which is lent likewise."""
        free = self._free[packed.size]
        words = free.pop() if free else _aligned(packed.size)
        words[:] = packed
        self._lent.append((packed.size, words))
        return words

    def returning(self) -> Callable[[], None]:
        """Call this to give back what was lent since the last call, when every step and the host have read it."""
        lent, self._lent = self._lent, []
        return functools.partial(self._take_back, lent)

    def _take_back(self, lent: Sequence[tuple[Hashable, Any]]) -> None:
        for key, what in lent:
            self._free[key].append(what)


def _aligned(size: int) -> np.ndarray:
    """[size] int32 that begins where a device of the CPU can read it."""
    whole = np.zeros(4 * size + _ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + 4 * size].view(np.int32)
