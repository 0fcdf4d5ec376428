"""Random operations of the scheduler over all cache groups and tiers, the books proved after each of them.

Every request ends as it does alone, whatever ran beside it. Seeded histories without hypothesis, which spends longer on
its own books than all of this takes. Hosts with the same requests make the same plans, whatever seeds their processes
have.
"""

import hashlib
import os
import random
import re
import sys
from collections import Counter
from typing import Any

import pytest

from ferrum_jax.core.request import Request
from ferrum_jax.inputs.prompt import MediaSpan, PlacedImage
from ferrum_jax.io.ints import most_held
from tests.histories import seeded
from tests.scheduling.fake_device import VOCABULARY, Engine
from tests.support import ROOT, written_by

_STEMS = tuple([(stem * 7 + i * i) % VOCABULARY for i in range(24)] for stem in range(2))
_IMAGE = MediaSpan(kind="image", digest=b"a", start=2, length=3)


class History:
    """One engine of random size, and operations upon it in any order."""

    def __init__(self, rng: random.Random, drafts: str | None = None) -> None:
        choice = self._choice = rng.choice
        self._rng = rng
        self.num_operations = 0
        self._waits_for_commit = False
        num_blocks, block_size, max_num_seqs = choice([5, 6, 8, 12]), choice([1, 2, 4]), choice([1, 2, 3, 5])
        budget, windows = max_num_seqs + choice([0, 1, 5, 12]), choice([(None,), (None, 6), (5,), (3, None, 9)])
        least = max(most_held(window or 1, budget, block_size) for window in windows)
        self._max_total = min(num_blocks * block_size + 1, 40)
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self._max_total,
            max_cached_prompts=choice([0, 1, 2, 6]),
            min_cached_prompt_tokens=choice([1, 5]),
            windows=windows,
            window_blocks=choice([num_blocks, min(num_blocks, least)]),
            max_snapshots=choice([None, None, 1, 4]),
            num_host_blocks=choice([0, 1, 3, 12]),
            num_image_runs=(num_image_runs := choice([0, 0, 4, 7])),
            enabled=rng.random() < 0.9,
            num_shards=choice([1, 1, 2, 3]),
            drafts=drafts,
            horizon=choice([1, 4, 8]),
        )
        self._most_open = choice([1, 8])
        self._budget, self._takes_images = budget, num_image_runs > 0
        self._is_plain = windows == (None,) and self.engine.cache.states is None and drafts is None
        self._is_plain = self._is_plain and not num_image_runs  # for which a request may wait

    def run(self, num_operations: int) -> None:
        """So many operations, and then what it takes to end every request."""
        rules, weights = (
            (self.add, self.dispatch, self.commit, self.end, self.pin, self.renew),
            (60, 120, 120, 10, 10, 1),
        )
        while self.num_operations < num_operations:
            (rule,) = self._rng.choices(rules, weights)
            self.num_operations += rule()
        self.engine.scheduler.unpin()
        while self.engine.num_in_flight:
            self.commit()
        self.num_operations += self.engine.drain()
        if self.engine.cache.enabled and self._rng.random() < 0.1:
            self.engine.scheduler.reset()
            assert not any(
                pool.num_keyed or pool.num_live for cache in self.engine.caches for pool in cache.all_pools()
            )
            self.checked()

    def checked(self) -> bool:
        """The operation was done, and the books are right."""
        self.engine.scheduler.check_invariants()
        return True

    def unfinished(self) -> list[Request]:
        return [request for request in self.engine.requests.values() if request.finish_reason is None]

    def prompt(self) -> list[int]:
        tail = [self._rng.randrange(VOCABULARY) for _ in range(self._rng.randrange(3))]
        return (self._choice(_STEMS)[: self._choice([1, 4, 5, 8, 9, 13, 23])] + tail)[: self._max_total - 1]

    def images(self, length: int) -> list[PlacedImage]:
        """Some of few images, which come again and again, in a prompt of this length."""
        found, start = list[PlacedImage](), 1
        for tokens in self._choice([(), (), (3,), (17,), (1, 3), (3, 16)]):
            if start + tokens < length:
                about: Any = {
                    "digest": bytes([tokens, self._rng.randrange(3)]),
                    "grid": (1, 1, tokens),
                    "seconds": tokens / 2,
                }
                found.append(PlacedImage(start=start, length=tokens, **about))
                start = found[-1].end + 1
        return found

    def add(self) -> bool:
        if len(self.unfinished()) > self._most_open:
            return False
        prompt, num_choices = self.prompt(), self._choice([1, 1, 1, 2, 3])
        room = min(self._choice([1, 3, 12, 16]), self._max_total - len(prompt))
        wishes = {
            "stop_ids": self._choice([(), (), (2,)]),
            "min_tokens": min(self._choice([0, 2]), room),
            "priority": self._choice([0, 0, 1, 2]),
            "takes_hits": self._rng.random() < 0.8,
            "salt": self._choice([b"", b"", b"", b"tenant"]),
            "needs_host": self._rng.random() < 0.1,
            "adapter": self._choice([""] * 9 + ["a"]),
            "media": (_IMAGE,) if self._rng.random() < 0.1 and len(prompt) > 5 and not self._takes_images else (),
            "images": self.images(len(prompt)) if self._takes_images else (),
        }
        for _ in range(num_choices):
            try:
                self.engine.add(prompt, room, num_choices=num_choices, **wishes)
            except ValueError as error:
                assert "that are not pinned" in str(error)
        return self.checked()

    def dispatch(self) -> bool:
        """As the engine does: one step ahead, and where nothing could be planned a commit comes first."""
        before, running = self.engine.num_in_flight, self.engine.scheduler.running()
        if before > 1 or self._waits_for_commit:
            return False
        preemptions = running[0].num_preemptions if running else 0
        self.engine.dispatch()
        self._waits_for_commit = bool(before) and self.engine.num_in_flight == before
        assert not running or running[0].num_preemptions == preemptions, "the oldest row was preempted"
        if self._is_plain and self.engine.num_in_flight > before:
            self._check_budgets()
        if self._rng.random() < 0.02:
            self.engine.damage(self._rng.randrange)
        return True

    def _check_budgets(self) -> None:
        """Where blocks never lack and chunks end anywhere, a step is full while a row has tokens left to prefill."""
        for index, shard in enumerate(self.engine.plans[-1].shards):
            rows = [request for request in self.engine.scheduler.running() if request.shard == index]
            if any(request.num_computed < len(request.token_ids) - 1 for request in rows):
                assert shard.num_tokens == self._budget, "tokens of the budget are left while a row wants them"

    def commit(self) -> bool:
        """And sometimes a stop string in what it brought."""
        if not self.engine.num_in_flight:
            return False
        self._waits_for_commit = False
        got = [request for request, _ in self.engine.commit() if request.finish_reason is None]
        if got and self._rng.random() < 0.03:
            self.engine.scheduler.finish(self._choice(got), "stop", "text")
        return True

    def end(self) -> bool:
        unfinished = self.unfinished()
        if not unfinished:
            return False
        aborted = self.engine.scheduler.abort(self._choice(unfinished).id)
        assert aborted is not None and aborted.finish_reason == "abort"
        return self.checked()

    def renew(self) -> bool:
        """Other weights: rows keep their blocks, which nobody shares; the host tier is emptied with the rest."""
        while self.engine.num_in_flight:
            self.commit()
        self.engine.scheduler.renew(self._rng.randbytes(4))
        metrics = self.engine.scheduler.metrics()
        assert not metrics.entries and not metrics.host_entries
        assert all(row.takes_hits for row in self.engine.scheduler.running()), "scores of two weights would be mixed"
        return self.checked()

    def pin(self) -> bool:
        """Or unpin."""
        running = self.engine.scheduler.running()
        if not running or self._rng.random() < 0.5:
            self.engine.scheduler.unpin()
            return self.checked()
        try:
            if self._rng.random() < 0.5:
                self.engine.scheduler.pin(self.engine.cache.keys_of(self._choice(running))[:3])
            else:
                self.engine.scheduler.pin_prefix(self._choice(list(self.engine.requests.values())[-20:]))
        except ValueError as error:
            assert re.search(
                "more blocks pinned leave|more state snapshots pinned|is not cached as a whole", str(error)
            )
        return self.checked()


def _counted(rng: random.Random, num_operations: int, length: int, drafts: str | None = None) -> Counter[str]:
    """What the engines of so many operations counted, in histories of this length."""
    done, seen = 0, Counter[str]()
    while done < num_operations:
        history = History(rng, drafts)
        history.run(length)
        done += history.num_operations
        images, encoded = history.engine.scheduler.images.counts(), sum(len(p.encodes) for p in history.engine.plans)
        assert (images["images_encoded"], images["image_runs_live"]) == (encoded, 0)
        seen["turns"] += sum(
            max(map(int, plan.shards[0].counts), default=0)
            for plan in history.engine.plans
            if plan.shards[0].horizon > 1
        )
        counted = history.engine.scheduler.metrics().snapshot() | images
        seen.update({k: v for k, v in counted.items() if isinstance(v, int)})
    return seen


@pytest.mark.parametrize("drafts", [None, "mixed", "right", "wrong"])
@pytest.mark.parametrize(
    ("num_operations", "least"),
    [pytest.param(2500, 0, id="few"), pytest.param(50_000, 100, id="many", marks=pytest.mark.slow)],
)
def test_the_books_are_right_after_each_of_many_operations(num_operations: int, least: int, drafts: str | None) -> None:
    seen = _counted(random.Random(seeded(1)), num_operations, 250, drafts)
    for name in (
        *("evictions", "revivals", "preemptions", "refusals", "twins_merged", "prompt_hits"),
        *("prompt_evictions", "copied_blocks", "left_behind_blocks", "snapshot_evictions"),
        *("spilled_blocks", "loaded_blocks", "host_hits", "host_evictions"),
        *("images_encoded", "image_hits", "image_evictions"),
    ):
        assert seen[name] > least, f"{name} is {seen[name]}"


def plans_of(seed: int) -> str:
    """A digest of all plans and tables of random histories."""
    rng, state = random.Random(seed), hashlib.blake2b(digest_size=16)
    for _ in range(6):
        history = History(rng)
        history.run(60)
        for plan in history.engine.plans:
            state.update(repr((plan.step, plan.admitted)).encode())
            for shard in plan.shards:
                tables = [table.tolist() for table in shard.block_tables]
                rows = [a.tolist() for a in (shard.slots, shard.starts, shard.counts, shard.samples, shard.state_slots)]
                slots = [shard.source_slots.tolist(), shard.target_slots.tolist()]
                copies = [shard.spills, shard.loads, shard.copies_before, shard.copies_after]
                state.update(repr((rows, slots, tables, copies)).encode())
    return state.hexdigest()


def test_one_process_and_n_processes_have_equal_tables_and_plans() -> None:
    seed = seeded(5)
    program = f"from tests.scheduling.test_long_histories import plans_of; print(plans_of({seed}))"
    found = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
        found.add(written_by([sys.executable, "-c", program], env=environment).strip())
    assert found == {plans_of(seed)}
