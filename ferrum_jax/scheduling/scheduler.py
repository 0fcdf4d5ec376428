"""Scheduler: which tokens of which requests the next step computes, and what becomes of its results.

    schedule() k+1  ->  dispatched  ->  commit(k)  ->  schedule() k+2  ...

The host is at most one step behind: when step k + 1 is planned, the tokens of step k are on the device
only. A decoding row's position is known all the same, so its next token is planned and room for it is
acquired; what that step computes for a row that then turns out to have ended is dropped at its commit.
Rows are served by priority, then arrival; nothing here reads a clock, so equal calls give equal plans.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from ferrum_jax.metrics import ReuseMetrics
from ferrum_jax.plan import StepPlan
from ferrum_jax.request import Request
from ferrum_jax.scheduling.cache_manager import CacheManager
from ferrum_jax.scheduling.limits import refuse_endless, refuse_pins
from ferrum_jax.scheduling.results import append_tokens
from ferrum_jax.scheduling.rows import RunningRows
from ferrum_jax.scheduling.shard_plans import build_shard
from ferrum_jax.scheduling.waiting import WaitingQueue


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _InFlight:
    """A plan that is dispatched, and which admission each of its rows was."""

    plan: StepPlan
    requests: list[Request]
    epochs: np.ndarray  # [rows] int64


class Scheduler:
    """Continuous batching over one data shard: decodes first, then prefill chunks, up to a token budget."""

    def __init__(
        self, *, cache: CacheManager, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, less than max_num_seqs, {max_num_seqs}; "
                "a step must hold one token of every row"
            )
        self._cache = cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._rows = RunningRows(max_num_seqs)
        self._waiting = WaitingQueue()
        self._unfinished: dict[int, Request] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._awaited: set[int] = set()  # ids of preempted requests with a token in flight
        self._num_steps = 0

    @property
    def cache(self) -> CacheManager:
        return self._cache

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def running(self) -> list[Request]:
        """In the order in which they are served; the first is never preempted."""
        return self._rows.all()

    # -- requests come and go --------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue the request. Raises ValueError, naming both numbers, if it could never run to its end."""
        refuse_endless(request, self._cache, max_model_len=self._max_model_len, max_chunk=self._max_num_batched_tokens)
        assert request.id not in self._unfinished, f"request id {request.id} is taken by an unfinished request"
        self._unfinished[request.id] = request
        self._waiting.push(request)

    def pin(self, keys: Sequence[bytes]) -> int:
        """Keep the blocks of these keys until `unpin`; how many are kept.

        Raises ValueError, and then nothing is pinned, if requests that were accepted could not run beside them.
        """
        refuse_pins(keys, self._unfinished.values(), self._cache, max_chunk=self._max_num_batched_tokens)
        return self._cache.pins.add(keys)

    def unpin(self) -> None:
        """Pin nothing any more."""
        self._cache.pins.clear()

    def abort(self, request_id: int) -> Request | None:
        """End a request wherever it is, with finish_reason "abort"; None if it is not here any more."""
        request = self._unfinished.get(request_id)
        if request is not None:
            self.finish(request, "abort", None)
        return request

    def finish(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        """End a request now and free what it holds; what is in flight for it will be dropped.

        Of one that the last commit ended already only the reason changes: a stop string in its last token.
        """
        request.finish_reason = reason
        request.stop_reason = stop_reason
        if request.id in self._unfinished:
            self._drop(request)

    def _drop(self, request: Request) -> None:
        """Forget an ended request, which runs or waits."""
        del self._unfinished[request.id]
        self._awaited.discard(request.id)
        if self._waiting.remove(request.id) is None:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        self._cache.release(request.slot)
        self._rows.remove(request)

    # -- the next step ---------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be dispatched before a commit or an `add`.

        At most one plan may be uncommitted when it is called.
        """
        assert len(self._in_flight) <= 1, "commit the step before the last one first"
        preemptions = self._cache.counters.preemptions
        slots, requests, starts = self._plan_decodes()
        budget = self._max_num_batched_tokens - len(requests)
        chunks = self._plan_prefills(budget, is_first=not requests)
        admitted = []
        waits = len(chunks) < self._rows.num_prefilling  # for tokens of the budget, or for blocks
        if not waits and self._cache.counters.preemptions == preemptions:  # what was freed is for those that run
            admitted = self._admit(chunks, budget - sum(count for _, count in chunks))
            chunks += admitted
        if not requests and not chunks:
            return None
        requests = requests + [request for request, _ in chunks]
        plan = self._build(slots, starts, chunks, admitted)
        self._dispatch(plan, requests, chunks)
        return plan

    def _plan_decodes(self) -> tuple[np.ndarray, list[Request], np.ndarray]:
        """Slots [rows], requests and positions [rows] of the decoding rows, each with room for its token."""
        slots, requests, starts = self._open_decodes()
        short = self._cache.rows_to_grow(slots, starts + 1)
        if len(short) and not self._grow([requests[i] for i in short.tolist()]):
            slots, requests, starts = self._open_decodes()  # without the rows that were preempted
        return slots, requests, starts

    def _open_decodes(self) -> tuple[np.ndarray, list[Request], np.ndarray]:
        """The decoding rows that the token in flight does not bring to their length limit."""
        slots, requests = self._rows.decoding()
        starts = self._rows.computed[slots]
        is_open = starts + 1 < self._rows.limits[slots]
        if not is_open.all():
            slots, starts = slots[is_open], starts[is_open]
            requests = [self._rows.at(slot) for slot in slots.tolist()]
        return slots, requests, starts

    def _grow(self, requests: list[Request]) -> bool:
        """Room for one more token of each, the first first; False if rows had to be preempted for it."""
        preempted = False
        for request in requests:
            while request.slot and not self._cache.grow(request.slot, request.num_computed + 1):
                assert len(self._rows) > 1, f"the pool is too small for request {request.id} alone"
                self._preempt(self._rows.last())
                preempted = True
        return not preempted

    def _preempt(self, request: Request) -> None:
        """Publish what the row has, free it and queue it again; its replay hits its own blocks."""
        self._cache.publish(request, request.slot, request.num_computed)
        if request.num_computed == len(request.token_ids):  # its next token is still on the device
            self._awaited.add(request.id)
        self._leave(request)
        request.num_preemptions += 1
        self._cache.counters.preemptions += 1
        self._waiting.push(request)

    def _plan_prefills(self, budget: int, *, is_first: bool) -> list[tuple[Request, int]]:
        """Rows with tokens left to compute, each with its chunk's length, within `budget` tokens.

        A chunk for which a window's pool lacks blocks waits for those of other rows; where nothing else is planned
        before it (`is_first`), rows are preempted for it.
        """
        chunks: list[tuple[Request, int]] = []
        for request in self._rows.prefilling():
            count = self._cache.chunk(request, budget) if request.slot else 0
            if count == 0:
                break
            while not self._cache.grow(request.slot, request.num_computed + count):
                last = self._rows.last()
                if chunks or not is_first or last is request:
                    return chunks
                self._preempt(last)
            chunks.append((request, count))
            budget -= count
        return chunks

    def _admit(self, chunks: list[tuple[Request, int]], budget: int) -> list[tuple[Request, int]]:
        """Waiting requests that become rows now, with their first chunks; none overtakes the first that lacks blocks.

        One that shares a block which this step fills, be it for one of `chunks`, stays for the next step, where it
        hits that block; others pass it, but for the row slot that it would have taken.
        """
        admitted: list[tuple[Request, int]] = []
        sharing: list[Request] = []
        filling: set[bytes] = set()
        for request, count in chunks if self._waiting else ():
            filling.update(self._keys_to_publish(request, count))
        while budget and self._waiting and self._rows.slots.num_free > len(sharing):
            request = self._waiting.first()
            assert request.id not in self._awaited, f"request {request.id} would run without its token in flight"
            if self._cache.shares(request, filling):
                self._waiting.remove(request.id)
                sharing.append(request)
                continue
            if not self._admit_one(request, budget):
                break
            count = self._cache.chunk(request, budget)
            filling.update(self._keys_to_publish(request, count))
            admitted.append((request, count))
            budget -= count
        for request in sharing:
            self._waiting.push(request)
        return admitted

    def _keys_to_publish(self, request: Request, count: int) -> list[bytes]:
        return self._cache.keys_to_publish(request, request.slot, request.num_computed + count)

    def _admit_one(self, request: Request, budget: int) -> bool:
        (slot,) = self._rows.slots.take(1)
        num_hit = self._cache.admit(request, slot, budget)
        if num_hit is None:
            self._rows.slots.release((slot,))
            return False
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_hit
        self._waiting.remove(request.id)
        self._rows.insert(request, slot, num_hit)
        return True

    def _build(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        chunks: list[tuple[Request, int]],
        admitted: list[tuple[Request, int]],
    ) -> StepPlan:
        self._num_steps += 1
        shard = build_shard(self._cache, slots, starts, chunks)
        return StepPlan(step=self._num_steps, shards=(shard,), admitted=tuple((0, r.slot, r.id) for r, _ in admitted))

    def _dispatch(self, plan: StepPlan, requests: list[Request], chunks: list[tuple[Request, int]]) -> None:
        """Book the plan as done: progress, and the prompt blocks it fills, which the next admission may hit."""
        shard = plan.shards[0]
        for request, count in zip(requests, shard.counts.tolist(), strict=True):
            request.num_computed += count
        self._rows.computed[shard.slots] = shard.starts + shard.counts
        for request, _ in chunks:
            self._cache.publish(request, request.slot, request.num_computed)
            if request.num_computed == len(request.token_ids):
                self._rows.start_decoding(request)
        self._in_flight.append(_InFlight(plan=plan, requests=requests, epochs=self._rows.epochs[shard.slots]))

    # -- its results -----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, token_ids: np.ndarray) -> list[tuple[Request, int]]:
        """Take the sampled tokens [rows] of the oldest plan in flight; the requests that got one, with their rows.

        Those that ended by a stop id or by length have their finish_reason and hold nothing any more.
        """
        flight = self._in_flight.popleft()
        assert flight.plan is plan, f"commit of step {plan.step} before step {flight.plan.step}"
        shard = plan.shards[0]
        current = self._rows.epochs[shard.slots] == flight.epochs
        got = append_tokens(flight.requests, shard.samples, current, token_ids, self._awaited)
        done = shard.starts + shard.counts
        for row in self._cache.rows_to_publish(shard.slots, np.where(current, done, 0)).tolist():
            request = flight.requests[row]
            self._cache.publish(request, request.slot, int(done[row]))
        for request, _ in got:
            if request.finish_reason is not None:
                self._drop(request)
        return got

    def metrics(self) -> ReuseMetrics:
        """What was counted so far, with the gauges of this moment."""
        return self._cache.metrics()

    def check_invariants(self) -> None:
        """Prove the books of rows, blocks and queue."""
        self._rows.check_invariants()
        running = self._rows.all()
        self._cache.check_invariants(running)
        for request in running:
            assert request.finish_reason is None, f"request {request.id} runs after its end"
            assert request.id not in self._waiting, f"request {request.id} runs and waits"
        assert len(self._unfinished) == len(running) + len(self._waiting), "a request is in no list, or in two"
        assert all(id in self._waiting for id in self._awaited), "a request that does not wait is awaited"
