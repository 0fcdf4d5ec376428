"""A request log run again through the real scheduler and cache manager, with no model and other pool sizes.

Every request arrives at the step at which it arrived and gets the tokens that it got, so at the size of the
pool that wrote the request log the counters are those of the engine. At another size, requests wait, are
preempted and hit as they would there; arrivals do not wait for answers. Images are encoded, found and evicted in
the pool of embeddings that the engine had.
"""

from __future__ import annotations

import bisect
import dataclasses
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.kv_cache.keys import extend_keys, root_key
from ferrum_jax.core.outputs import NOT_FINITE, NOT_FINITE_REASON
from ferrum_jax.core.plan import Draw, ShardPlan, StepPlan
from ferrum_jax.core.request import Request
from ferrum_jax.core.scheduler.drafting import StepCosts, drafting_of
from ferrum_jax.core.scheduler.request_log import LoggedChoice, LoggedRequest, PlanEvent, PlanLimit, Segment, ToldCosts
from ferrum_jax.core.scheduler.scheduler import Scheduler, StepsInFlight

if TYPE_CHECKING:
    from ferrum_jax.runtime.buckets import Ladder
    from ferrum_jax.runtime.layout import Layout

_COUNTERS = ("lookups", "hit_tokens", "missed_tokens", "resumed_tokens", "evictions", "refusals", "preemptions")
_TOTALS = (*_COUNTERS, "images_encoded", "image_hits", "image_evictions", "steps", "too_large")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A request log's counters with a pool of `num_blocks`.

    refusals: admissions put off. too_large: requests never served.

    resumed_tokens: what preempted rows found of themselves when they came back. They are no hits, for a pool that
    preempts nobody has none.

    images_encoded, image_hits: images that the tower was run for, and those whose embeddings were found; sounds and
    groups of a video's frames are images here.
    image_evictions: runs of embeddings that others took.
    """

    num_blocks: int
    steps: int
    lookups: int
    hit_tokens: int
    missed_tokens: int
    resumed_tokens: int
    evictions: int
    refusals: int
    preemptions: int
    too_large: int
    images_encoded: int
    image_hits: int
    image_evictions: int

    @property
    def hit_rate(self) -> float:
        """Hit tokens as a share of all tokens looked up, 0 to 1."""
        return self.hit_tokens / max(self.hit_tokens + self.missed_tokens, 1)


def replay(
    segments: Sequence[Segment],
    num_blocks: int,
    on_step: Callable[[Scheduler], None] = lambda scheduler: None,
    on_plan: Callable[[StepPlan], None] = lambda plan: None,
) -> Outcome:
    """The outcome of all segments, each with empty caches at its start.

    on_step is called after every step, on_plan with each that the device would run.
    """
    totals: Counter[str] = Counter()
    for segment in segments:
        run = _Replay(segment, num_blocks, on_plan)
        run.to_the_end(on_step)
        metrics, media = run.scheduler.metrics(), run.scheduler.images.counts()
        totals.update({name: getattr(metrics, name) for name in _COUNTERS})
        totals["images_encoded"] += sum(int(count) for name, count in media.items() if name.endswith("_encoded"))
        totals["image_hits"] += sum(int(count) for name, count in media.items() if name.endswith("_hits"))
        totals["image_evictions"] += int(media["image_evictions"])
        totals.update(steps=run.num_steps, too_large=run.num_too_large)
    return Outcome(num_blocks=num_blocks, **{name: totals[name] for name in _TOTALS})


class _ReplayedChoice(NamedTuple):
    num_prompt_tokens: int
    choice: LoggedChoice


class _ReplayedStep(NamedTuple):
    plan: StepPlan
    tokens: np.ndarray  # [places] int32


class _Replay:
    """One segment: the engine's loop with recorded tokens in place of a device."""

    def __init__(self, segment: Segment, num_blocks: int, on_plan: Callable[[StepPlan], None]) -> None:
        sizes = segment.sizes.with_pool(num_blocks)
        self._drafting = drafting_of(sizes)
        self.scheduler = Scheduler([CacheManager(sizes) for _ in range(sizes.num_shards)], self._drafting)
        self._on_plan = on_plan
        self.num_steps = 0
        self.num_too_large = 0
        self._arriving = deque(segment.requests)
        self._events = deque(segment.events)
        self._ids = iter(range(1, 1 << 62))
        self._choices: dict[int, _ReplayedChoice] = {}  # by id of unfinished requests
        self._by_slot: dict[tuple[int, int], _ReplayedChoice] = {}  # by shard and slot
        self._in_flight: StepsInFlight[_ReplayedStep] = StepsInFlight()

    def to_the_end(self, on_step: Callable[[Scheduler], None]) -> None:
        now = 0
        while self._arriving or self.scheduler.has_unfinished or self._in_flight:
            if not self.scheduler.has_unfinished:
                while self._in_flight:  # what nobody waits for any more
                    self._commit(*self._in_flight.popleft())
                if not self._arriving:
                    break
                now = max(now, self._arriving[0].arrival)
            while self._arriving and self._arriving[0].arrival <= now:
                self._add(self._arriving.popleft())
            while self._events and self._events[0].arrival <= now:
                self._follow(self._events.popleft())
            self._step()
            on_step(self.scheduler)
            now += 1

    def _follow(self, event: PlanEvent) -> None:
        """Has plans follow what the engine's followed."""
        if isinstance(event, PlanLimit):
            self.scheduler.limit(event.token_limit, event.horizons)
            return
        assert self._drafting is not None, "a log tells of drafts where they are asked for"
        if isinstance(event, ToldCosts):
            self._drafting.costs = [StepCosts.of(*of_rows) for of_rows in event.costs]
        else:
            self._drafting.source.learn(event.learnt, event.num_prompt_tokens, event.cache_salt.encode())

    def _add(self, logged: LoggedRequest) -> None:
        requests = [self._request(logged, index) for index in range(len(logged.choices))]
        try:
            for request, choice in zip(requests, logged.choices, strict=True):
                self.scheduler.add(request)
                self._choices[request.id] = _ReplayedChoice(len(logged.prompt_token_ids), choice)
        except ValueError:  # larger than the whole pool
            self.num_too_large += 1

    def _request(self, logged: LoggedRequest, index: int) -> Request:
        prompt, choice = logged.prompt_token_ids, logged.choices[index]
        scores = logged.prompt_logprobs or logged.most_hit_tokens is not None
        by_token = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
        return Request(
            id=next(self._ids),
            token_ids=array("i", prompt),
            num_prompt_tokens=len(prompt),
            max_total_tokens=len(prompt) + logged.max_tokens,
            min_tokens=len(choice.token_ids) - 1 if by_token else logged.max_tokens,
            stop_ids=frozenset([*logged.stop_ids, *(choice.token_ids[-1:] if by_token else ())]),
            priority=logged.priority,
            choice=index,
            num_choices=len(logged.choices),
            takes_hits=logged.takes_hits and (index > 0 or not logged.prompt_logprobs),
            most_hit_tokens=logged.most_hit_tokens if index == 0 else None,
            takes_drafts=logged.takes_drafts,
            draw=Draw.FULL if index == 0 and scores else Draw(logged.draw),
            needs_host=logged.needs_host,
            adapter=logged.adapter,
            cache_salt=logged.cache_salt.encode(),
            media=logged.media,
            images=logged.images,
        )

    def _step(self) -> None:
        if self.scheduler.waits_for_commit:
            self._commit(*self._in_flight.popleft())
        due = self._in_flight.advance(self._dispatch())
        if due is not None:
            self._commit(*due)

    def _dispatch(self) -> _ReplayedStep | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.num_steps += 1
        self._on_plan(plan)
        for shard, slot, request_id in plan.admitted:
            self._by_slot[shard, slot] = self._choices[request_id]
        tokens = [self._tokens(index, shard) for index, shard in enumerate(plan.shards)]
        return _ReplayedStep(plan, np.concatenate(tokens))

    def _tokens(self, index: int, shard: ShardPlan) -> np.ndarray:
        """[places] int32: the recorded token of each place of a row that samples; 0 for a row that ended before it.

        NOT_FINITE where the recorded row had none for that.
        """
        tokens = np.zeros(shard.num_places, np.int32)
        ends, drafts, places = shard.starts + shard.counts, shard.num_drafts, shard.first_places
        for row in np.flatnonzero(shard.samples).tolist():
            num_prompt_tokens, choice = self._by_slot[index, int(shard.slots[row])]
            first = int(ends[row] - drafts[row]) - num_prompt_tokens
            for depth in range(1 + int(drafts[row])):
                if first + depth < len(choice.token_ids):
                    tokens[places[row] + depth] = choice.token_ids[first + depth]
                elif choice.stop_reason == NOT_FINITE_REASON:
                    tokens[places[row] + depth] = NOT_FINITE
        return tokens

    def _commit(self, plan: StepPlan, tokens: np.ndarray) -> None:
        got: Sequence[tuple[Request, int]] | None = self.scheduler.commit(plan, tokens)
        while got is not None:
            for request, _ in got:
                self._end_as_recorded(request)
            got = self.scheduler.commit_accepted()

    def _end_as_recorded(self, request: Request) -> None:
        choice = self._choices[request.id].choice
        num_drawn = len(request.token_ids) - request.num_prompt_tokens
        is_open = request.finish_reason is None and choice.stop_reason != NOT_FINITE_REASON  # ends by itself
        if is_open and num_drawn >= len(choice.token_ids):
            self.scheduler.finish(request, choice.finish_reason, choice.stop_reason)
        if request.finish_reason is not None:
            del self._choices[request.id]


def reuse_distances(segments: Sequence[Segment]) -> Counter[int | None]:
    """For each block that a prompt looks up, how many other blocks were used since it was used last; None: never.

    A pool that evicts by least recent use and holds more blocks than the distance would have it.
    """
    distances: Counter[int | None] = Counter()
    for segment in segments:
        times: list[int] = []  # at which each block was used last, in order
        last: dict[bytes, int] = {}
        for time, (key, is_lookup) in enumerate(_uses(segment)):
            before = last.get(key)
            place = None if before is None else bisect.bisect_left(times, before)
            if is_lookup:
                distances[None if place is None else len(times) - place - 1] += 1
            if place is not None:
                del times[place]
            times.append(time)
            last[key] = time
    return distances


def _uses(segment: Segment) -> Iterator[tuple[bytes, bool]]:
    """The keys of all full blocks in the order of their use, and whether each is one that a prompt looks up."""
    size = segment.sizes.block_size
    for request in segment.requests:
        salt = request.cache_salt.encode()
        root = root_key(fingerprint=b"", kv_dtype="", block_size=size, adapter=request.adapter, salt=salt)
        for choice in request.choices:
            ids = array("i", request.prompt_token_ids + choice.token_ids[:-1])  # the last token is never computed
            keys: list[bytes] = []
            extend_keys(keys, root, ids, len(ids) // size, size, request.media)
            limit = (len(request.prompt_token_ids) - 1) // size
            yield from ((key, index < limit) for index, key in enumerate(keys))


def expected_padding(requests: Sequence[LoggedRequest], layout: Layout) -> float:
    """The share of all token slots that is padding when an engine of this layout runs the requests; 0 to 1."""
    sizes = dataclasses.replace(
        layout.sizes(layout.settled.config), max_cached_prompts=0, max_snapshots=None, num_host_blocks=0
    )
    plans: list[StepPlan] = []
    replay([Segment(sizes=sizes, requests=list(requests))], layout.ledger.num_blocks, on_plan=plans.append)
    return padding_of(plans, layout.ladder)


def padding_of(plans: Sequence[StepPlan], ladder: Ladder) -> float:
    """The share of the steps' token slots, on all shards, that holds no token; 0 to 1."""
    slots = sum(len(plan.shards) * ladder.bucket_of(plan).num_tokens for plan in plans)
    real = sum(plan.num_tokens for plan in plans)
    return 1 - real / slots if slots else 0.0
