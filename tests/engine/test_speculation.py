"""Drafted tokens change no byte: greedy and drawn, alone and in batches, with all that a request may ask for."""

import dataclasses

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from tests.golden_table import TABLE, marked
from tests.marks import few
from tests.rows import rows_beside
from tests.speculation.told import KINDS, check_same, drafted_engine, run_drafted
from tests.support import INVARIANT, answers, requests_of, run, small_llm, told

ROWS = rows_beside(__file__)

PROMPTS = [[3, 4, 5, 6] * 8, [7] * 20, [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3], [5, 6, 7] * 6]
TEXTS = ["The sea is ", '{"name": "', "Once upon a time"]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2)
DRAWN = dataclasses.replace(GREEDY, temperature=0.8, seed=5)
SLOW = ("gemma3", "deepseek_v3", "gpt_oss", "qwen3_next", "lfm2", "llama4")  # one of each kind of cache
_SPEED = {"qwen3": "fast", **dict.fromkeys(SLOW, "slow")}
EVERY = [marked(name, _SPEED.get(name, "long")) for name in TABLE]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("family", EVERY)
def test_in_invariant_mode_every_bit_is_that_without_drafts(family, params):
    _, engines = check_same(small_llm(family, INVARIANT), requests_of(PROMPTS, params), check_writes=True)
    right, wrong = (engines[kind].runner.num_steps for kind in ("right", "wrong"))
    assert right * 3 < wrong, "drafts that come true save steps"


@pytest.mark.parametrize("family", EVERY)
def test_elsewhere_tokens_are_those_without_drafts(family):
    llm = small_llm(family)
    plain = run(llm, PROMPTS[:2], DRAWN)
    for kind in KINDS:
        drafted, _ = run_drafted(llm, PROMPTS[:2], DRAWN, plain, kind, check_writes=True)
        assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


ASKED = ROWS["asked"] | {
    "allowed": {"allowed_token_ids": list(range(30, 120)), "logprobs": 3},
    "bias": {"logit_bias": {40: 5.0, 41: 5.0, 42: -100.0}},
}


@pytest.mark.parametrize("what", ASKED)
def test_what_a_request_asks_for_is_the_same_with_drafts(what):
    llm = small_llm("qwen3", INVARIANT)
    params = dataclasses.replace(DRAWN, **ASKED[what])
    plain = run(llm, [llm.tokenizer.encode(text) for text in TEXTS], params)
    prompts = [output.prompt_token_ids for output in plain]
    for kind in KINDS:
        drafted, _ = run_drafted(llm, prompts, params, plain, kind)
        assert told(drafted) == told(plain), kind


SCHEMA = ROWS["schema"]


@pytest.mark.parametrize("more", few([{}, {"logprobs": 1}, {"bad_words": ["true"], "logprobs": None}]), ids=str)
@pytest.mark.parametrize(
    "structure", [{"json": SCHEMA}, {"regex": "(ab|c){1,9}"}, {"choice": ["yes", "yesterday", "no"]}], ids=str
)
def test_a_row_with_a_grammar_takes_drafts_that_its_masks_allow(structure, more):
    llm = small_llm("qwen3", INVARIANT)
    asked = StructuredOutputsParams(**structure)
    params = dataclasses.replace(DRAWN, ignore_eos=False, logprobs=None, structured_outputs=asked)
    params = dataclasses.replace(params, **more)
    prompts = [llm.tokenizer.encode(text) for text in TEXTS]
    plain = run(llm, prompts, params)
    for kind in KINDS:
        drafted, _ = run_drafted(llm, prompts, params, plain, kind)
        assert told(drafted) == told(plain), kind


def test_rows_that_are_preempted_go_on_with_drafts():
    llm = small_llm("qwen3", INVARIANT)
    plain = run(llm, PROMPTS, DRAWN)
    for kind in KINDS:
        drafted, engine = run_drafted(llm, PROMPTS, DRAWN, plain, kind, num_blocks=8)
        assert told(drafted) == told(plain) and engine.scheduler.metrics().preemptions, kind


def test_a_request_that_wants_no_drafts_has_none():
    llm = small_llm("qwen3", INVARIANT)
    plain = run(llm, PROMPTS, GREEDY)
    _, engine = run_drafted(llm, PROMPTS, dataclasses.replace(GREEDY, speculative=False), plain, "right")
    assert engine.scheduler.drafting.counts.drafted_tokens == 0


def test_what_is_kept_of_drafted_rows_is_hit_by_later_ones():
    llm = small_llm("qwen3", INVARIANT)
    plain = run(llm, PROMPTS, GREEDY)
    engine = drafted_engine(llm, plain, "mixed", check_writes=True)
    answers(engine, requests_of(PROMPTS, GREEDY))
    longer = [[*prompt, *output.token_ids] for prompt, output in zip(PROMPTS, plain, strict=True)]
    found = answers(engine, requests_of(longer, dataclasses.replace(GREEDY, max_tokens=4, speculative=False)))
    assert all(output.num_cached_tokens >= 32 for output in found if len(output.prompt_token_ids) > 50)
    again = run(llm, longer, dataclasses.replace(GREEDY, max_tokens=4))
    assert told(found) == told(again)


def test_a_streamed_request_gives_all_tokens_of_a_step_at_once():
    llm = small_llm("qwen3", INVARIANT)
    plain = run(llm, PROMPTS[:1], GREEDY)
    engine = drafted_engine(llm, plain, "right")
    engine.add(PROMPTS[0], GREEDY, RequestOptions(streams=True))
    deltas = []
    while engine.has_unfinished:
        deltas += engine.step()
    counts = [len(delta.token_ids) for delta in deltas]
    assert sum(counts) == 40 and max(counts) == 9, "the drafts and the token behind them"
    assert [token for delta in deltas for token in delta.token_ids] == list(plain[0].token_ids)
