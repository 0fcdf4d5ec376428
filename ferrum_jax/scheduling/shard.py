"""Shard: the rows and blocks of one data shard, and its part of the step that is being planned.

    begin()  ->  admit(...)  ->  finish()          then, when its results are there:  commit(...)

`begin` plans the rows that run already: decodes first, then prefill chunks, up to a token budget of the shard's own.
A row that must give way for one of them goes back to the queue that all shards have in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ferrum_jax.plan import ShardPlan
from ferrum_jax.request import Request
from ferrum_jax.scheduling.cache_manager import CacheManager
from ferrum_jax.scheduling.limits import holds
from ferrum_jax.scheduling.results import append_tokens
from ferrum_jax.scheduling.rows import RunningRows
from ferrum_jax.scheduling.shard_plans import build_shard
from ferrum_jax.scheduling.waiting import WaitingQueue


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRows:
    """A shard's part of a plan, and which admission each of its rows was."""

    plan: ShardPlan
    requests: list[Request]
    epochs: np.ndarray  # [rows] int64


@dataclasses.dataclass(kw_only=True, slots=True)
class _Draft:
    """The rows of the step that is being planned: decodes at slots and positions [rows], then chunks."""

    slots: np.ndarray
    starts: np.ndarray
    requests: list[Request]
    chunks: list[tuple[Request, int]]
    budget: int  # tokens that are left for new rows
    num_open: int  # row slots for new rows
    filling: set[bytes] | None = None  # keys that the step adds to the cache, once somebody has asked


class Shard:
    """Continuous batching over one data shard."""

    def __init__(
        self,
        *,
        index: int,
        cache: CacheManager,
        queue: WaitingQueue,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.index = index
        self.cache = cache
        self.rows = RunningRows(max_num_seqs)
        self._queue = queue
        self._max_num_batched_tokens = max_num_batched_tokens
        self._draft = self._empty_draft()

    def _empty_draft(self) -> _Draft:
        none = np.zeros(0, np.int32)
        return _Draft(slots=none, starts=none, requests=[], chunks=[], budget=0, num_open=0)

    # -- where a request may go ------------------------------------------------------------------------

    @property
    def takes_rows(self) -> bool:
        """Whether a waiting request may become a row in the step that is being planned."""
        return self._draft.budget > 0 and self._draft.num_open > 0

    @property
    def load(self) -> tuple[int, int]:
        """Rows that run, then blocks that are held: the shard with less of them takes the next request."""
        return len(self.rows), sum(pool.num_live for pool in self.cache.pools)

    def holds(self, request: Request) -> bool:
        """Whether the request could run here to its end, with nothing beside it but what is pinned."""
        return holds(request, self.cache, self._max_num_batched_tokens)

    def fills(self, request: Request) -> bool:
        """Whether the step that is being planned computes here what the request would compute too."""
        return self.cache.sharing.shares(request, self._filling())

    def _filling(self) -> set[bytes]:
        draft = self._draft
        if draft.filling is None:
            draft.filling = set()
            for request, count in draft.chunks:
                draft.filling.update(self._keys_to_publish(request, count))
        return draft.filling

    def _keys_to_publish(self, request: Request, count: int) -> set[bytes]:
        return self.cache.sharing.keys_to_publish(request, request.slot, request.num_computed + count)

    def reserve(self) -> None:
        """Keep a row slot free in this step, for a request that will hit what it fills."""
        self._draft.num_open -= 1

    # -- the step that is being planned ----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether the step that is being planned has no row here."""
        return not self._draft.requests and not self._draft.chunks

    def begin(self) -> None:
        """Plan the rows that run; new ones may follow where these neither wait for anything nor made a row give way."""
        preemptions = self.cache.counters.preemptions
        slots, requests, starts = self._plan_decodes()
        budget = self._max_num_batched_tokens - len(requests)
        chunks = self._plan_prefills(budget, is_first=not requests)
        waits = len(chunks) < self.rows.num_prefilling  # for tokens of the budget, or for blocks
        preempted = self.cache.counters.preemptions != preemptions  # what was freed is for those that run
        self._draft = _Draft(
            slots=slots,
            starts=starts,
            requests=requests,
            chunks=chunks,
            budget=budget - sum(count for _, count in chunks),
            num_open=0 if waits or preempted else self.rows.slots.num_free,
        )

    def _plan_decodes(self) -> tuple[np.ndarray, list[Request], np.ndarray]:
        """Slots [rows], requests and positions [rows] of the decoding rows, each with room for its token."""
        slots, requests, starts = self._open_decodes()
        short = self.cache.rows_to_grow(slots, starts + 1)
        if len(short) and not self._grow([requests[i] for i in short.tolist()]):
            slots, requests, starts = self._open_decodes()  # without the rows that were preempted
        return slots, requests, starts

    def _open_decodes(self) -> tuple[np.ndarray, list[Request], np.ndarray]:
        """The decoding rows that the token in flight does not bring to their length limit."""
        slots, requests = self.rows.decoding()
        starts = self.rows.computed[slots]
        is_open = starts + 1 < self.rows.limits[slots]
        if not is_open.all():
            slots, starts = slots[is_open], starts[is_open]
            requests = [self.rows.at(slot) for slot in slots.tolist()]
        return slots, requests, starts

    def _grow(self, requests: list[Request]) -> bool:
        """Room for one more token of each, the first first; False if rows had to be preempted for it."""
        preempted = False
        for request in requests:
            while request.slot and not self.cache.grow(request.slot, request.num_computed + 1):
                assert len(self.rows) > 1, f"the pool is too small for request {request.id} alone"
                self._preempt(self.rows.last())
                preempted = True
        return not preempted

    def _preempt(self, request: Request) -> None:
        """Publish what the row has, free it and queue it again; its replay hits its own blocks."""
        self.cache.sharing.publish(request, request.slot, request.num_computed)
        token_in_flight = request.num_computed == len(request.token_ids)  # its next token is still on the device
        self.leave([request])
        request.num_preemptions += 1
        self.cache.counters.preemptions += 1
        self._queue.push(request, is_awaited=token_in_flight)

    def _plan_prefills(self, budget: int, *, is_first: bool) -> list[tuple[Request, int]]:
        """Rows with tokens left to compute, each with its chunk's length, within `budget` tokens.

        A chunk for which a window's pool lacks blocks waits for those of other rows; where nothing else is planned
        before it (`is_first`), rows are preempted for it.
        """
        chunks: list[tuple[Request, int]] = []
        for request in self.rows.prefilling():
            count = self.cache.chunk(request, budget) if request.slot else 0
            if count == 0:
                break
            while not self.cache.grow(request.slot, request.num_computed + count):
                last = self.rows.last()
                if chunks or not is_first or last is request:
                    return chunks
                self._preempt(last)
            chunks.append((request, count))
            budget -= count
        return chunks

    def admit(self, request: Request) -> bool:
        """Make a waiting request a row and plan its first chunk; False, and nothing changed, where blocks lack."""
        draft = self._draft
        (slot,) = self.rows.slots.take(1)
        num_hit = self.cache.admit(request, slot, draft.budget)
        if num_hit is None:
            self.rows.slots.release((slot,))
            return False
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_hit
        self._queue.remove(request.id)
        self.rows.insert(request, slot, num_hit)
        request.shard = self.index
        count = self.cache.chunk(request, draft.budget)
        self._filling().update(self._keys_to_publish(request, count))
        draft.chunks.append((request, count))
        draft.budget -= count
        draft.num_open -= 1
        return True

    def finish(self) -> PlannedRows:
        """The plan, booked as done: progress, and the prompt blocks that it fills, which the next admission may hit."""
        draft, self._draft = self._draft, self._empty_draft()
        plan = build_shard(self.cache, draft.slots, draft.starts, draft.chunks)
        requests = [*draft.requests, *(request for request, _ in draft.chunks)]
        for request, count in zip(requests, plan.counts.tolist(), strict=True):
            request.num_computed += count
        self.rows.computed[plan.slots] = plan.starts + plan.counts
        for request, _ in draft.chunks:
            self.cache.sharing.publish(request, request.slot, request.num_computed)
            if request.num_computed == len(request.token_ids):
                self.rows.start_decoding(request)
        return PlannedRows(plan=plan, requests=requests, epochs=self.rows.epochs[plan.slots])

    # -- its results -----------------------------------------------------------------------------------

    def commit(self, planned: PlannedRows, token_ids: np.ndarray, first: int) -> list[tuple[Request, int]]:
        """Take the sampled tokens [rows]; the requests that got one, with their rows, counted from `first` on."""
        plan = planned.plan
        current = self.rows.epochs[plan.slots] == planned.epochs
        got = append_tokens(planned.requests, plan.samples, current, token_ids, self._queue.awaited, first)
        done = plan.starts + plan.counts
        for row in self.cache.sharing.rows_to_publish(plan.slots, np.where(current, done, 0)).tolist():
            request = planned.requests[row]
            self.cache.sharing.publish(request, request.slot, int(done[row]))
        return got

    def leave(self, requests: Sequence[Request]) -> None:
        """Take rows off and free what they hold."""
        self.cache.release(*[request.slot for request in requests])
        for request in requests:
            self.rows.remove(request)

    def check_invariants(self) -> None:
        """Prove the books of rows and blocks."""
        self.rows.check_invariants()
        running = self.rows.all()
        self.cache.check_invariants(running)
        for request in running:
            assert request.shard == self.index, f"request {request.id} runs on another shard than it says"
            assert request.finish_reason is None, f"request {request.id} runs after its end"
            assert request.id not in self._queue, f"request {request.id} runs and waits"
