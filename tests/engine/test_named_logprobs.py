"""Log-probabilities of tokens that a request names, at each token of its prompt, as a teacher is asked for them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from tests.forked import call
from tests.support import INVARIANT, small_llm

RNG = np.random.default_rng(3)
PROMPT = RNG.integers(6, 250, 100).tolist()
ROWS = [RNG.integers(0, 250, k % 5).tolist() for k in range(60)]  # of the last 60 tokens
ASKS = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprob_token_ids=ROWS, prompt_logprob_start=39)


@pytest.fixture(scope="module")
def llm():
    return small_llm("qwen3", INVARIANT)


@pytest.fixture(scope="module")
def whole(llm):
    """The whole vocabulary at each token of the prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    return llm.generate([PROMPT], params, progress=False)[0].prompt_logprobs


def _of(whole, rows, first):
    return tuple(tuple(whole[first + i][token].logprob for token in row) for i, row in enumerate(rows))


def test_each_token_has_those_that_its_list_names(llm, whole):
    (output,) = llm.generate([PROMPT], ASKS, progress=False)
    assert output.prompt_token_id_logprobs == _of(whole, ROWS, 40)
    assert output.prompt_logprobs is None


def test_neither_the_cache_nor_companions_nor_choices_change_a_bit(llm, whole):
    llm.reset_prefix_cache()
    (first,) = llm.generate([PROMPT], ASKS, progress=False)
    others = [PROMPT[:50] + PROMPT[:n] for n in (3, 21)]
    params = [SamplingParams(max_tokens=4), ASKS, dataclasses.replace(ASKS, n=3, temperature=1.0), SamplingParams()]
    _, again, several, _ = llm.generate([others[0], PROMPT, PROMPT, others[1]], params, progress=False)
    assert (first.num_cached_tokens, again.num_cached_tokens, several.num_cached_tokens) == (0, 32, 32)
    wanted = _of(whole, ROWS, 40)
    assert [out.prompt_token_id_logprobs for out in (first, again, several)] == [wanted] * 3


def test_one_list_is_for_all_tokens_and_stands_beside_the_likeliest_ones(llm, whole):
    for tops in (None, 2, -1):
        asks = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=tops, prompt_logprob_token_ids=[5, 7, 5])
        (output,) = llm.generate([PROMPT], asks, progress=False)
        assert output.prompt_token_id_logprobs == _of(whole, [[5, 7, 5]] * 99, 1)
        assert output.num_cached_tokens == 0
        found = output.prompt_logprobs
        assert (found is None) == (tops is None)
        if tops == 2:
            assert all(found[i][token] == whole[i][token] for i in range(1, 100) for token in found[i])


def test_arrays_may_name_them_and_behind_a_start_the_likeliest_are_still_of_all(llm, whole):
    ids = np.asarray([[1, 2], [3, 4]])
    asks = SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, prompt_logprob_token_ids=ids, prompt_logprob_start=97
    )
    (output,) = llm.generate([PROMPT], asks, progress=False)
    assert output.prompt_token_id_logprobs == _of(whole, ids.tolist(), 98) and len(output.prompt_logprobs) == 100


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"prompt_logprob_token_ids": ROWS[:2]},
            "holds 2 lists, and there are 60 tokens behind prompt_logprob_start, 39",
        ),
        ({"prompt_logprob_token_ids": [[5]]}, "holds 1 lists, and there are 60 tokens"),
        ({"prompt_logprob_token_ids": [10**6]}, "prompt_logprob_token_ids holds token id 1000000"),
        ({"prompt_logprob_start": 99}, "no token is left to score"),
        ({"truncate_prompt_tokens": 50}, "holds 60 lists, and there are 10 tokens"),
    ],
)
def test_lists_that_do_not_fit_the_prompt_are_refused(llm, changed, why):
    with pytest.raises(ValueError, match=why):
        llm.generate([PROMPT], dataclasses.replace(ASKS, **changed), progress=False)
    assert not llm.engine.has_unfinished


@pytest.mark.slow
def test_on_several_devices_they_are_those_of_the_whole_vocabulary():
    for found, wanted in call(on_meshes, "tp=2", "dp=2", devices=2):
        assert [len(rows) for rows in found] == [79, 19] and found == wanted


def on_meshes(*meshes: str) -> list[tuple[list, list]]:
    """What is named on each mesh, and the same of the whole vocabulary."""
    prompts = [[token % 90 for token in PROMPT], [token % 80 for token in PROMPT[:40]]]
    every = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    named = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprob_token_ids=[5, 77], prompt_logprob_start=20)
    both = []
    for mesh in meshes:
        llm = small_llm("llama", dataclasses.replace(INVARIANT, mesh=mesh))
        wholes = [output.prompt_logprobs for output in llm.generate(prompts, every, progress=False)]
        found = [output.prompt_token_id_logprobs for output in llm.generate(prompts, named, progress=False)]
        both.append((found, [_of(whole, [[5, 77]] * (len(whole) - 21), 21) for whole in wholes]))
    return both
