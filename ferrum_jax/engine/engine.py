"""The engine: the loop in which host and device meet.

`add` takes token ids and parameters, `step` plans and dispatches one step and commits the one before it,
so that the device always has the next step while the host looks at the last. A submission is what the user
asked for; it has one Request for each of its n choices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ferrum_jax.core.delta import Delta
from ferrum_jax.core.plan import StepPlan
from ferrum_jax.core.request import Request
from ferrum_jax.core.request_options import NO_OPTIONS, RequestOptions
from ferrum_jax.core.scheduler.drafting import StepCosts
from ferrum_jax.core.scheduler.request_log import LearntText, PlanLimit, RequestLogWriter, ToldCosts
from ferrum_jax.core.scheduler.scheduler import Scheduler, StepsInFlight
from ferrum_jax.engine.adapters import HeldSlots
from ferrum_jax.engine.constraints import Constraints
from ferrum_jax.engine.drawn_tokens import DrawnTokens
from ferrum_jax.engine.kv_publisher import KVPublisher
from ferrum_jax.engine.measured_steps import MeasuredSteps
from ferrum_jax.engine.not_ready import NotReady
from ferrum_jax.engine.open_submissions import OpenSubmissions
from ferrum_jax.engine.prefixes.kv_tier import KVTier
from ferrum_jax.engine.prefixes.saved_prefixes import PrefixCache
from ferrum_jax.engine.scoring import Observed, start_scoring
from ferrum_jax.engine.submission import Choice, InputProcessor, Submission
from ferrum_jax.runtime.dispatched import InFlight
from ferrum_jax.runtime.horizons import LOOK_EVERY
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.sampling_params import SamplingParams


class _Dispatched(NamedTuple):
    """A step in flight, and what is kept of its tokens beside those that are drawn."""

    step: InFlight
    observed: Sequence[Observed]
    begun_s: float  # when its planning began


class Engine:
    """Runs submissions to their end. One engine serves one thread."""

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        input_processor: InputProcessor,
        constraints: Constraints,
        adapters: HeldSlots,
        prefixes: PrefixCache,
        step_times: MeasuredSteps | None = None,
        request_log: RequestLogWriter | None = None,
        guard: contextlib.AbstractContextManager[None] | None = None,
        publisher: KVPublisher | None = None,
        tier: KVTier | None = None,
    ) -> None:
        """prefixes: all that is cached. step_times: of an engine that drafts tokens. request_log: gets a line for each
        submission that ended. guard: around each step, such as a `WriteGuard`. publisher: tells others what is cached.
        tier: what prefixes are read from ahead.
        """
        self.runner = runner
        self.scheduler = scheduler
        self._input_processor = input_processor
        self._constraints = constraints
        self._adapters = adapters
        self.kept_experts = input_processor.kept_experts
        self.prefixes, self._tier = prefixes, tier
        self._not_ready = NotReady(adapters)
        self._drawn = DrawnTokens(scheduler, constraints)
        self._submissions = OpenSubmissions(self._not_ready, request_log)
        self._by_slot: dict[tuple[int, int], Choice] = {}  # by data shard and slot
        self._in_flight: StepsInFlight[_Dispatched] = StepsInFlight()
        self._step_times, self._begun_s = step_times, 0.0
        self._guard = guard or contextlib.nullcontext()
        self._publisher = publisher
        self.weights_version = 0
        self._num_calls = 0
        self._events = PlanEvents(scheduler, request_log)
        self._events.limit(runner.ladder.most_tokens, (), 0)
        if scheduler.drafting is not None:
            choices = self._submissions.choices
            scheduler.drafting.allowed = lambda request, ids: constraints.allowed(choices[request.id], ids)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._submissions)

    # -- in ------------------------------------------------------------------------------------------

    def add(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, options: RequestOptions = NO_OPTIONS
    ) -> int:
        """Queues a submission and returns its id.

        Raises ValueError for a prompt or parameters that cannot be served; nothing is left behind then.
        """
        submission = self._input_processor.take(prompt_token_ids, sampling, options)
        if (scores := submission.scores) is not None:
            submission.part = self.runner.begin_scores(every=scores.takes_all)
        if self._tier is not None:
            submission.fetch = self._tier.want([choice.request for choice in submission.open_choices])
        if submission.waits:
            self._not_ready.put(submission)
        else:
            self._queue(submission)
        submission.arrival, submission.weights_version = self._num_calls, self.weights_version
        self._submissions.add(submission)
        return submission.id

    def queue_ready(self, submission_id: int) -> None:
        """Queues a submission whose grammar and adapter are ready, or ends it with what is wrong with either.

        An event of the engine like `add`: when a compile or a copy ends is no matter of the plan.
        """
        submission, fault = self._not_ready.take(submission_id)
        submission.arrival = max(self._num_calls - 1, submission.arrival)  # before this step
        if fault is None:
            try:
                self._queue(submission)
            except ValueError as error:
                fault = error
        if fault is not None:
            self._submissions.fail(submission, str(fault))

    def require_grammar(self, submission_id: int) -> None:
        """Waits for a submission's grammar. Raises ValueError with what is wrong with it."""
        self._not_ready.require_grammar(submission_id)

    def _queue_all_ready(self) -> None:
        """Queues what is ready, in order; where nothing else is to do, waits for the first."""
        if not len(self._not_ready):
            return
        is_all = len(self._not_ready) == len(self._submissions)
        if is_all and not self._in_flight and not self._submissions.has_ended:
            self._not_ready.wait_for_first()
        for submission_id in self._not_ready.ready():
            self.queue_ready(submission_id)

    def _queue(self, submission: Submission) -> None:
        """Every choice, or none and ValueError."""
        added: list[Choice] = []
        try:
            for choice in submission.open_choices:
                self._drawn.begin(choice)
                self.scheduler.add(choice.request)
                added.append(choice)
        except ValueError:
            for choice in added:
                self.scheduler.abort(choice.request.id)
            raise

    def reset_prefix_cache(self) -> bool:
        """Forgets all that is cached, pinned or not; False, and nothing changed, while a submission is unfinished."""
        if self.has_unfinished:
            return False
        self.scheduler.reset()
        self._tell_cached()
        return True

    def abort(self, submission_id: int) -> None:
        """Ends a submission; its output is dropped. Unknown ids (already finished) are ignored."""
        submission = self._submissions.get(submission_id)
        if submission is None:
            return
        self._not_ready.drop(submission_id)
        for choice in submission.choices:
            self.scheduler.abort(choice.request.id)
            self._drawn.forget(choice)
        self._submissions.drop(submission)

    def peek(self, submission_id: int) -> list[Delta]:
        """The new tokens of an unfinished submission as far as they are known; [] if it has ended."""
        return self._submissions.peek(submission_id)

    def progress(self) -> dict[str, tuple[float, float, float]]:
        """How far unfinished submissions are; see `OpenSubmissions.progress`."""
        return self._submissions.progress()

    def drain(self) -> None:
        """Commits what is in flight when nothing is left that could want more."""
        self.settle()
        if self._tier is not None:
            self._tier.send()

    def settle(self) -> list[Delta]:
        """Commits what is in flight, so that the host knows all that the device has done."""
        deltas: list[Delta] = []
        while self._in_flight:
            deltas += self._commit(self._in_flight.popleft())
        return deltas

    def abort_all(self) -> list[Delta]:
        """Ends everything that runs or waits with finish_reason "abort"; the deltas as far as they came."""
        deltas = self.settle() + self._submissions.give_ended()
        self._not_ready.clear()
        for choice in list(self._submissions.choices.values()):
            self.scheduler.finish(choice.request, "abort", None)
            deltas.append(self._finished(choice))
        return deltas

    def renew(self, weights: tuple[jax.Array, ...], fingerprint: bytes, version: int) -> None:
        """Goes on with other weights: nothing that was computed before is hit. Nothing may be in flight.

        fingerprint: of these weights and this version. Rows that run keep the KV that they have.
        """
        self.runner.take_weights(weights)
        for submission in self._submissions.values():
            submission.weights_version = version
            for choice in submission.open_choices:
                choice.request.keys.clear()  # also of one that is not queued yet
                if choice.request.slot or len(choice.request.token_ids) > choice.request.num_prompt_tokens:
                    choice.updates.append((len(choice.request.token_ids) - choice.request.num_prompt_tokens, version))
        self.scheduler.renew(fingerprint)
        self.prefixes = dataclasses.replace(self.prefixes, fingerprint=fingerprint)
        if self._tier is not None:
            self._tier.rest()
        self.weights_version = version
        self._tell_cached()

    def counts(self) -> dict[str, Any]:
        """Counts of reuse, grammars and masks, adapters, images and drafts."""
        counts = self._constraints.counts() | self._adapters.counts() | self.scheduler.images.counts()
        drafting = self.scheduler.drafting
        of_drafts = {} if drafting is None else drafting.counts.snapshot() | {"drafts_bytes": drafting.source.bytes}
        kept = self.kept_experts
        of_experts = {} if kept is None else {"experts_bytes": kept.bytes}
        reuse = self.scheduler.metrics().snapshot()
        of_tier = {} if self._tier is None else self._tier.counts()
        return {**reuse, **of_tier, **counts, "encoder_calls": self.runner.num_encoder_calls, **of_experts, **of_drafts}

    def live(self) -> dict[str, Any]:
        """How many rows run and requests wait, and the last steps."""
        return {
            "num_running": self.scheduler.num_running,
            "num_waiting": self.scheduler.num_waiting,
            "recent_steps": list(self.runner.recent_steps),
        }

    def close(self) -> None:
        """Frees the pools; the engine serves no more. For one whose step was broken off."""
        if self._tier is not None:
            self._tier.rest()
        self.runner.close()
        if self._publisher is not None:
            self._publisher.close()

    # -- one step ------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Dispatches the next step, commits the one before it. Gives choices that ended, and what streams moved."""
        if self.runner.take_parts() or self._num_calls % LOOK_EVERY == 0:
            ladder = self.runner.ladder
            horizons = self.runner.horizons.look(ladder, self.scheduler.alone())
            self._events.limit(ladder.most_tokens, horizons, self._num_calls)
        self._tell_costs()
        self._begun_s = time.perf_counter()
        self._num_calls += 1
        if self._tier is not None:
            self._tier.step()
        with self._guard:
            deltas = self._step()
        if self._publisher is not None:
            self._publisher.tell()
        return deltas

    def _tell_cached(self) -> None:
        if self._publisher is not None:
            self._publisher.tell()

    def _tell_costs(self) -> None:
        """Says what steps were found to take, if that is news."""
        costs = self._step_times and self._step_times.news(self.runner.ladder)
        if costs is not None:
            self.take_costs([(of_rows.num_rows, of_rows.bare, of_rows.sizes) for of_rows in costs])

    def take_costs(self, costs: Sequence[tuple[int, float, Sequence[Sequence[float]]]]) -> None:
        """Has plans from the next step on compute drafted tokens as pays by these: the fields of `StepCosts`."""
        self._events.take_costs([StepCosts.of(*of_rows) for of_rows in costs], self._num_calls)

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, cache_salt: str = "") -> None:
        """Takes a text that ended elsewhere, such as one of a job's journal, as one from which drafts may come."""
        self._events.learn(token_ids, num_prompt_tokens, cache_salt, self._num_calls)

    def _step(self) -> list[Delta]:
        self._queue_all_ready()
        deltas = self._submissions.give_ended()
        if self.scheduler.waits_for_commit:
            deltas += self._commit(self._in_flight.advance(None))
        plan = self._schedule()
        if plan is None:
            return deltas + self._commit(self._in_flight.advance(None))
        for shard, slot, request_id in plan.admitted:
            choice = self._by_slot[shard, slot] = self._submissions.choices[request_id]
            self.runner.write_slot(shard, slot, self._input_processor.slot_record(choice))
            self._drawn.written(request_id)
        self._encode(plan)
        for choice in self._drawn.take_unwritten():
            self.runner.write_slot(choice.request.shard, choice.request.slot, self._input_processor.slot_record(choice))
        if not any(shard.draws_under_masks for shard in plan.shards):
            step = self.runner.dispatch(plan)
            return deltas + self._commit(self._in_flight.advance(_Dispatched(step, self._observe(step), self._begun_s)))

        def masks_follow() -> None:
            deltas.extend(self._commit(self._in_flight.advance(None)))
            self.runner.write_masks(*self._constraints.masks_of(plan, self._choice_at))

        step = self.runner.dispatch(plan, masks_follow)
        self._in_flight.append(_Dispatched(step, self._observe(step), self._begun_s))
        return deltas

    def _encode(self, plan: StepPlan) -> None:
        """Starts the images of the plan on their way into the runs that it names."""
        if plan.encodes:
            choices = self._submissions.choices
            images = [(choices[order.request].submission.images[order.image], order.runs) for order in plan.encodes]
            self.runner.encode(images)

    def _schedule(self) -> StepPlan | None:
        return self.scheduler.schedule()

    def _observe(self, step: InFlight) -> Sequence[Observed]:
        """Starts what is kept of tokens of a step that was dispatched just now, while slots are its rows'."""
        if self._submissions.num_embedded:
            step.send_last_states()
        if not (self._submissions.num_scored or step.gives_experts):
            return ()
        return start_scoring(self.runner, step, self._choice_at, self.kept_experts)

    def _choice_at(self, shard: int, slot: int) -> Choice:
        """Who has a row slot."""
        return self._by_slot[shard, slot]

    def _commit(self, dispatched: _Dispatched | None) -> list[Delta]:
        if dispatched is None:
            return []
        step = dispatched.step
        rows = step.rows()
        if self._step_times is not None:
            self._step_times.ended(step, dispatched.begun_s)
        deltas: list[Delta] = []
        for choice in (damaged for observed in dispatched.observed for damaged in observed.collect()):
            if choice.request.finish_reason is None:
                self.scheduler.finish_not_finite(choice.request)
                deltas.append(self._finished(choice))
        streamed: dict[int, Choice] = {}
        got: Sequence[tuple[Request, int]] | None = self.scheduler.commit(step.plan, rows[:, 0])
        while got is not None:
            for request, place in got:
                choice = self._submissions.choices[request.id]
                self._drawn.take(choice, step, rows, place)
                if self._tier is not None:
                    self._tier.keep(request)
                if request.finish_reason is not None:
                    streamed.pop(request.id, None)
                    deltas.append(self._finished(choice))
                elif choice.submission.options.streams:
                    streamed[request.id] = choice
            got = self.scheduler.commit_accepted()
        step.release()
        return deltas + [self._submissions.delta(choice) for choice in streamed.values()]

    def _finished(self, choice: Choice) -> Delta:
        """The last delta of a choice."""
        self._drawn.forget(choice)
        return self._submissions.finish(choice)


class PlanEvents:
    """Events that plans of one engine follow beside requests: each before a step, decided by process 0 and recorded.

    So equal events give equal plans: on the hosts of the engine, and when a request log is replayed. arrival: steps
    before the event.
    """

    def __init__(self, scheduler: Scheduler, request_log: RequestLogWriter | None) -> None:
        self._scheduler, self._log = scheduler, request_log
        self._told: tuple[int | None, Sequence[tuple[int, int, int]]] = (None, ())

    def limit(self, tokens: int | None, horizons: Sequence[tuple[int, int, int]], arrival: int) -> None:
        """Plans follow the largest executable that is there, and launches that go on, from the next step on."""
        if self._told == (tokens, horizons):
            return
        self._told = tokens, horizons
        self._scheduler.limit(tokens, horizons)
        if self._log is not None:
            self._log.event(PlanLimit(arrival=arrival, token_limit=tokens, horizons=horizons))

    def take_costs(self, costs: Sequence[StepCosts], arrival: int) -> None:
        """Drafted tokens are computed as pays by these costs, from the next step on."""
        if self._scheduler.drafting is None:
            return
        self._scheduler.drafting.costs = costs
        if self._log is not None:
            self._log.event(ToldCosts(arrival=arrival, costs=[(c.num_rows, c.bare, c.sizes) for c in costs]))

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, cache_salt: str, arrival: int) -> None:
        """Tokens may be drafted from a text that ended elsewhere, from the next step on."""
        if self._scheduler.drafting is None:
            return
        self._scheduler.drafting.source.learn(token_ids, num_prompt_tokens, cache_salt.encode())
        if self._log is not None:
            learnt = list(token_ids)
            self._log.event(
                LearntText(arrival=arrival, learnt=learnt, num_prompt_tokens=num_prompt_tokens, cache_salt=cache_salt)
            )
