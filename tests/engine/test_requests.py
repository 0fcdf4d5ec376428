"""What a user asks of an LLM and what comes back: parameters honoured, bad ones refused, nothing left behind."""

import concurrent.futures
import dataclasses
import datetime
import gc
import itertools
import json
import math
import os
import re
import warnings
from collections import deque

import jax
import numpy as np
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.runtime.sampling import RESULT_WORDS
from ferrum_jax.text.prompts import EncodedPrompt
from tests.rows import rows_beside
from tests.support import GOLDENS, SMALL, answers, finish, fresh_engine, raising, run, small_llm

ROWS = rows_beside(__file__)

VOCABULARY = 310
END = 0  # one of the model's end tokens
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
DRAWN = dataclasses.replace(GREEDY, temperature=0.8, seed=11)
PROMPT = [7, 100, 33, 250, 61]


@pytest.fixture(scope="module")
def llm():
    return small_llm("qwen3")


@pytest.fixture
def engine(llm):
    return fresh_engine(llm)


def prompt(length: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(6, 250, length).tolist()


def is_idle(llm) -> bool:
    """Nothing runs, waits or holds a block."""
    scheduler = llm.engine.scheduler
    scheduler.check_invariants()
    return not (llm.engine.has_unfinished or scheduler.has_unfinished or scheduler.metrics().live)


def held_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


# -- refused -----------------------------------------------------------------------------------------------

REFUSED = ROWS["refused"] | {
    "too long": (PROMPT * 50, {"max_tokens": 7}, r"250 tokens and max_tokens is 7.*max_model_len, 256"),
    "too long without a limit": (PROMPT * 52, {"max_tokens": None}, r"260 tokens.*max_model_len, 256"),
    "id beyond the vocabulary": ([5, VOCABULARY], {}, r"the prompt holds token id 310.*0 to 309"),
    "bytes": (b"abc", {}, r"the prompt is b'abc'; it must be"),
    "bias beyond the vocabulary": (PROMPT, {"logit_bias": {VOCABULARY: 1.0}}, r"logit_bias holds token id 310"),
    "stop beyond the vocabulary": (PROMPT, {"stop_token_ids": [VOCABULARY]}, r"stop_token_ids holds token id 310"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_by_name_and_index_and_nothing_has_run(llm, case):
    bad, params, message = REFUSED[case]
    steps = llm.stats()["steps"]
    with pytest.raises(ValueError, match=rf"^prompt 1: .*{message}"):
        llm.generate([PROMPT, bad], [GREEDY, SamplingParams(**params)], progress=False)
    assert is_idle(llm) and llm.stats()["steps"] == steps


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_larger_than_the_whole_pool_is_refused_at_once(llm, n):
    engine = fresh_engine(llm, num_blocks=3)
    with pytest.raises(ValueError, match=r"needs 4 blocks of 16 tokens and the whole pool has 3"):
        engine.add(prompt(40), SamplingParams(max_tokens=10, n=n))
    assert not engine.has_unfinished and not engine.scheduler.has_unfinished
    answers(engine, [(prompt(40), dataclasses.replace(GREEDY, n=n))])


class Clocked:
    """Prompts that are each told a time of day."""

    def __init__(self):
        self.told: list = []

    def encoded(self, prompt, now=None, **how):
        self.told.append(now)
        return EncodedPrompt(token_ids=PROMPT)


def test_all_chats_of_a_call_see_one_time_of_day_and_those_of_a_job_its_own(llm, monkeypatch):
    prompts, chat = Clocked(), [{"role": "user", "content": "what day?"}]
    monkeypatch.setattr(llm.model, "prompts", prompts)
    llm.generate([chat] * 3, GREEDY)
    assert len(prompts.told) == 3 and len(set(prompts.told)) == 1 and prompts.told[0] is not None
    day = datetime.datetime(2024, 7, 26)
    assert len(list(llm.as_completed([(0, chat, GREEDY)], now=day))) == 1 and prompts.told[-1] == day


def test_stop_strings_without_a_tokenizer_are_refused(llm):
    engine = build_engine(llm.loaded, llm.config, None)
    with pytest.raises(ValueError, match=r"there is no tokenizer; use stop_token_ids"):
        engine.add(PROMPT, SamplingParams(stop="a"))


def test_parameters_must_be_one_or_one_for_each_prompt(llm):
    with pytest.raises(ValueError, match=r"3 sampling_params for 2 prompts"):
        llm.generate([PROMPT, PROMPT], [GREEDY] * 3)
    with pytest.raises(ValueError, match=r"sampling_params is {'n': 2}; it must be SamplingParams, or a list"):
        llm.generate([PROMPT], {"n": 2})


@pytest.mark.parametrize("prompts", [None, 7.5])
def test_what_is_neither_a_prompt_nor_many_is_refused(llm, prompts):
    with pytest.raises(ValueError, match=r"prompts is .*; it must be a string, token ids, messages, or a list of such"):
        llm.generate(prompts, GREEDY)
    assert llm.generate([], GREEDY) == []


def test_truncation_keeps_the_last_tokens_of_a_prompt_that_is_too_long(llm):
    long = prompt(300)
    params = dataclasses.replace(GREEDY, truncate_prompt_tokens=20)
    (output,) = llm.generate([long], params, progress=False)
    assert output.prompt_token_ids == tuple(long[-20:])
    assert output.token_ids == llm.generate([long[-20:]], GREEDY, progress=False)[0].token_ids


@pytest.mark.parametrize(("max_tokens", "kept"), [(8, 248), (None, 255)])
def test_a_truncation_of_minus_one_keeps_what_leaves_room_for_the_output(llm, max_tokens, kept):
    long = prompt(300)
    params = dataclasses.replace(GREEDY, truncate_prompt_tokens=-1, max_tokens=max_tokens)
    (output,) = llm.generate([long], params, progress=False)
    assert output.prompt_token_ids == tuple(long[-kept:])
    assert len(output.token_ids) == 256 - kept
    assert llm.generate([PROMPT], params, progress=False)[0].prompt_token_ids == tuple(PROMPT)


def test_numpy_token_ids_are_token_ids(llm):
    expected = llm.generate(PROMPT, GREEDY, progress=False)[0]
    for same in (np.array(PROMPT), [np.array(PROMPT, np.uint16)], np.array([PROMPT])):
        (output,) = llm.generate(same, GREEDY, progress=False)
        assert output.token_ids == expected.token_ids
        assert all(type(token) is int for token in output.prompt_token_ids)


# -- ways to ask -------------------------------------------------------------------------------------------


def test_as_completed_yields_the_error_of_a_refused_row_and_completes_the_others(llm):
    rows = [("a", PROMPT, GREEDY), ("b", [], GREEDY), ("c", prompt(30), GREEDY), ("d", [VOCABULARY], GREEDY)]
    results = dict(llm.as_completed(iter(rows)))
    expected = llm.generate([PROMPT, prompt(30)], GREEDY, progress=False)
    assert [results[key].token_ids for key in ("a", "c")] == [output.token_ids for output in expected]
    assert "the prompt is empty" in str(results["b"]) and "token id 310" in str(results["d"])
    assert is_idle(llm)


def test_as_completed_reads_no_further_than_it_has_room(llm):
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield read, [6 + read % 200], GREEDY

    results = llm.as_completed(endless())
    next(results)
    assert read <= 2 * SMALL.max_num_seqs + 1
    results.close()
    assert is_idle(llm)


def test_as_completed_refuses_endless_bad_rows_one_by_one(llm):
    results = llm.as_completed((row, [], GREEDY) for row in iter(int, 1))
    assert [type(next(results)[1]) for _ in range(3)] == [ValueError] * 3


def test_a_stream_grows_to_what_generate_gives(llm):
    params = dataclasses.replace(GREEDY, max_tokens=30)
    outputs = list(llm.stream("def logits", params))
    (expected,) = llm.generate("def logits", params, progress=False)
    assert [output.finished for output in outputs] == [False] * 29 + [True]
    for before, after in itertools.pairwise(outputs):
        assert after.text.startswith(before.text) and len(after.token_ids) == len(before.token_ids) + 1
    assert (outputs[-1].text, outputs[-1].outputs) == (expected.text, expected.outputs)


def test_a_stream_that_is_closed_early_releases_everything(llm):
    stream = llm.stream(prompt(40), dataclasses.replace(GREEDY, max_tokens=100))
    next(stream)
    assert not is_idle(llm)
    stream.close()
    assert is_idle(llm)


def test_calls_of_one_thread_may_overlap(llm):
    texts = ["def a", "import b"]
    expected = llm.generate(texts, DRAWN, progress=False)
    pairs = []
    for pair in zip(*(llm.stream(text, DRAWN) for text in texts), strict=True):
        pairs.append(pair)
        between = llm.generate(texts[0], DRAWN, progress=False)[0]
    assert [o.outputs for o in (*pairs[-1], between)] == [expected[i].outputs for i in (0, 1, 0)]
    assert is_idle(llm)


@pytest.mark.parametrize("method", ["dispatch", "write_slot"])
def test_an_interrupted_step_releases_everything_and_the_llm_serves_again(llm, monkeypatch, method):
    expected = llm.generate([PROMPT, prompt(30)], GREEDY, progress=False)
    held = held_bytes()
    calls = 0
    original = getattr(Runner, method)

    def interrupted(runner, *arguments):
        nonlocal calls
        calls += 1
        result = original(runner, *arguments)  # after it, so that the step runs and its result is lost
        if calls == 2:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Runner, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, prompt(30)], GREEDY, progress=False)
    assert is_idle(llm) and held_bytes() < held + llm.stats()["kv_bytes"], "the pools are there once"
    again = llm.generate([PROMPT, prompt(30)], GREEDY, progress=False)
    assert [o.token_ids for o in again] == [o.token_ids for o in expected]


def test_a_second_thread_is_told_that_one_llm_serves_one_and_the_first_goes_on(llm, monkeypatch):
    expected = llm.generate(PROMPT, GREEDY, progress=False)[0].token_ids
    step, threads = llm.engine.step, concurrent.futures.ThreadPoolExecutor(1)

    def step_while_another_comes():
        refused = threads.submit(llm.calls.add, deque(), PROMPT, GREEDY)
        with pytest.raises(RuntimeError, match="requests of another thread are running, and one LLM serves one thread"):
            refused.result()
        return step()

    monkeypatch.setattr(llm.engine, "step", step_while_another_comes)
    assert llm.generate(PROMPT, GREEDY, progress=False)[0].token_ids == expected
    monkeypatch.undo()
    assert threads.submit(llm.generate, PROMPT, GREEDY, progress=False).result()[0].token_ids == expected
    threads.shutdown()
    assert is_idle(llm)


def test_a_forked_child_is_told_to_open_its_own(llm):
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and jax warn of forks
        child = os.fork()
    if not child:
        try:
            llm.generate("Hello")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    said = os.read(read, 4096).decode()
    assert re.fullmatch(
        rf"RuntimeError: this LLM was opened in process \d+, and process {child} is a fork of it; .*", said
    )


def test_a_stream_whose_engine_was_broken_off_says_so(llm, monkeypatch):
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Runner, "dispatch", raising(KeyboardInterrupt))
        llm.generate(PROMPT, GREEDY, progress=False)
    with pytest.raises(RuntimeError, match="broken off in another call"):
        list(stream)
    assert is_idle(llm)


def test_an_aborted_request_gives_nothing_and_the_others_go_on(engine):
    ids = [engine.add(p, GREEDY) for p in (PROMPT, prompt(30))]
    engine.step()
    engine.abort(ids[0])
    engine.abort(ids[0])
    outputs = finish(engine)
    assert list(outputs) == [ids[1]] and len(outputs[ids[1]].token_ids) == 8


def test_requests_start_by_priority_and_then_by_arrival(engine):
    ids = [engine.add([20 + i], GREEDY, RequestOptions(priority=p)) for i, p in enumerate((1, 0, 1, 1, 0, -1))]
    order = []
    while engine.has_unfinished:
        order += [delta.id for delta in engine.step()]
    assert order == [ids[i] for i in (5, 1, 4, 0, 2, 3)], "four rows run at once; equal lengths end as they began"


def test_generate_takes_a_priority_for_each_prompt(llm, monkeypatch):
    order, step = [], llm.engine.step

    def watched():
        outputs = step()
        order.extend(delta.id for delta in outputs)
        return outputs

    monkeypatch.setattr(llm.engine, "step", watched)
    outputs = llm.generate([[20 + i] for i in range(6)], GREEDY, priority=[1, 0, 1, 1, 0, -1], progress=False)
    assert order == [outputs[i].request_id for i in (5, 1, 4, 0, 2, 3)]


@pytest.mark.parametrize("wrong", [[1], 3, "ab", [0, 1.5], [True, 0]])
def test_a_priority_that_is_not_a_whole_number_for_each_prompt_is_refused(llm, wrong):
    with pytest.raises(ValueError, match=r"priority (is|holds) .*; (it|each) must be"):
        llm.generate([PROMPT, PROMPT], GREEDY, priority=wrong, progress=False)
    assert is_idle(llm)


def test_more_stop_ids_than_a_record_holds_are_refused_when_added(llm):
    loaded = dataclasses.replace(llm.loaded, end_ids=frozenset(range(20)))
    engine = build_engine(loaded, llm.config, llm.tokenizer)
    many = dataclasses.replace(GREEDY, stop_token_ids=range(20, 36))
    with pytest.raises(ValueError, match="36 ids together; at most 32"):
        engine.add(PROMPT, dataclasses.replace(many, ignore_eos=False))
    assert not engine.has_unfinished
    engine.add(PROMPT, many)
    assert len(finish(engine)) == 1


def test_chat_is_generate_on_the_rendered_template(llm):
    conversation = [{"role": "user", "content": "def logits"}]
    (output,) = llm.chat(conversation, GREEDY, progress=False)
    text = llm.render_chat(conversation)
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    assert output.prompt_token_ids == tuple(ids)
    assert output.token_ids == llm.generate([ids], GREEDY, progress=False)[0].token_ids
    both = llm.chat([conversation, conversation[:1]], GREEDY, progress=False)
    assert [o.token_ids for o in both] == [output.token_ids] * 2


def test_a_chat_goes_on_in_its_last_message_if_it_is_asked_to(llm):
    conversation = [{"role": "user", "content": "def logits"}, {"role": "assistant", "content": "return x"}]
    (output,) = llm.chat(conversation, GREEDY, continue_final_message=True, progress=False)
    text = "<|im_start|>user\ndef logits<|im_end|>\n<|im_start|>assistant\nreturn x"
    assert output.prompt_token_ids == tuple(llm.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(("arguments", "message"), ROWS["a misspelt argument of a chat is no variable of its template"])
def test_a_misspelt_argument_of_a_chat_is_no_variable_of_its_template(llm, arguments, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, **arguments)


def test_arguments_that_are_not_there_are_refused_with_those_that_are(llm):
    with pytest.raises(
        TypeError, match=r"LLM.generate has no argument prioritys \(did you mean priority\?\); it has prom"
    ):
        llm.generate("x", GREEDY, prioritys=[1])
    with pytest.raises(TypeError, match=r"LLM.embed has no argument normalise \(did you mean normalize\?\)"):
        llm.embed("x", normalise=True)


def test_vllms_name_for_the_bar_is_taken(llm, capsys):
    (output,) = llm.generate("def logits", GREEDY, use_tqdm=False)
    assert llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False)[0].finished
    assert llm.generate("def logits", GREEDY, use_tqdm=True)[0].token_ids == output.token_ids
    assert "completions" in capsys.readouterr().err


# -- draws -------------------------------------------------------------------------------------------------


def test_choices_of_one_seed_differ_and_are_the_same_when_run_again(llm):
    params = dataclasses.replace(DRAWN, n=2)
    first, again = (run(llm, [PROMPT], params)[0] for _ in range(2))
    assert [c.index for c in first.outputs] == [0, 1]
    assert first.outputs[0].token_ids != first.outputs[1].token_ids
    assert first.outputs == again.outputs


def test_drawn_tokens_do_not_depend_on_companions_slot_or_restart(llm):
    alone = run(llm, [PROMPT], DRAWN)[0].token_ids
    others = [prompt(n, seed=n) for n in (1, 20, 9)]
    crowd = run(llm, [*others, PROMPT], [dataclasses.replace(DRAWN, seed=s) for s in (1, 2, 3)] + [DRAWN])
    assert crowd[3].token_ids == alone
    rest = dataclasses.replace(DRAWN, max_tokens=5)
    assert run(llm, [PROMPT + list(alone[:3])], rest)[0].token_ids == alone[3:]


def test_equal_prompts_without_a_seed_are_drawn_apart_and_alike_in_every_run(llm):
    params = dataclasses.replace(DRAWN, seed=None)
    first, again = (run(llm, [PROMPT, PROMPT], params) for _ in range(2))
    assert first[0].token_ids != first[1].token_ids
    assert [o.token_ids for o in first] == [o.token_ids for o in again]


# -- ends --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def free(llm):
    """What the model says when nothing ends it: 40 greedy tokens."""
    return run(llm, [PROMPT], dataclasses.replace(GREEDY, max_tokens=40))[0]


@pytest.mark.parametrize("include", [False, True])
def test_no_text_is_beyond_a_stop_string(llm, free, include):
    stop = next(free.text[i : i + 2] for i in range(5, 40) if free.text[i : i + 2].isascii())
    end = free.text.index(stop)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop=[stop, "never"])
    params = dataclasses.replace(params, include_stop_str_in_output=include)
    (output,) = run(llm, [PROMPT], params)
    assert output.text == free.text[: end + len(stop) * include]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert output.token_ids == free.token_ids[: len(output.token_ids)] and len(output.token_ids) < 40


def test_a_stop_token_ends_a_request_and_is_no_text(llm, free):
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    params = dataclasses.replace(GREEDY, max_tokens=40, stop_token_ids=[stop])
    (output,) = run(llm, [PROMPT], params)
    assert output.token_ids == free.token_ids[: first + 1]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert output.text == llm.tokenizer.decode(output.token_ids[:-1])


def test_a_stop_string_among_the_first_min_tokens_does_not_end_a_request(llm, free):
    stop = next(free.text[i : i + 2] for i in range(5, 40) if free.text[i : i + 2].isascii())
    params = SamplingParams(max_tokens=40, min_tokens=39, temperature=0.0, ignore_eos=True, stop=stop)
    (output,) = run(llm, [PROMPT], params)
    assert len(output.token_ids) > 39 and output.text.startswith(free.text[: free.text.index(stop) + len(stop)])


def test_an_end_token_ends_a_request_unless_it_is_ignored(llm):
    params = SamplingParams(max_tokens=5, temperature=0.0, logit_bias={END: 100.0})
    (ended,) = run(llm, [PROMPT], params)
    assert (ended.token_ids, ended.finish_reason, ended.text) == ((END,), "stop", "")
    assert ended.outputs[0].stop_reason is None
    (ignored,) = run(llm, [PROMPT], dataclasses.replace(params, ignore_eos=True))
    assert (ignored.token_ids, ignored.finish_reason) == ((END,) * 5, "length")


def test_min_tokens_keeps_end_tokens_back(llm):
    params = SamplingParams(max_tokens=9, min_tokens=4, temperature=0.0, logit_bias={END: 100.0})
    (output,) = run(llm, [PROMPT], params)
    assert len(output.token_ids) == 5 and output.token_ids[-1] == END and END not in output.token_ids[:-1]


def test_without_max_tokens_a_request_runs_to_max_model_len(llm):
    (output,) = run(llm, [prompt(240)], dataclasses.replace(GREEDY, max_tokens=None))
    assert (len(output.token_ids), output.finish_reason) == (16, "length")


def test_a_token_with_a_bias_of_minus_infinity_is_never_drawn(llm):
    first = run(llm, [PROMPT], GREEDY)[0].token_ids[0]
    allowed = {5, 6, first}
    only = {token: -math.inf for token in range(VOCABULARY) if token not in allowed}
    some = dict(list(only.items())[:300])
    drawn = dataclasses.replace(DRAWN, temperature=1e3, max_tokens=60)
    for params in (
        dataclasses.replace(GREEDY, max_tokens=60),
        drawn,
        dataclasses.replace(drawn, top_k=305, top_p=0.99),
    ):
        (output,) = run(llm, [PROMPT], dataclasses.replace(params, logit_bias=some))
        assert not set(output.token_ids) & set(some)
    (output,) = run(llm, [PROMPT], dataclasses.replace(GREEDY, logit_bias={first: -math.inf}, repetition_penalty=1.3))
    assert first not in output.token_ids


def test_a_bias_that_forbids_every_token_is_refused(llm):
    engine = build_engine(dataclasses.replace(llm.loaded, end_ids=frozenset(range(300, 310))), llm.config, None)
    params = SamplingParams(logit_bias=dict.fromkeys(range(300), -math.inf), min_tokens=1)
    with pytest.raises(ValueError, match="logit_bias forbids all 310 tokens"):
        engine.add(PROMPT, params)
    engine.add(PROMPT, dataclasses.replace(params, min_tokens=0))
    assert finish(engine)


def test_without_detokenizing_there_are_tokens_and_no_text(llm):
    params = dataclasses.replace(GREEDY, logprobs=1, prompt_logprobs=1)
    (plain,) = llm.generate([PROMPT], params, progress=False)
    bare_params = dataclasses.replace(params, detokenize=False)
    (bare,) = llm.generate([PROMPT], bare_params, progress=False)
    assert plain.text and (bare.text, bare.token_ids) == ("", plain.token_ids)
    found = (*bare.outputs[0].logprobs, *bare.prompt_logprobs[1:])
    assert {logprob.decoded_token for entry in found for logprob in entry.values()} == {None}
    assert [output.text for output in llm.stream(PROMPT, bare_params)][-1] == ""


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_an_echo_begins_the_text_with_the_prompts(llm, stop):
    params = dataclasses.replace(GREEDY, stop=stop)
    echo = dataclasses.replace(params, echo=True)
    plain, from_ids = llm.generate(["def f(x):", PROMPT], params, progress=False)
    echoed, ids_echoed = llm.generate(["def f(x):", PROMPT], echo, progress=False)
    assert echoed.text == "def f(x):" + plain.text
    assert ids_echoed.text == llm.tokenizer.decode(PROMPT) + from_ids.text
    assert [output.text for output in llm.stream("def f(x):", echo)][-1] == echoed.text
    (cut,) = llm.generate(["def f(x):"], dataclasses.replace(echo, truncate_prompt_tokens=2), progress=False)
    assert cut.text.startswith(llm.tokenizer.decode(cut.prompt_token_ids)) and len(cut.prompt_token_ids) == 2
    with pytest.raises(ValueError, match="echo is True, and there is no tokenizer"):
        build_engine(llm.loaded, llm.config, None).add(PROMPT, dataclasses.replace(GREEDY, echo=True))


def test_choices_that_had_all_ended_are_given_again_when_resumed(llm, engine):
    params = dataclasses.replace(DRAWN, n=2, logprobs=1, echo=True)
    (whole,) = run(llm, [PROMPT], params)
    again = engine.add(PROMPT, params, RequestOptions(key="0", resume=whole.outputs))
    aborted = engine.add(PROMPT, params, RequestOptions(key="0", resume=whole.outputs))
    engine.abort(aborted)
    found = finish(engine)
    assert list(found) == [again]
    assert found[again].outputs == whole.outputs and found[again].prompt_token_ids == whole.prompt_token_ids


def test_every_sampling_parameter_changes_what_is_drawn(llm, free):
    """A parameter that is accepted and ignored would give the tokens of the request without it."""
    plain = dataclasses.replace(DRAWN, temperature=1.5, max_tokens=40)
    changes = ({}, *ROWS["changes of what is drawn"])
    outputs = [run(llm, [PROMPT], dataclasses.replace(plain, **change))[0].token_ids for change in changes]
    assert len(set(outputs)) == len(outputs)


# -- log-probabilities -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 3, 20])
def test_logprobs_hold_the_chosen_token_and_the_most_likely_ones(llm, count):
    (output,) = run(llm, [PROMPT], dataclasses.replace(DRAWN, temperature=1.5, logprobs=count))
    entries = output.outputs[0].logprobs
    assert len(entries) == len(output.token_ids)
    for token, entry in zip(output.token_ids, entries, strict=True):
        tops = [p for t, p in entry.items() if t != token or p.rank <= count]
        assert sorted(p.rank for p in tops) == list(range(1, count + 1)) and count <= len(entry) <= count + 1
        assert [p.logprob for p in tops] == sorted((p.logprob for p in tops), reverse=True) or token in entry
        assert entry[token].decoded_token == llm.tokenizer.decode([token], skip_special_tokens=False)
    total = math.fsum(entry[token].logprob for token, entry in zip(output.token_ids, entries, strict=True))
    assert output.outputs[0].cumulative_logprob == total < 0


def test_without_being_asked_there_are_no_logprobs(llm):
    choice = run(llm, [PROMPT], GREEDY)[0].outputs[0]
    assert choice.logprobs is None and choice.cumulative_logprob is None


def test_prompt_logprobs_are_the_logprobs_of_the_same_tokens(engine):
    """150 tokens in chunks of 16, with their blocks in the cache already."""
    head = prompt(140)
    generated = dataclasses.replace(GREEDY, max_tokens=10, logprobs=3)
    before = finish_one(engine, head, generated)
    whole = [*head, *before.token_ids]
    asked = finish_one(engine, whole, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3))
    assert asked.num_cached_tokens == 0, "every token must be computed"
    assert len(asked.prompt_logprobs) == 150 and asked.prompt_logprobs[0] is None
    assert all(whole[i] in asked.prompt_logprobs[i] for i in range(1, 150))
    for mine, theirs in zip(asked.prompt_logprobs[140:], before.outputs[0].logprobs, strict=True):
        assert mine.keys() == theirs.keys()
        for token, entry in mine.items():
            assert entry.rank == theirs[token].rank and abs(entry.logprob - theirs[token].logprob) < 1e-5


def test_a_request_with_prompt_logprobs_takes_no_hit_but_publishes(engine):
    whole = prompt(150)
    asked = finish_one(engine, whole, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    assert all(len(entry) == 1 for entry in asked.prompt_logprobs[1:])
    assert finish_one(engine, whole[:149], GREEDY).num_cached_tokens == 144
    assert finish_one(engine, whole, GREEDY).num_cached_tokens == 150


def test_prompt_logprobs_come_once_for_all_choices(engine):
    params = dataclasses.replace(DRAWN, n=2, prompt_logprobs=1)
    output = finish_one(engine, prompt(40), params)
    assert len(output.prompt_logprobs) == 40 and all(output.prompt_logprobs[1:])
    assert output.outputs[0].token_ids != output.outputs[1].token_ids


def finish_one(engine, prompt_token_ids, params):
    return answers(engine, [(prompt_token_ids, params)])[0]


# -- what is counted ---------------------------------------------------------------------------------------


def test_stats_are_json_and_exact_for_a_known_workload(llm, monkeypatch):
    monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm))
    params, before = dataclasses.replace(GREEDY, max_tokens=4), llm.stats()
    for _ in range(2):
        llm.generate([prompt(40)], params, progress=False)
    stats = json.loads(json.dumps(llm.stats()))
    # packed words of forward and sample, of two records with their places, of two calls that copy, and two sets of what
    # samples gives, to be written into; rows of each step
    moved = {
        "arrays_to_devices": 10 * 2 + 2 * 2 + 2 + 2 * 2,
        "arrays_to_host": 10,
        "bytes_to_host": 10 * 4 * RESULT_WORDS,
    }
    assert {name: stats[name] - before[name] for name in moved} == moved
    # 40 tokens are chunks of 16, 16, 8; then 3 decodes; one block of 16 is 3 layers x 16 x 10 heads x 16 x 4 bytes
    block_bytes = 3 * 16 * 10 * 16 * 4
    expected = ROWS["counts of a known workload"] | {
        "bytes": 3 * block_bytes,
        "steps": 6 + 4,
        "computed_tokens": 43 + 3,
        "padded_tokens": 3 * 16 + 3 + 1 + 3,
        "kv_bytes": 81 * block_bytes,
    }
    assert {name: stats[name] for name in expected} == expected


def test_what_is_interrupted_anywhere_goes_on_to_the_same_end(llm):
    """Choices with a stop string, with their own ends and log-probabilities; each as far as it was at some step."""
    params = dataclasses.replace(DRAWN, n=2, max_tokens=12, logprobs=2, stop=["e", "("], min_tokens=3)
    rows = [("a", "def f", params), ("b", prompt(30), dataclasses.replace(params, stop=(), max_tokens=9))]
    expected = dict(llm.as_completed(rows))
    steps, seen = iter(range(100)), []
    for _, output in llm.as_completed(rows, wants_partials=lambda: next(steps) % 2 == 1):
        seen.append(output)
    partials = [output for output in seen if not output.finished]
    assert len({len(choice.token_ids) for output in partials for choice in output.outputs}) > 3
    for output in partials:
        name = "a" if output.prompt else "b"
        row = next(row for row in rows if row[0] == name)
        (again,) = dict(llm.as_completed([row], resume=lambda key, output=output: output.outputs)).values()
        assert plain(again.outputs) == plain(expected[name].outputs)
        assert again.num_cached_tokens <= len(again.prompt_token_ids)
    assert is_idle(llm)


def plain(choices) -> list:
    """Choices without log-probabilities' last bits, which depend on the company where `invariant` is off."""
    return [(c.text, c.token_ids, c.finish_reason, c.stop_reason, [list(e) for e in c.logprobs]) for c in choices]


def test_a_dropped_llm_frees_its_memory_before_garbage_is_collected():
    gc.collect()
    before = held_bytes()
    own = LLM(str(GOLDENS / "qwen3"), SMALL)
    own.generate(PROMPT, GREEDY, progress=False)
    assert held_bytes() > before
    gc.disable()
    try:
        del own
        assert held_bytes() == before
    finally:
        gc.enable()
