"""Drafts that a test knows to come true or not, in engines of golden models."""

from collections.abc import Sequence

from ferrum_jax.core.drafts.drafts import Draft
from ferrum_jax.core.request import Request
from ferrum_jax.core.scheduler.drafting import Drafting, StepCosts
from tests.support import answers, fresh_engine, requests_of, told

KINDS = ("right", "wrong", "mixed")
_ANY = {"method": "ngram", "num_speculative_tokens": 8}


class ToldDrafts:
    """The tokens of known outputs. kind: "wrong" has none of them, "mixed" has every fourth wrong."""

    def __init__(self, outputs, kind: str, vocab_size: int) -> None:
        """outputs: of requests whose text the drafts are of."""
        self._known = {
            (tuple(output.prompt_token_ids), choice.index): list(choice.token_ids)
            for output in outputs
            for choice in output.outputs
        }
        self._kind, self._vocab_size = kind, vocab_size
        self.bytes = 0

    def propose(self, request: Request, most: int) -> Draft:
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        known, start = self._known.get((prompt, request.choice), []), len(request.token_ids) - len(prompt)
        found = [self._told(token, start + i) for i, token in enumerate(known[start : start + most])]
        return Draft(token_ids=found, confidences=[1.0] * len(found))

    def _told(self, token: int, place: int) -> int:
        is_wrong = self._kind == "wrong" or (self._kind == "mixed" and place % 4 == 3)
        return (token + is_wrong) % self._vocab_size

    def forget(self, request: Request) -> None: ...

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, salt: bytes) -> None: ...


def drafted_engine(llm, outputs, kind: str, **overrides):
    """A fresh engine that computes drafts of known outputs wherever there is room. overrides: see `fresh_engine`."""
    engine = fresh_engine(llm, speculative_config=_ANY, **overrides)
    take_source(engine, llm, ToldDrafts(outputs, kind, llm.spec.vocab_size))
    return engine


def take_source(engine, llm, source, make=Drafting) -> None:
    """Gives a fresh engine drafts from a source, wherever there is room. make: of what decides on them."""
    sizes = [(bucket.num_tokens, 1.0) for bucket in llm.loaded.layout.ladder.buckets if not bucket.decode_only]
    own = engine.scheduler.drafting
    drafting = make(
        source,
        most=own._most,
        num_places=own._num_places,
        num_tokens=own._num_tokens,
        costs=[StepCosts(num_rows=1, bare=1.0, sizes=tuple(sizes))],
    )
    drafting.allowed, drafting._typical = own.allowed, 0.9
    engine.scheduler.drafting = drafting
    for shard in engine.scheduler._shards:
        shard._drafting = drafting
    engine._tell_costs = lambda: None  # a test's machine has other costs each time


def run_drafted(llm, prompts, params, outputs, kind: str, **overrides):
    """Outputs of `drafted_engine`, in the order of the prompts, and its engine."""
    engine = drafted_engine(llm, outputs, kind, **overrides)
    return answers(engine, requests_of(prompts, params)), engine


def check_same(llm, requests, kinds=KINDS, *, adapters=None, **overrides):
    """Outputs without drafts, which are those with drafts of each kind, and the engines that had these."""
    plain = answers(fresh_engine(llm, adapters=adapters, **overrides), requests)
    engines = {}
    for kind in kinds:
        engine = engines[kind] = drafted_engine(llm, plain, kind, adapters=adapters, **overrides)
        assert told(answers(engine, requests)) == told(plain), kind
        counts = engine.scheduler.drafting.counts
        assert counts.drafted_tokens and bool(counts.accepted_tokens) == (kind != "wrong")
        assert (counts.accepted_tokens < counts.drafted_tokens) == (kind != "right")
    return plain, engines
