"""Random histories of the scheduler, over tiny pools, against what each request gives alone."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduling.fake_device import VOCABULARY, Engine

# Few long stems, so that requests share prefixes, and tails that are cut anywhere.
_STEMS = tuple([(stem * 7 + i * i) % VOCABULARY for i in range(24)] for stem in range(2))
_prompts = st.builds(
    lambda stem, cut, tail: _STEMS[stem][:cut] + tail,
    st.integers(0, 1),
    st.sampled_from([4, 1, 5, 8, 9, 13, 23]),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, aborts and ends requests in any order."""

    @initialize(
        num_blocks=st.sampled_from([6, 5, 8, 12]),
        block_size=st.sampled_from([4, 2, 1]),
        max_num_seqs=st.sampled_from([4, 3, 2, 1]),
        extra_tokens=st.sampled_from([12, 5, 1, 0]),
        max_cached_prompts=st.sampled_from([2, 0, 1, 6]),
        min_cached_prompt_tokens=st.sampled_from([1, 5]),
        windows=st.sampled_from([(None,), (None, 6), (5,), (3, None, 9)]),
        max_snapshots=st.sampled_from([None, 4, None, 1, 12]),
        num_host_blocks=st.sampled_from([0, 12, 3, 1]),
        enabled=st.sampled_from([True, True, True, False]),
        num_shards=st.sampled_from([1, 2, 1, 3]),
        drafts=st.sampled_from([None, "mixed", "right", "wrong"]),
    )
    def start(self, num_blocks: int, block_size: int, max_num_seqs: int, extra_tokens: int, **wishes) -> None:
        self.max_total = min(num_blocks * block_size + 1, 40)
        self.budget = max_num_seqs + extra_tokens
        self.is_plain = not any(wishes["windows"]) and wishes["max_snapshots"] is None and wishes["drafts"] is None
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_total,
            **wishes,
        )

    @rule(
        prompts=st.lists(_prompts, min_size=1, max_size=3),
        max_tokens=st.sampled_from([16, 12, 3, 1]),
        stop_ids=st.sampled_from([(), (), (2,)]),
        min_tokens=st.sampled_from([0, 2]),
        priority=st.integers(0, 2),
        takes_hits=st.sampled_from([True, True, True, False]),
        salt=st.sampled_from([b"", b"", b"", b"tenant"]),
        num_choices=st.sampled_from([1, 1, 2, 3]),
    )
    def add(self, prompts: list[list[int]], max_tokens: int, min_tokens: int, num_choices: int, **wishes) -> None:
        for prompt in prompts:
            prompt = prompt[: self.max_total - 1]
            room = min(max_tokens, self.max_total - len(prompt))
            for _ in range(num_choices):
                try:
                    self.engine.add(prompt, room, min_tokens=min(min_tokens, room), num_choices=num_choices, **wishes)
                except ValueError as error:
                    assert "that are not pinned" in str(error)

    @rule(steps=st.sampled_from([8, 4, 2, 1]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            running = self.engine.scheduler.running()
            best = running[0] if running else None
            preemptions = best.num_preemptions if best else 0
            self.engine.step()
            self._check_budgets()
            assert best is None or best.num_preemptions == preemptions, "the oldest row was preempted"

    def _check_budgets(self) -> None:
        """Where blocks never lack and chunks end anywhere, a step is full while a row has tokens left to prefill."""
        if not self.is_plain or not self.engine.plans:
            return
        for index, shard in enumerate(self.engine.plans[-1].shards):
            rows = [request for request in self.engine.scheduler.running() if request.shard == index]
            if any(request.num_computed < len(request.token_ids) - 1 for request in rows):
                assert shard.num_tokens == self.budget, "tokens of the budget are left while a row wants them"

    @precondition(lambda self: self.engine.scheduler.has_unfinished)
    @rule(data=st.data())
    def abort(self, data) -> None:
        unfinished = [r.id for r in self.engine.requests.values() if r.finish_reason is None]
        aborted = self.engine.scheduler.abort(data.draw(st.sampled_from(unfinished)))
        assert aborted is not None and aborted.finish_reason == "abort"

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def pin(self, data) -> None:
        request = data.draw(st.sampled_from(list(self.engine.requests.values())))
        try:
            self.engine.scheduler.pin_prefix(request)
        except ValueError as error:
            assert "pinned" in str(error)

    @rule()
    def unpin(self) -> None:
        self.engine.scheduler.unpin()

    @precondition(lambda self: self.engine.is_idle)
    @rule()
    def reset(self) -> None:
        """Nothing that was there before is hit."""
        self.engine.scheduler.reset()
        assert not any(pool.num_keyed or pool.num_live for cache in self.engine.caches for pool in cache.all_pools())

    @rule(data=st.data())
    def end_by_a_stop_string(self, data) -> None:
        got = [request for request, _ in self.engine.step() if request.finish_reason is None]
        if got:
            self.engine.scheduler.finish(data.draw(st.sampled_from(got)), "stop", "text")

    @rule(data=st.data())
    def damage(self, data) -> None:
        """The logits of a row in flight are not finite: it ends, and the fake device's engine proves what is found."""
        self.engine.damage(lambda count: data.draw(st.integers(0, count - 1)))

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.unpin()
            self.engine.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=30)


@pytest.mark.slow
def test_long_histories_of_the_scheduler_hold_too() -> None:
    machine = type("LongSchedulerMachine", (SchedulerMachine,), {}).TestCase
    machine.settings = settings(max_examples=200, stateful_step_count=50)
    machine().runTest()
