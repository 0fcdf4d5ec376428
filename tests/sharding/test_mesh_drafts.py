"""Rows of all data shards with drafts say on a mesh what they say there without; in invariant mode to the last bit."""

import dataclasses

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.llm import LLM
from tests.sharding.same import said_on
from tests.speculation.told import KINDS, drafted_engine
from tests.support import GOLDENS, INVARIANT, answers, fresh_engine, requests_of

MESHES = ("tp=1", "tp=2", "dp=2,tp=2")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
DRAWN = dataclasses.replace(GREEDY, temperature=0.8, seed=5)
PREFIX = list(range(7, 45))
PROMPTS = [[*PREFIX, 60], [9], [*PREFIX, 61, 62], [5, 6, 7] * 6, [11, 12] * 5, PREFIX[:20]]
SIZES = {"plain": {}, "pressed": {"num_blocks": 6}, "tier": {"num_blocks": 6, "host_cache_bytes": 1 << 20}}


def _told(engine) -> list:
    return answers(engine, requests_of(PROMPTS, [GREEDY, DRAWN] * 3))


def _bits(outputs) -> list:
    """Tokens and their log-probabilities."""
    return [
        (output.token_ids, [[(t, e.logprob) for t, e in row.items()] for row in output.outputs[0].logprobs])
        for output in outputs
    ]


def say(family: str, mesh: str) -> dict[str, object]:
    """Bits without drafts, those with drafts of each kind in pools of several sizes, and what became of the drafts."""
    llm = LLM(str(GOLDENS / family), dataclasses.replace(INVARIANT, mesh=mesh, max_model_len=128))
    plain = _told(fresh_engine(llm))
    bits, drafts, shards = {}, {}, set()
    for name, sizes in SIZES.items():
        for kind in KINDS:
            engine = drafted_engine(llm, plain, kind, check_writes=True, max_num_seqs=3, **sizes)
            schedule = engine.scheduler.schedule

            def watched(schedule=schedule):
                plan = schedule()
                if plan is not None:
                    shards.update([tuple(len(shard.drafts) > 0 for shard in plan.shards)])
                return plan

            engine.scheduler.schedule = watched
            bits[name, kind] = _bits(_told(engine))
            counts = engine.scheduler.drafting.counts
            drafts[name, kind] = counts.drafted_tokens, counts.accepted_tokens
    return {"plain": _bits(plain), "bits": bits, "drafts": drafts, "shards": shards}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_linear", pytest.param("qwen3_next", marks=pytest.mark.long)])
def test_rows_with_drafts_have_the_bits_of_those_without_on_every_mesh(family):
    one, *others = said_on(say, family, *MESHES)
    for mesh, said in zip(MESHES, (one, *others), strict=True):
        assert all(bits == said["plain"] for bits in said["bits"].values()), mesh
        assert [tokens for tokens, _ in said["plain"]] == [tokens for tokens, _ in one["plain"]], mesh
        for (_, kind), (drafted, accepted) in said["drafts"].items():
            assert drafted and bool(accepted) == (kind != "wrong"), mesh
            assert (accepted < drafted) == (kind != "right"), mesh
    assert {(True, True), (True, False), (False, True)} <= others[-1]["shards"], "drafts in one shard, and in both"
    for said in others:
        for (_, rows), (_, wanted) in zip(said["plain"], one["plain"], strict=True):
            for row, expected in zip(rows, wanted, strict=True):
                np.testing.assert_allclose([p for _, p in row], [p for _, p in expected], rtol=0, atol=1e-4)
