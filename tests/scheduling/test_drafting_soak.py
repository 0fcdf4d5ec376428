"""Long seeded histories with drafts under pressure; grammars force tokens and stop strings end rows within a draft."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from ferrum_jax.core.drafts.drafts import Draft
from ferrum_jax.core.request import Request
from ferrum_jax.core.scheduler.drafting import StepCosts
from tests.histories import seeded
from tests.marks import few
from tests.scheduling.fake_device import VOCABULARY, Engine, FakeDrafts, next_token, prompt_of

_MAX_TOTAL = 36


def forced(ids: Sequence[int]) -> list[int]:
    """The tokens that must come after these: the model itself would draw others in about half of the cases."""
    return (
        [(ids[-1] + sum(ids) + i) % VOCABULARY for i in range(1 + ids[-2])]
        if sum(ids) % 5 == 0 and len(ids) > 1
        else []
    )


def ends_with_text(ids: Sequence[int]) -> bool:
    """Whether the last tokens complete a stop string."""
    return list(ids[-3:]) == [1, 0, 1]


def grown(ids: list[int], request: Request) -> str | None:
    """Adds the request's next tokens, the drawn one and those that are forced behind it; why it ends with them."""
    ids.append(next_token(ids))
    if ids[-1] in request.stop_ids and len(ids) - request.num_prompt_tokens > request.min_tokens:
        return "stop"
    if len(ids) >= request.max_total_tokens:
        return "length"
    if ends_with_text(ids):
        return "text"
    for token in forced(ids)[: request.max_total_tokens - 1 - len(ids)]:
        ids.append(token)
        if ends_with_text(ids):
            return "text"
    return None


class TextDrafts(FakeDrafts):
    """Drafts of the tokens that a row will have, drawn and forced. kind: as of `KnownDrafts`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def propose(self, request: Request, most: int) -> Draft:
        ids, found = request.token_ids.tolist(), []
        while len(ids) < len(request.token_ids) + most and grown(ids, request) is None:
            pass
        for place in range(len(request.token_ids), min(len(ids), len(request.token_ids) + most)):
            is_wrong = self._kind == "wrong" or (self._kind == "mixed" and place % 4 == 3)
            found.append((ids[place] + is_wrong) % VOCABULARY)
        return Draft(token_ids=found, confidences=[1.0] * len(found))


class TextEngine(Engine):
    """An engine whose rows have forced tokens and stop strings."""

    def __init__(self, kind: str, **sizes) -> None:
        super().__init__(drafts=TextDrafts(kind), max_model_len=_MAX_TOTAL, **sizes)
        self.after_token = self._take
        self.num_rewound = self.num_forced = 0
        for cache in self.caches:
            cache.settle_drafts = self._counting(cache.settle_drafts)

    def _counting(self, settle):
        def settled(slot: int, *, are_whole: bool) -> bool:
            is_kept = settle(slot, are_whole=are_whole)
            self.num_rewound += not is_kept
            return is_kept

        return settled

    def _take(self, request: Request) -> None:
        """What the engine does with a token: a stop string ends the row, and a grammar gives it more."""
        ids, more = request.token_ids.tolist(), []
        if not ends_with_text(ids):
            for token in forced(ids)[: request.max_total_tokens - 1 - len(ids)]:
                more.append(token)
                if ends_with_text([*ids, *more]):
                    break
        if more:
            self.num_forced += len(more)
            self.scheduler.extend(request, more)
            if request.slot:
                self.runner.write_slot(request.shard, request.slot, request.token_ids)
        if ends_with_text(request.token_ids):
            self.scheduler.finish(request, "stop", "text")

    def check(self, request: Request) -> None:
        ids, found = request.token_ids[: request.num_prompt_tokens].tolist(), request.token_ids.tolist()
        reason = None
        while len(ids) < len(found) and reason is None:
            reason = grown(ids, request)
        if request.finish_reason in ("length", "stop"):
            assert ids == found, f"request {request.id} has other tokens than alone"
            assert reason == ("text" if isinstance(request.stop_reason, str) else request.finish_reason)
        else:
            assert found == ids[: len(found)], f"request {request.id} went astray"


def soaked(kind: str, rng: random.Random, num_rounds: int) -> Counter[str]:
    """What was counted of an engine of random size in so many rounds; its requests end as they do alone."""
    block_size, max_num_seqs = rng.choice([2, 4, 8]), rng.choice([3, 5, 8])
    num_blocks, is_recurrent = rng.choice([40, 48]) // block_size, rng.random() < 0.5
    engine = TextEngine(
        kind,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([4, 20]),
        windows=rng.choice([(None,), (None,), (None, 6), (5,)]),
        max_snapshots=rng.choice([4, 12]) if is_recurrent else None,
        num_host_blocks=rng.choice([0, 4, 30]),
        max_cached_prompts=rng.choice([0, 1, 3]),
        num_shards=rng.choice([1, 1, 2]),
    )
    longest = min(num_blocks * block_size + 1, _MAX_TOTAL)
    stems = [[rng.randrange(VOCABULARY) for _ in range(longest)] for _ in range(3)]
    for _ in range(num_rounds):
        if rng.random() < 0.4:
            prompt = rng.choice(stems)[: rng.randrange(1, longest - 2)]
            prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(3))]
            room = rng.randrange(1, longest - len(prompt) + 1)
            stop_ids = rng.choice([(), (), (3,)])
            engine.add(prompt, room, stop_ids=stop_ids, min_tokens=rng.choice([0, 2]), priority=rng.choice([0, 0, 1]))
        unfinished = [request.id for request in engine.requests.values() if request.finish_reason is None]
        if unfinished and rng.random() < 0.03:
            engine.scheduler.abort(rng.choice(unfinished))
        if rng.random() < 0.02:
            engine.damage(rng.randrange)
        engine.step()
        if rng.random() < 0.01:
            while engine.num_in_flight:
                engine.commit()
            engine.scheduler.renew(rng.randbytes(4))
    engine.drain()
    drafts = engine.scheduler.drafting.counts
    texts = [request for request in engine.requests.values() if request.stop_reason == "text"]
    found = {"accepted": drafts.accepted_tokens, "rejected": drafts.drafted_tokens - drafts.accepted_tokens}
    found |= {"rewound": engine.num_rewound, "forced": engine.num_forced, "texts": len(texts)}
    reuse = engine.scheduler.metrics().snapshot()
    return Counter(found | {name: reuse[name] for name in ("preemptions", "hits", "evictions", "loaded_blocks")})


def _soak(kind: str, seed: int, num_engines: int, num_rounds: int) -> None:
    rng, seen = random.Random(seeded(seed)), Counter[str]()
    for _ in range(num_engines):
        seen += soaked(kind, rng, num_rounds)
    missing = {"right": ("rejected", "rewound"), "wrong": ("accepted",), "mixed": ()}[kind]
    names = ("accepted", "rejected", "rewound", "forced", "texts", "preemptions", "hits", "evictions", "loaded_blocks")
    scarce = {name: seen[name] for name in names if name not in missing and seen[name] < 10}
    assert not scarce, f"hardly seen: {scarce}"


@pytest.mark.parametrize("kind", few(["mixed", "right", "wrong"]))
def test_rows_with_drafts_end_as_they_do_alone(kind: str) -> None:
    _soak(kind, seed=1, num_engines=12, num_rounds=200)


@pytest.mark.parametrize("sizes", [(), (4,)])
def test_no_row_has_drafts_in_a_step_larger_than_those_whose_costs_are_told(sizes: tuple[int, ...]) -> None:
    """An executable that has just come allows more tokens at once; what it takes is told some steps later."""
    engine = Engine(drafts="right", max_num_batched_tokens=16)
    engine.scheduler.drafting.costs = [StepCosts(num_rows=1, bare=1.0, sizes=tuple((size, 1.0) for size in sizes))]
    engine.add(prompt_of(3), 30)
    for _ in range(4):
        engine.step()
    engine.add(prompt_of(20, stem=1), 4)
    engine.drain()
    assert bool(engine.scheduler.drafting.counts.accepted_tokens) == bool(sizes)
    assert max(plan.shards[0].num_tokens for plan in engine.plans) == 16


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
def test_rows_with_drafts_end_as_they_do_alone_in_long_histories(kind: str, part: int) -> None:
    _soak(kind, seed=100 + part, num_engines=60, num_rounds=300)
