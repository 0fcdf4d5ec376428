"""Scheduler: chooses each request's tokens for the next step, and takes in its results.

    schedule() k+1  ->  dispatched  ->  commit(k)  ->  schedule() k+2  ...

The host is at most one step behind: when step k + 1 is planned, the tokens of step k are on the device
only. A decoding row's position is known all the same, so its next token is planned and room for it is
acquired; what that step computes for a row that then turns out to have ended is dropped at its commit.
Rows are served by priority, then arrival; nothing here reads a clock, so equal calls give equal plans. Where drafted
tokens pay (`drafting.py`) the host commits a step before it plans the next one: which of them came true is known then.
Where rows only decode, nobody waits and no token is looked at before the next, a step may have a horizon: several
forwards, each for the token before. A row's position behind them is known as well, unless it ends within.
Every data shard plans its own rows (`shard.py`); the queue is one, and a request is given a shard when it is admitted.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.kv_cache.pins import Pinnable
from ferrum_jax.core.metrics import ReuseMetrics, total
from ferrum_jax.core.outputs import NOT_FINITE_REASON
from ferrum_jax.core.plan import MAX_HORIZON, Draw, StepPlan
from ferrum_jax.core.request import FLEX, Request
from ferrum_jax.core.scheduler.committing import PlannedRows
from ferrum_jax.core.scheduler.drafting import Drafting
from ferrum_jax.core.scheduler.flex import StepSizes, fill_up, make_way, who_is_here
from ferrum_jax.core.scheduler.limits import refuse_endless, refuse_pins, refuse_without_cache
from ferrum_jax.core.scheduler.media_book import MediaBook
from ferrum_jax.core.scheduler.shard import Shard
from ferrum_jax.core.scheduler.waiting import WaitingQueue

Step = TypeVar("Step")


class Scheduler:
    """Continuous batching over data shards, each with a cache, row slots and a token budget of its own."""

    def __init__(
        self, caches: Sequence[CacheManager], drafting: Drafting | None = None, steps: StepSizes | None = None
    ) -> None:
        """caches: of each shard, all of the same sizes, which say how many rows run and how many tokens a step has.

        drafting: of an engine that computes drafted tokens. steps: that are compiled, whose padding FLEX rows take.
        """
        self._steps = steps or StepSizes()
        self._most_alone = self._steps.alone(caches[0].sizes.max_num_seqs)
        self.drafting = drafting
        self._horizons: Sequence[Sequence[int]] = ()
        sizes = caches[0].sizes
        self.images = MediaBook(sizes.num_image_runs, sizes.max_image_patches)
        self.caches = tuple(caches)
        self._waiting = WaitingQueue(caches[0].junctions())  # keys are the same on all shards
        self._shards = [
            Shard(index=index, cache=cache, queue=self._waiting, images=self.images, drafting=drafting)
            for index, cache in enumerate(caches)
        ]
        self._unfinished: dict[int, Request] = {}
        self._in_flight: deque[tuple[StepPlan, list[PlannedRows]]] = deque()
        self._accepting: list[Iterator[list[tuple[Request, int]]]] = []  # of each shard what follows the last commit
        self._num_steps = 0

    @property
    def num_running(self) -> int:
        return sum(len(shard.rows) for shard in self._shards)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def running(self) -> list[Request]:
        """In the order in which they are served; the first is never preempted, nor is the first of any shard."""
        rows = [request for shard in self._shards for request in shard.rows.all()]
        return sorted(rows, key=lambda request: (request.priority, request.id))

    # -- requests come and go --------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue the request. Raises ValueError, naming both numbers, if it could never run to its end."""
        refuse_endless(request, self.caches)
        assert request.id not in self._unfinished, f"request id {request.id} is taken by an unfinished request"
        self._unfinished[request.id] = request
        self._waiting.push(request)

    def refuse_without_cache(self) -> None:
        """Raises ValueError, naming the setting, if no prefix that is computed could be hit."""
        refuse_without_cache(self.caches[0])

    def pin(self, keys: Sequence[bytes]) -> int:
        """Keep what these keys find until `unpin`, on every shard: blocks, states and prompts; how many have a block.

        Raises ValueError, and then nothing is pinned, if requests that were accepted could not run beside them, or if
        there are more snapshots than may be kept.
        """
        self._pin([(cache, cache.pins.find(keys)) for cache in self.caches])
        return max([sum(any(pool.find(key) for pool in cache.pools) for key in keys) for cache in self.caches])

    def pin_prefix(self, request: Request) -> None:
        """Keep until `unpin` what prompts that begin with the request's own hit, on every shard that has all of it.

        Raises ValueError as `pin` does, and where no shard has all of it.
        """
        wanted = [(cache, found) for cache in self.caches if (found := cache.find_prefix(request)) is not None]
        if not wanted:
            raise ValueError(
                "the prefix is not cached as a whole, so it cannot be pinned: what runs or is pinned leaves no room; "
                "let requests end, unpin others, or raise num_blocks or max_state_snapshots"
            )
        self._pin(wanted)

    def _pin(self, wanted: Sequence[tuple[CacheManager, Pinnable]]) -> None:
        for cache, ids in wanted:
            refuse_pins(ids, self._unfinished.values(), cache)
        for cache, ids in wanted:
            cache.pins.add(ids)

    def unpin(self) -> None:
        """Pin nothing any more."""
        for cache in self.caches:
            cache.pins.clear()

    def reset(self) -> None:
        """Forget what is cached, what is pinned too. Nothing may be unfinished."""
        assert not self._unfinished, "the cache is reset while requests run"
        for cache in self.caches:
            cache.reset()
        self.images.forget()

    def abort(self, request_id: int) -> Request | None:
        """End a request wherever it is, with finish_reason "abort"; None if it is not here any more."""
        request = self._unfinished.get(request_id)
        if request is not None:
            self.finish(request, "abort", None)
        return request

    def finish(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        """End a request now and free what it holds; what is in flight for it will be dropped.

        Only the reason changes where the last commit ended it already, for a stop string in its last token.
        """
        request.finish_reason = reason
        request.stop_reason = stop_reason
        if request.id in self._unfinished:
            self._forget([request])

    def extend(self, request: Request, token_ids: Sequence[int]) -> None:
        """Give a request that is here tokens that were not drawn; what a step in flight draws for it is dropped.

        They fit below its max_total_tokens. Its row slot is to be written before the next step is dispatched.
        """
        assert len(request.token_ids) + len(token_ids) < request.max_total_tokens, "no room for the token after these"
        self._shards[request.shard].extend(request, token_ids)

    def finish_not_finite(self, request: Request) -> None:
        """End a request whose prompt's logits hold NaN or infinity; nothing of it is hit any more."""
        self._shards[request.shard].cache.unkey(request)
        self.finish(request, "error", NOT_FINITE_REASON)

    def _forget(self, ended: Sequence[Request]) -> None:
        """Requests that run or wait are here no more; what they hold is free."""
        for request in ended:
            del self._unfinished[request.id]
            if self.drafting is not None:
                self.drafting.forget(request)
            if not request.slot:
                self._waiting.remove(request.id)
                self.images.release(request)
        for shard in self._shards:
            rows = [request for request in ended if request.slot and request.shard == shard.index]
            if rows:
                shard.leave(rows)

    def limit(self, num_tokens: int | None, horizons: Sequence[Sequence[int]] = ()) -> None:
        """Plan at most so many tokens of each shard from the next step on, None for as many as the sizes say.

        horizons: rows, `Draw` and forwards of steps that may go on, by rows ascending.
        """
        self._horizons = horizons
        for shard in self._shards:
            shard.limit_tokens(num_tokens)

    def renew(self, fingerprint: bytes) -> None:
        """Other weights: nothing that was computed is hit any more, and no plan is in flight.

        Rows go on over the KV they have and share none of it; scored rows begin anew.
        """
        assert not self._in_flight, "commit what is in flight first"
        for cache in self.caches:
            cache.renew(fingerprint)
        self.images.forget()
        for request in self._unfinished.values():
            request.keys.clear()
            request.has_old_kv = bool(request.slot)
        for shard in self._shards:
            shard.begin_scores_anew()
        self._waiting.renew()

    # -- the next step ---------------------------------------------------------------------------------

    @property
    def waits_for_commit(self) -> bool:
        """Whether the step in flight has drafts, or the next one is to have some: it is planned after a commit."""
        if not self._in_flight or self.drafting is None:
            return False
        if self._in_flight[-1][0].has_drafts:
            return True
        return not self.drafting.rests and self.drafting.pays([shard.decoding() for shard in self._shards])

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be dispatched before a commit or an `add`.

        At most one plan may be uncommitted when it is called, and none with drafts.
        """
        assert len(self._in_flight) <= 1, "commit the step before the last one first"
        assert not any(plan.has_drafts for plan, _ in self._in_flight), "which drafts come true is not known yet"
        self.images.begin()
        make_way(self._shards, self._waiting)
        has_flex, is_shared = who_is_here(self._shards, self._waiting)
        most = self._most_alone if has_flex and not is_shared else math.inf
        for shard in self._shards:
            shard.begin(most, rests_flex=is_shared)
        admitted = self._admit(rests_flex=is_shared)
        if is_shared:
            fill_up(self._shards, self._steps, self._most_alone, self._num_steps)
            admitted += self._admit(takes_images=False)
        if all(shard.is_idle for shard in self._shards) and not self.images.has_orders:
            return None
        self._num_steps += 1
        goes_on = bool(self._horizons) and not is_shared and self._goes_on()
        planned = [shard.finish({}, MAX_HORIZON) for shard in self._shards] if goes_on else self._with_drafts()
        plan = StepPlan(
            step=self._num_steps,
            shards=tuple(part.plan for part in planned),
            admitted=tuple((request.shard, request.slot, request.id) for request in admitted),
            encodes=self.images.take_orders(),
        )
        self._in_flight.append((plan, planned))
        return plan

    def alone(self, slots: Sequence[np.ndarray] | None = None) -> tuple[int, int] | None:
        """Most rows of a shard and the least `Draw` that serves all; None where a step of theirs needs more than that.

        slots: of the rows of each shard that are meant; None is of all that decode.
        """
        rows = [shard.rows for shard in self._shards]
        if self._waiting or self.drafting is not None or any(each.num_prefilling for each in rows):
            return None
        slots = slots or [each.decoding()[0] for each in rows]
        draw = max(int(each.draws_alone[own].max(initial=0)) for each, own in zip(rows, slots, strict=True))
        return None if draw == Draw.FULL else (max(map(len, slots)), draw)

    def _goes_on(self) -> bool:
        """Whether the step that is being planned has several forwards."""
        alone = self.alone([shard.sketch.slots for shard in self._shards])
        fitting = [k for rows, draw, k in self._horizons if alone is not None and draw == alone[1] and rows >= alone[0]]
        return bool(fitting) and fitting[0] > 1 and all(shard.goes_on(fitting[0]) for shard in self._shards)

    def _with_drafts(self) -> list[PlannedRows]:
        """Each shard's part of the plan, booked as done."""
        open_ = [shard.close() for shard in self._shards]
        if self.drafting is None or self._in_flight:
            return [shard.finish({}) for shard in self._shards]
        chosen = self.drafting.choose(open_)
        return [shard.finish(drafts) for shard, drafts in zip(self._shards, chosen, strict=True)]

    def _admit(self, *, rests_flex: bool = False, takes_images: bool = True) -> list[Request]:
        """Waiting requests that become rows now; none overtakes the first that no shard has blocks for.

        One that shares a block which this step fills on some shard stays for the next step, where it hits that block
        there; others pass it, but for the row slot that it would have taken. Others pass one whose images wait, too.
        rests_flex: FLEX requests wait for another step. takes_images: those with images need not.
        """
        admitted: list[Request] = []
        while self._waiting and any(shard.takes_rows for shard in self._shards):
            request = self._waiting.first()
            if request.id in self._waiting.awaited or (rests_flex and request.priority >= FLEX):
                break
            filling = next((shard for shard in self._shards if shard.fills(request)), None)
            if filling is not None:
                self._waiting.set_aside(request.id)
                filling.reserve()
            elif (request.images and not takes_images) or not self._has_images(request):
                self._waiting.set_aside(request.id)
            elif self._place(request):
                admitted.append(request)
            else:
                break
        self._waiting.put_back()
        return admitted

    def _has_images(self, request: Request) -> bool:
        """Whether the images that the request's prompt needs are on the device, or will be before this step."""
        if not request.images:
            return True
        # a cached prompt may have no room here: then less of it is hit, of a recurrent model maybe nothing
        num_hit = min(shard.cache.num_hit_tokens(request, whole=False) for shard in self._shards)
        return self.images.hold(request, num_hit, others_run=not all(shard.is_idle for shard in self._shards))

    def _place(self, request: Request) -> bool:
        """Make it a row where its longest prefix is cached, then where the load is least; elsewhere if blocks lack."""
        if len(self._shards) == 1:  # it takes rows, and `add` and `pin` saw to it that it holds this one
            return self._shards[0].admit(request)
        able = [shard for shard in self._shards if shard.takes_rows and shard.holds(request)]
        if len(able) > 1:
            able.sort(key=lambda shard: (-shard.cache.num_hit_tokens(request), shard.load, shard.index))
        return any(shard.admit(request) for shard in able)

    # -- its results -----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, token_ids: np.ndarray) -> list[tuple[Request, int]]:
        """Take the sampled tokens [places] of the oldest plan in flight: one of each row that samples.

        Gives the requests that they are for, with their places, which count through all shards, those of the first
        shard first. Requests that ended by a stop id, by length or, without a token, by logits that are not finite have
        their finish_reason and hold nothing any more. Tokens behind drafts that came true, and those of a horizon,
        follow: `commit_accepted`.
        """
        dispatched, planned = self._in_flight.popleft()
        assert dispatched is plan, f"commit of step {plan.step} before step {dispatched.step}"
        assert not self._accepting, "take all tokens of the last step first"
        first = 0
        for shard, part in zip(self._shards, planned, strict=True):
            end = first + part.plan.num_places
            self._accepting.append(shard.commit(part, token_ids[first:end], first))
            first = end
        got = self.commit_accepted() or []
        if not plan.has_drafts and plan.shards[0].horizon == 1:
            self._accepting = []
        return got

    def commit_accepted(self) -> list[tuple[Request, int]] | None:
        """Take the next token of each row whose draft came true, or that went on; None where no row is left.

        What the tokens before it brought about, such as an end or tokens that a grammar forces, is known by now.
        """
        parts = [next(part, None) for part in self._accepting]
        if all(part is None for part in parts):
            self._accepting = []
            return None
        got = list(itertools.chain.from_iterable(filter(None, parts)))
        self._forget([request for request, _ in got if request.finish_reason is not None])
        return got

    def metrics(self) -> ReuseMetrics:
        """The counters of all shards, with the gauges of this moment."""
        return total([cache.metrics() for cache in self.caches])

    def check_invariants(self) -> None:
        """Prove the books of rows, blocks and queue."""
        for shard in self._shards:
            shard.check_invariants()
        self.images.check_invariants([request for request in self._unfinished.values() if request.slot])
        self._waiting.check_invariants()
        assert len(self._unfinished) == self.num_running + self.num_waiting, "a request is in no list, or in two"


class StepsInFlight(deque[Step]):
    """Steps that were dispatched and not yet committed, the oldest first; each loop has its own type of step.

    Every loop around a scheduler dispatches the next step, then commits the one before it.
    """

    def advance(self, dispatched: Step | None) -> Step | None:
        """Takes the step that was dispatched just now, if there was one to plan; the one that must be committed now.

        That is the step before it, so the device has work while the host looks at results; None where there is none.
        """
        due = self.popleft() if self else None
        if dispatched is not None:
            self.append(dispatched)
        return due
