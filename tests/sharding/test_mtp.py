"""An engine on a mesh drafts with a checkpoint's own head as one device does."""

import dataclasses

import pytest

from ferrum_jax.llm import LLM
from tests.engine.test_mtp import GREEDY, MTP, PROMPTS, KeptDrafts, drafting_engine, run_all
from tests.sharding.same import said_on
from tests.support import GOLDENS, INVARIANT


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("deepseek_v3", "tp=2"),
        pytest.param("deepseek_v3", "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "ep=2", marks=pytest.mark.slow),
    ],
)
def test_an_engine_on_a_mesh_drafts_and_says_what_one_device_does(name, mesh):
    one, many = said_on(_said, name, "tp=1", mesh)
    assert many["tokens"] == one["tokens"] and many["drafted"] > 20
    assert many["drafts"].keys() == one["drafts"].keys()
    others = [ids for ids, token in one["drafts"].items() if many["drafts"][ids] != token]
    assert len(others) * 50 <= len(one["drafts"]), "but for logits that are as good as equal"


def _said(name: str, mesh: str) -> dict[str, object]:
    """The tokens of an engine that computes drafts, over blocks of NaN at first, and its drafts."""
    llm = LLM(str(GOLDENS / "mtp" / name), dataclasses.replace(INVARIANT, mesh=mesh), speculative_config=MTP)
    engine = drafting_engine(llm, source := KeptDrafts())
    tokens = [output.token_ids for output in run_all(engine, PROMPTS, GREEDY)]
    return {"tokens": tokens, "drafts": source.kept, "drafted": engine.scheduler.drafting.counts.drafted_tokens}
