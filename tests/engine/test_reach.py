"""An engine whose requests are known beforehand makes the executables that they reach, and refuses what is longer."""

from __future__ import annotations

import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.asked.options import NO_OPTIONS
from ferrum_jax.engine.submission import Intake
from ferrum_jax.sizes.engine_sizes import Reach
from tests.support import GOLDENS, SMALL, small_llm

PROMPTS = [[5, 6, 7] * 9, list(range(40, 60))]


def test_a_part_of_the_ladder_gives_the_same_tokens():
    asked = []

    def reach(token_ids, max_model_len):
        asked.append((token_ids([1, 2]), max_model_len))
        return Reach(num_rows=2, num_tokens=100)

    llm = LLM(str(GOLDENS / "qwen3"), SMALL, reach=reach)
    assert asked == [([1, 2], SMALL.max_model_len)]
    assert [str(bucket) for bucket in llm.loaded.layout.ladder.buckets] == [
        "decode T=1 R=1 M=16",
        "decode T=2 R=2 M=16",
        "decode T=4 R=4 M=16",  # with which every start begins
        "mixed T=16 R=4 M=16",
    ]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    found, expected = llm.generate(PROMPTS, params), small_llm("qwen3").generate(PROMPTS, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert llm.stats()["compiles_after_ready"] == 0


@pytest.mark.parametrize(("max_tokens", "most"), [(33, 41), (None, 100)])
def test_a_request_longer_than_the_reach_is_refused(max_tokens, most):
    intake = Intake(
        tokenizer=None,
        vocab_size=50,
        end_ids=frozenset(),
        max_model_len=100,
        max_request_tokens=40,
        seed=0,
        grammar=lambda _: None,
        adapter=lambda name: None,
    )
    intake.take([1] * 8, SamplingParams(max_tokens=32), NO_OPTIONS)
    with pytest.raises(ValueError, match=f"may have {most} tokens, and this engine's reach is requests of at most 40"):
        intake.take([1] * 8, SamplingParams(max_tokens=max_tokens), NO_OPTIONS)
