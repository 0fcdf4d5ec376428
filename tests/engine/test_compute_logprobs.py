"""Log-probabilities of given tokens, as a trainer asks for them, and of those that a request names, as a teacher asks.

One prefill computes them, whose prompts are shared.
"""

import dataclasses

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from tests.forked import call
from tests.oracles import sampling as oracle
from tests.support import GOLDENS, INVARIANT, SMALL, small_llm

NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
MARKS = {"qwen3": (), "gemma3": (pytest.mark.slow,), "qwen3_next": (pytest.mark.slow,)}
EACH = [pytest.param(name, marks=MARKS.get(name, (pytest.mark.slow, pytest.mark.long))) for name in NAMES]
ERRORS = {"qwen3_next": 4e-4}  # 2.6e-4 were measured, at a log-probability of -22: errors add up in a state
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3)
RNG = np.random.default_rng(3)
PROMPT = RNG.integers(6, 250, 40).tolist()
COMPLETIONS = [RNG.integers(6, 250, 20).tolist() for _ in range(3)]


@pytest.fixture(scope="module")
def llm():
    return small_llm("qwen3")


@pytest.mark.parametrize("name", EACH)
def test_they_are_those_of_the_reference_implementation(name):
    """Goldens hold float32 logits of a transformers forward for two prompts."""
    golden = np.load(GOLDENS / name / "golden.npz")
    prompts = [golden[f"prompt_{i}"].tolist() for i in (2, 3)]
    for prompt, found, i in zip(prompts, small_llm(name).compute_logprobs(prompts), (2, 3), strict=True):
        rows = zip(golden[f"logits_{i}"], prompt[1:], strict=False)
        wanted = [oracle.log_softmax(row)[token] for row, token in rows]
        assert found.token_ids == tuple(prompt[1:])
        np.testing.assert_allclose(found.logprobs, wanted, atol=ERRORS.get(name, 1e-4))


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_in_invariant_mode_they_have_the_bits_of_generation(name):
    llm = small_llm(name, INVARIANT)
    prompts = [RNG.integers(6, 200, n).tolist() for n in (5, 33)]
    outputs = llm.generate(prompts, GREEDY, progress=False)
    completions = [output.token_ids for output in outputs]
    for output, found in zip(outputs, llm.compute_logprobs(prompts, completions, top=3), strict=True):
        drawn = output.outputs[0].logprobs
        assert found.logprobs.tolist() == [e[t].logprob for e, t in zip(drawn, output.token_ids, strict=True)]
        tops = [dict(zip(*row, strict=True)) for row in zip(found.top_ids, found.top_logprobs, strict=True)]
        assert tops == [{t: e[t].logprob for t in list(e)[:3]} for e in drawn]


def test_completions_of_one_prompt_compute_it_once_and_their_tokens_anew(llm):
    llm.reset_prefix_cache()
    first = llm.compute_logprobs([PROMPT] * 3, COMPLETIONS)
    assert [found.num_cached_tokens for found in first] == [0, 32, 32]
    again = llm.compute_logprobs([PROMPT], COMPLETIONS[:1], top=2)[0]
    assert again.num_cached_tokens == 32 and again.token_ids == tuple(COMPLETIONS[0])
    np.testing.assert_allclose(again.logprobs, first[0].logprobs, atol=1e-5)
    assert again.top_ids.shape == (20, 2) and again.cumulative_logprob == pytest.approx(sum(again.logprobs.tolist()))


def test_the_whole_vocabulary_is_a_distribution_with_the_same_tokens_first(llm):
    (found,) = llm.compute_logprobs([PROMPT], COMPLETIONS[:1], top=-1)
    (tops,) = llm.compute_logprobs([PROMPT], COMPLETIONS[:1], top=20)
    assert found.all_logprobs.shape == (20, llm.spec.vocab_size)
    np.testing.assert_allclose(np.exp(found.all_logprobs).sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(found.logprobs, tops.logprobs, atol=1e-5)
    assert (found.ranks == tops.ranks).all()
    np.testing.assert_array_equal(np.argmax(found.all_logprobs, axis=1), tops.top_ids[:, 0])
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1)
    (output,) = llm.generate([PROMPT + COMPLETIONS[0]], params, progress=False)
    entries = output.prompt_logprobs
    assert entries[0] is None and all(len(entry) == llm.spec.vocab_size for entry in entries[1:])
    assert [entry[t].rank for entry, t in zip(entries[40:], COMPLETIONS[0], strict=True)] == found.ranks.tolist()


def test_processed_ones_are_of_what_a_token_is_drawn_from(llm):
    asked = SamplingParams(
        temperature=2.5, top_p=0.99, frequency_penalty=0.25, presence_penalty=0.5, logit_bias={COMPLETIONS[0][1]: 5.0}
    )
    (raw,) = llm.compute_logprobs([PROMPT], COMPLETIONS[:1], top=-1)
    (found,) = llm.compute_logprobs([PROMPT], COMPLETIONS[:1], mode="processed", sampling_params=asked)
    for i, token in enumerate(COMPLETIONS[0]):
        own = raw.all_logprobs[i]
        edited = oracle.edited_logits(own, asked, PROMPT, COMPLETIONS[0][:i], [])
        kept = oracle.kept_probabilities(edited, asked)
        wanted = np.log(kept[token]) if kept[token] else -np.inf
        np.testing.assert_allclose(found.logprobs[i], wanted, atol=2e-4)


def test_a_sequence_as_long_as_the_model_takes_is_scored(llm):
    whole = RNG.integers(6, 250, SMALL.max_model_len).tolist()
    (found,) = llm.compute_logprobs([whole[:-3]], [whole[-3:]])
    (all_of_it,) = llm.compute_logprobs([whole])
    np.testing.assert_allclose(found.logprobs, all_of_it.logprobs[-3:], atol=1e-5)
    assert llm.stats()["compiles_after_ready"] == 0


def test_nothing_to_score_gives_nothing_and_bad_input_says_what_to_do(llm):
    empty, one = llm.compute_logprobs([PROMPT, [7]], [[], [8]])
    assert len(empty.logprobs) == 0 and len(one.logprobs) == 1
    assert len(llm.compute_logprobs([[7]], top=-1)[0].logprobs) == 0
    bad = [
        (([[7], []],), {}, "prompt 1: the prompt is empty"),
        (([[7]], [[1], [2]]), {}, "completions is 2 for 1 prompts"),
        (([[7]], [[10**6]]), {}, "prompt 0: the sequence holds token id 1000000"),
        (([[7]], [7]), {}, "prompt 0: the completion is 7"),
        (([[7]],), {"top": 21}, "top is 21"),
        (([[7]],), {"mode": "cooked"}, "mode is 'cooked'"),
        (([[7]],), {"sampling_params": GREEDY}, "mode is 'raw'"),
        (([[7]],), {"sampling_params": GREEDY, "mode": "processed", "top": -1}, "top is -1"),
        ((PROMPT * 7,), {}, "more than max_model_len"),
    ]
    for arguments, named, why in bad:
        with pytest.raises(ValueError, match=why):
            llm.compute_logprobs(*arguments, **named)
    assert not llm.engine.has_unfinished


_RNG = np.random.default_rng(3)
LONG = _RNG.integers(6, 250, 100).tolist()
ROWS = [_RNG.integers(0, 250, k % 5).tolist() for k in range(60)]  # of the last 60 tokens
ASKS = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprob_token_ids=ROWS, prompt_logprob_start=39)


@pytest.fixture(scope="module")
def exact():
    return small_llm("qwen3", INVARIANT)


@pytest.fixture(scope="module")
def whole(exact):
    """The whole vocabulary at each token of the prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    return exact.generate([LONG], params, progress=False)[0].prompt_logprobs


def _of(whole, rows, first):
    return tuple(tuple(whole[first + i][token].logprob for token in row) for i, row in enumerate(rows))


def test_each_token_has_those_that_its_list_names(exact, whole):
    (output,) = exact.generate([LONG], ASKS, progress=False)
    assert output.prompt_token_id_logprobs == _of(whole, ROWS, 40)
    assert output.prompt_logprobs is None


def test_neither_the_cache_nor_companions_nor_choices_change_a_bit(exact, whole):
    exact.reset_prefix_cache()
    (first,) = exact.generate([LONG], ASKS, progress=False)
    others = [LONG[:50] + LONG[:n] for n in (3, 21)]
    params = [SamplingParams(max_tokens=4), ASKS, dataclasses.replace(ASKS, n=3, temperature=1.0), SamplingParams()]
    _, again, several, _ = exact.generate([others[0], LONG, LONG, others[1]], params, progress=False)
    assert (first.num_cached_tokens, again.num_cached_tokens, several.num_cached_tokens) == (0, 32, 32)
    wanted = _of(whole, ROWS, 40)
    assert [out.prompt_token_id_logprobs for out in (first, again, several)] == [wanted] * 3


def test_one_list_is_for_all_tokens_and_stands_beside_the_likeliest_ones(exact, whole):
    for tops in (None, 2, -1):
        asks = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=tops, prompt_logprob_token_ids=[5, 7, 5])
        (output,) = exact.generate([LONG], asks, progress=False)
        assert output.prompt_token_id_logprobs == _of(whole, [[5, 7, 5]] * 99, 1)
        assert output.num_cached_tokens == 0
        found = output.prompt_logprobs
        assert (found is None) == (tops is None)
        if tops == 2:
            assert all(found[i][token] == whole[i][token] for i in range(1, 100) for token in found[i])


def test_arrays_may_name_them_and_behind_a_start_the_likeliest_are_still_of_all(exact, whole):
    ids = np.asarray([[1, 2], [3, 4]])
    asks = SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, prompt_logprob_token_ids=ids, prompt_logprob_start=97
    )
    (output,) = exact.generate([LONG], asks, progress=False)
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
def test_lists_that_do_not_fit_the_prompt_are_refused(exact, changed, why):
    with pytest.raises(ValueError, match=why):
        exact.generate([LONG], dataclasses.replace(ASKS, **changed), progress=False)
    assert not exact.engine.has_unfinished


@pytest.mark.slow
def test_on_several_devices_they_are_those_of_the_whole_vocabulary():
    for found, wanted in call(on_meshes, "tp=2", "dp=2", devices=2):
        assert [len(rows) for rows in found] == [79, 19] and found == wanted


def on_meshes(*meshes: str) -> list[tuple[list, list]]:
    """What is named on each mesh, and the same of the whole vocabulary."""
    prompts = [[token % 90 for token in LONG], [token % 80 for token in LONG[:40]]]
    every = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    named = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprob_token_ids=[5, 77], prompt_logprob_start=20)
    both = []
    for mesh in meshes:
        exact = small_llm("llama", dataclasses.replace(INVARIANT, mesh=mesh))
        wholes = [output.prompt_logprobs for output in exact.generate(prompts, every, progress=False)]
        found = [output.prompt_token_id_logprobs for output in exact.generate(prompts, named, progress=False)]
        both.append((found, [_of(whole, [[5, 77]] * (len(whole) - 21), 21) for whole in wholes]))
    return both
