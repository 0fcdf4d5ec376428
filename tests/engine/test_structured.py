"""Rows with grammars end valid, whatever runs beside them, and rows without draw the tokens that they draw alone."""

import dataclasses
import itertools
import json
import math
import re

import jsonschema
import pytest

from ferrum_jax import LLM
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.params.message import ToolCall
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.params.tools import tools_asked
from ferrum_jax.openai.answers import assistant_message
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.serve.engine_side import facts_of
from ferrum_jax.text.structured.reading.message_stream import MessageForms
from tests.rows import rows_beside
from tests.support import GOLDENS, INVARIANT, answers, finish, fresh_engine, peek, run, small_llm, step

PERSON = rows_beside(__file__)["person"]
TIGHT = {"disable_any_whitespace": True}
HOT = SamplingParams(temperature=1.5, max_tokens=90, seed=11)
TOOLS = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}]


def asked(**wishes) -> StructuredOutputsParams:
    return StructuredOutputsParams(**wishes)


def under(structure: StructuredOutputsParams, **more) -> SamplingParams:
    return dataclasses.replace(HOT, structured_outputs=structure, **more)


def llm():
    return small_llm("qwen3", INVARIANT)


JSON = under(asked(json=PERSON, **TIGHT))
MIXED = [JSON, HOT, under(asked(regex="[a-c]{2,9}x")), under(asked(choice=["yes", "no"])), HOT, JSON, HOT]
PROMPTS = [[1 + i, 2, 3, 4, 5] for i in range(len(MIXED))]


def test_every_row_is_what_it_is_alone_in_a_batch_and_after_preemption():
    params = [dataclasses.replace(one, seed=seed) for seed, one in enumerate(MIXED)]
    together = run(llm(), PROMPTS, params)
    alone = [run(llm(), [prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    crowded = run(llm(), PROMPTS, params, num_blocks=18, max_num_seqs=4)
    for one, other, third in zip(together, alone, crowded, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids
    for output, one in zip(together, params, strict=True):
        structure = one.structured_outputs
        if structure is None or output.finish_reason == "length":
            continue
        assert output.finish_reason == "stop"
        if structure.kind == "json":
            jsonschema.validate(json.loads(output.text), PERSON)
        elif structure.kind == "regex":
            assert re.fullmatch(str(structure.regex), output.text)
        else:
            assert output.text in ("yes", "no")
    ended = [o.finish_reason for o, one in zip(together, params, strict=True) if one.structured_outputs]
    assert ended.count("stop") >= 3


def test_a_resumed_row_goes_on_in_its_grammar():
    engine = fresh_engine(llm())
    first = engine.add(PROMPTS[0], JSON)
    while len(peek(engine, first).token_ids) < 7:
        engine.step()
    before = peek(engine, first).outputs
    (whole,) = finish(engine).values()
    (resumed,) = answers(fresh_engine(llm()), [(PROMPTS[0], JSON, RequestOptions(resume=before))])
    assert resumed.outputs == whole.outputs and resumed.finish_reason in ("stop", "length")


def test_the_choices_of_a_prompt_and_what_else_is_asked_go_with_a_grammar():
    wishes = {"n": 3, "logprobs": 2, "repetition_penalty": 1.3, "logit_bias": {40: 3.0}, "min_tokens": 4}
    output = run(llm(), [PROMPTS[0]], under(asked(regex="[a-z ]{3,40}"), stop=["zz"], **wishes))[0]
    assert len({choice.text for choice in output.outputs}) > 1
    for choice in output.outputs:
        assert re.fullmatch("[a-z ]{0,40}", choice.text) and len(choice.token_ids) >= 4
        assert all(entry[token].logprob <= 0 for token, entry in zip(choice.token_ids, choice.logprobs, strict=True))
        assert choice.stop_reason in (None, "zz")


def test_a_text_that_must_end_ends_before_min_tokens():
    (output,) = run(llm(), [PROMPTS[0]], under(asked(choice=["a"]), min_tokens=30))
    assert (output.text, output.finish_reason) == ("a", "stop")


def test_log_probabilities_are_of_the_tokens_that_the_grammar_allows():
    (output,) = run(llm(), [PROMPTS[0]], under(asked(choice=["a"]), logprobs=2))
    first, last = output.outputs[0].logprobs
    assert first[output.token_ids[0]].logprob == pytest.approx(0.0, abs=1e-5)
    ends = [math.exp(each.logprob) for token, each in last.items() if token in (0, 2)]
    assert sum(ends) == pytest.approx(1.0, abs=1e-5)


def test_a_row_that_can_go_no_further_ends_with_an_error_and_the_others_go_on():
    stuck = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}
    bad = under(asked(json=stuck | {"additionalProperties": False}, **TIGHT))
    never = under(asked(choice=["q"]), logit_bias=dict.fromkeys(llm().tokenizer.encode("q"), float("-inf")))
    outputs = run(llm(), PROMPTS[:4], [bad, HOT, under(asked(json={"pattern": "("})), never])
    assert [output.finish_reason == "error" for output in outputs] == [True, False, True, True]
    reasons = [output.outputs[0].stop_reason for output in outputs]
    assert "allows no token here" in reasons[0] and "unclosed group" in reasons[2] and "logit_bias" in reasons[3]
    assert outputs[1].token_ids == run(llm(), [PROMPTS[1]], HOT)[0].token_ids


def test_tokens_that_a_request_allows_and_words_that_it_forbids_need_no_grammar():
    few = llm().tokenizer.encode("abcd", add_special_tokens=False)
    only = dataclasses.replace(HOT, allowed_token_ids=few, max_tokens=40)
    never = dataclasses.replace(only, bad_words=["ca", "d"])
    both = dataclasses.replace(only, structured_outputs=asked(regex="[b-z]{5}"), allowed_token_ids=[*few, 0, 2])
    stuck = dataclasses.replace(only, allowed_token_ids=few[:1], bad_words=["a"])
    outputs = run(llm(), PROMPTS[:5], [only, never, both, HOT, stuck])
    assert set(outputs[0].text) == set("abcd") and "ca" in outputs[0].text
    assert set(outputs[1].text) == set("abc") and "ca" not in outputs[1].text
    assert outputs[2].finish_reason == "stop" and re.fullmatch("[b-d]{5}", outputs[2].text)
    assert outputs[3].token_ids == run(llm(), [PROMPTS[3]], HOT)[0].token_ids
    assert outputs[4].finish_reason == "error" and outputs[4].outputs[0].stop_reason.startswith(
        "allowed_token_ids and bad_words forbid every token"
    )
    with pytest.raises(ValueError, match="allowed_token_ids holds token id 310"):
        llm().generate([PROMPTS[0]], dataclasses.replace(HOT, allowed_token_ids=[310]), progress=False)


def test_more_rows_than_the_executables_have_are_refused():
    with pytest.raises(ValueError, match="max_num_seqs is 5, and the executables have 4 rows; lower it"):
        run(llm(), PROMPTS[:1], HOT, max_num_seqs=5)


def test_a_whole_call_refuses_a_grammar_that_cannot_be_before_anything_runs():
    with pytest.raises(ValueError, match="prompt 1: the JSON schema does not compile, at #/items: regex parse"):
        llm().generate(PROMPTS[:2], [HOT, under(asked(json={"items": {"pattern": "("}}))], progress=False)
    answers = dict(llm().as_completed([(0, PROMPTS[0], under(asked(regex="("))), (1, PROMPTS[1], HOT)]))
    assert "unclosed group" in str(answers[0]) and answers[1].finish_reason != "error"


def test_demanded_calls_come_in_the_models_form_and_leave_the_text():
    forms = MessageForms.of_template("<tool_call>")
    engine = fresh_engine(llm(), forms=forms)
    demanded = under(asked(tools=tools_asked(TOOLS, "required", False)))
    (output,) = answers(engine, [(PROMPTS[0], demanded, RequestOptions(is_chat=True, tools=()))])
    message = output.outputs[0].message
    assert output.finish_reason == "stop" and [call.name for call in message.tool_calls] == ["go"]
    assert message.content == "" and message.reasoning is None


def test_forms_that_no_chat_template_shows_are_named():
    named = LLM(str(GOLDENS / "qwen3"), INVARIANT, tool_form="kimi_k2", reasoning_parser="qwen3")
    assert facts_of(named)["forms"] == ("kimi_k2", "think")
    call = '<|tool_call_begin|>functions.go:7<|tool_call_argument_begin|>{"a":1}<|tool_call_end|>'
    held = under(asked(choice=[f"<think>hm</think>{call}"]), max_tokens=200)
    (output,) = answers(named.model.make_engine(), [(PROMPTS[0], held, RequestOptions(is_chat=True, tools=()))])
    message = output.outputs[0].message
    assert message.reasoning == "hm" and message.tool_calls == (
        ToolCall(name="go", arguments='{"a": 1}', id="functions.go:7"),
    )
    (said,) = assistant_message(message, request="r", choice=0)["tool_calls"]
    assert said["id"] == "functions.go:7"


@pytest.mark.parametrize("field", ["tool_form", "reasoning_form"])
def test_a_form_that_there_is_not_is_refused_at_the_start(field):
    with pytest.raises(ValueError, match=r"is named 'kimi_k9'; there are harmony, .*mistral"):
        LLM(str(GOLDENS / "qwen3"), INVARIANT, **{field: "kimi_k9"})


def test_a_chat_that_is_streamed_has_its_message_as_far_as_it_is_certain():
    forms = MessageForms.of_template("<tool_call></think>")
    engine = fresh_engine(llm(), forms=forms)
    text = '<think>hm, so</think>\\nDone\\.<tool_call>\n{"name": "go", "arguments": \\{\\}}\n</tool_call>'
    regex = text.replace('": \\{\\}}', '": [{][}]}').replace("\n{", "\n[{]")
    held = under(asked(regex=regex), max_tokens=200, logprobs=0)  # so that all are drawn, one by one
    engine.add(PROMPTS[0], held, RequestOptions(is_chat=True, tools=(), streams=True))
    seen = []
    while engine.has_unfinished:
        seen += [output.outputs[0].message for output in step(engine)]
    assert [call.name for call in seen[-1].tool_calls] == ["go"] and seen[-1].content == "Done."
    assert seen[-1].reasoning == "hm, so"
    for before, after in itertools.pairwise(seen):
        assert after.content.startswith(before.content) and after.reasoning.startswith(before.reasoning)
        assert after.tool_calls[: len(before.tool_calls)] == before.tool_calls
    assert any(message.reasoning and not message.content for message in seen)
    assert any(message.content and not message.tool_calls for message in seen)


def test_what_a_grammar_leaves_no_choice_of_is_computed_as_a_chunk():
    form = asked(regex="invoice number [0-9]{2}, customer name [a-f]{2}, paid in full[.!]")
    engine = fresh_engine(llm())
    outputs = answers(engine, [(prompt, under(form, seed=seed)) for seed, prompt in enumerate(PROMPTS)])
    forced = engine.counts()["forced_tokens"]
    begins = llm().tokenizer.encode("invoice number ", add_special_tokens=False)[:-1]
    for output in outputs:
        assert output.finish_reason == "stop" and re.fullmatch(str(form.regex), output.text)
        assert list(output.token_ids[: len(begins)]) == begins
    assert forced > 0.5 * sum(len(output.token_ids) for output in outputs)
    assert engine.runner.num_steps < sum(len(output.token_ids) for output in outputs) / 4
    again = run(llm(), PROMPTS, [under(form, seed=seed) for seed in range(len(PROMPTS))], num_blocks=18, max_num_seqs=3)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]


def test_a_row_with_forced_tokens_goes_on_wherever_it_was_broken_off():
    held = under(asked(json=PERSON, **TIGHT), seed=3)
    engine = fresh_engine(llm())
    submission, seen = engine.add(PROMPTS[0], held), []
    while (now := peek(engine, submission)) is not None:
        seen.append(now.outputs)
        ended = step(engine)
    assert engine.counts()["forced_tokens"] > 4
    points = [before for before in seen[:: max(1, len(seen) // 12)] if before[0].token_ids]
    outputs = answers(fresh_engine(llm()), [(PROMPTS[0], held, RequestOptions(resume=before)) for before in points])
    assert len(outputs) > 5 and all(output.outputs == ended[0].outputs for output in outputs)


def test_forced_tokens_stop_at_the_limit_and_at_a_stop_string():
    long = asked(regex="abcdefghij klmnopqrst[xy]uvwxyz")
    limited, stopped, streamed = (
        run(llm(), [PROMPTS[0]], under(long, **more))[0]
        for more in ({"max_tokens": 5}, {"stop": ["qrs"]}, {"stop": ["wxy"]})
    )
    assert limited.finish_reason == "length" and len(limited.token_ids) == 5
    assert "abcdefghij".startswith(limited.text[:10])
    assert (stopped.text, stopped.outputs[0].stop_reason) == ("abcdefghij klmnop", "qrs")
    assert re.fullmatch("abcdefghij klmnopqrst[xy]uv", streamed.text) and streamed.outputs[0].stop_reason == "wxy"


def test_grammars_and_masks_are_counted_and_steps_compile_nothing():
    before = llm().stats()
    llm().generate(PROMPTS[:2], under(asked(regex="[0-9]{3}")), progress=False)
    stats = llm().stats()
    assert (stats["grammars"], stats["grammar_hits"]) == (before["grammars"] + 1, before["grammar_hits"] + 1)
    assert stats["masks"] > before["masks"] and stats["compiles_after_ready"] == 0


def test_sampling_parameters_of_a_mapping_are_those_of_the_class():
    made = SamplingParams.from_dict({"structured_outputs": {"regex": "a"}})
    assert made.structured_outputs == asked(regex="a") and hash(made.structured_outputs)
    with pytest.raises(ValueError, match="ignore_eos is True beside structured_outputs"):
        SamplingParams(structured_outputs=asked(regex="a"), ignore_eos=True)
    with pytest.raises(ValueError, match="structured_outputs is 'x'"):
        SamplingParams(structured_outputs="x")
