"""Tool calls: one row of the table gives the grammar that demands them and the parser that finds them."""

import json
import random

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ferrum_jax.asked.message import AssistantMessage, ToolCall
from ferrum_jax.asked.structured_outputs import StructuredOutputsParams
from ferrum_jax.asked.tools import format_of, tools_asked, tools_of
from ferrum_jax.structured.forms.reasoning_forms import REASONING_FORMS, reasoning_form
from ferrum_jax.structured.forms.tool_forms import TOOL_FORMS, tool_form, tool_form_named
from ferrum_jax.structured.grammars import Grammars
from ferrum_jax.structured.reading.message_parser import MessageForms
from ferrum_jax.structured.reading.reasoning_parser import ReasoningParser, without_reasoning
from ferrum_jax.structured.reading.tool_parser import ToolParser, parsed
from tests.histories import seeded
from tests.structured.vocabularies import demo_tokenizer, demo_vocabulary, drawn

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Köln", "New York"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string"},
        "deep": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
KNOWN = tools_of(TOOLS)
WRITTEN = {
    "hermes": 'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}<b", "n": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nx\ny\n</parameter>\n</function>\n</tool_call>",
    "glm": "hi <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n</tool_call>\n<tool_call>f</tool_call>",
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {"a": "x"}}; {"name": "f", "parameters": {}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "x"}[TOOL_CALLS]f[ARGS]{}',
    "mistral_list": '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}}, {"name": "f", "arguments": {}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}<|call|>',
    "gemma": "Well:\n```tool_code\nf(a='x', n=[1, true])\n```",
    "pythonic": '[f(a="it\'s"), f()]',
}
NUM_CALLS = {"glm": 2, "llama3_json": 2, "mistral": 2, "mistral_list": 2, "pythonic": 2}
FORMS = sorted(WRITTEN)


@pytest.mark.parametrize("name", [form.name for form in TOOL_FORMS])
def test_the_calls_that_a_grammar_demands_are_found_again_and_are_valid(name):
    asked = StructuredOutputsParams(tools=tools_asked(TOOLS, "required", True))
    form, rng, count = tool_form_named(name), random.Random(seeded(7)), 0
    grammar = Grammars(demo_vocabulary(), form).get(asked)
    for attempt in range(60):
        if attempt >= 6 and count:
            break
        tokens = drawn(grammar.matcher(), rng, most=120)
        if tokens is None:
            continue
        text = demo_tokenizer().decode(tokens, skip_special_tokens=False)
        found = MessageForms(tools=form).message(text, tools=KNOWN)
        calls = found.tool_calls
        assert not found.content.strip() and calls
        for call in calls:
            schema = next(json.loads(tool.parameters) for tool in KNOWN if tool.name == call.name)
            jsonschema.validate(json.loads(call.arguments), schema)
        count += len(calls)
    assert count >= 1


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_found_in_what_models_write(name):
    found = MessageForms(tools=tool_form_named(name)).message(WRITTEN[name], tools=())
    assert len(found.tool_calls) == NUM_CALLS.get(name, 1) and {call.name for call in found.tool_calls} == {"f"}
    assert found.content.strip() in ("", "Sure.", "hi", "Well:")


@settings(max_examples=150)
@given(st.sampled_from(FORMS), st.integers(0, 400), st.booleans(), st.integers(0, 10**9))
@example("mistral", 0, True, 215856229)
def test_how_a_text_is_cut_into_pieces_changes_nothing(name, length, is_mixed, seed):
    form, rng = tool_form_named(name), random.Random(seed)
    text = WRITTEN[name][: length or None]
    if is_mixed:
        text = text + rng.choice(["", "\n", "tail", "<tool_call>", "{"]) + WRITTEN[rng.choice(FORMS)]
    parser, pieces, at = ToolParser(form), [], 0
    while at < len(text):
        size = rng.randint(1, 9)
        pieces += parser.push(text[at : at + size])
        at += size
    pieces += parser.flush()
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    assert (content, [piece for piece in pieces if isinstance(piece, ToolCall)]) == parsed(form, text)


@settings(max_examples=150)
@given(st.sampled_from(FORMS), st.text(alphabet='<>{}[]()"|;a:,\n tool_c/`=', max_size=60))
def test_what_is_no_call_stays_text(name, text):
    content, calls = parsed(tool_form_named(name), text)
    assert calls or content == text


def test_texts_without_quotes_are_texts_where_the_schema_says_so():
    text = "<tool_call>weather\n<arg_key>note</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n" \
        "<arg_value>3</arg_value>\n</tool_call>"  # fmt: skip
    (call,) = parsed(tool_form_named("glm"), text, KNOWN)[1]
    assert json.loads(call.arguments) == {"note": "12", "days": 3}


def test_a_template_without_marks_has_no_form():
    assert tool_form("{{ messages }}") is None and reasoning_form(None) is None


@settings(max_examples=100)
@given(st.text(alphabet="<>/think ab\n", max_size=40), st.booleans(), st.integers(0, 10**6))
def test_reasoning_is_the_same_however_it_is_cut(text, is_open, seed):
    form, rng = REASONING_FORMS[-1], random.Random(seed)
    parser, found, at = ReasoningParser(form, is_open=is_open), ["", ""], 0
    while at < len(text):
        size = rng.randint(1, 5)
        found = [a + b for a, b in zip(found, parser.push(text[at : at + size]), strict=True)]
        at += size
    found = [a + b for a, b in zip(found, parser.flush(), strict=True)]
    assert tuple(found) == without_reasoning(form, text, is_open=is_open)


def test_a_message_is_reasoning_answer_and_calls():
    forms = MessageForms(tools=tool_form_named("hermes"), reasoning=REASONING_FORMS[-1])
    text = "<think>\nhm\n</think>\n\n" + WRITTEN["hermes"] + "<|im_end|>"
    message = forms.message(text, tools=(), specials=["<|im_end|>"])
    call = ToolCall(name="f", arguments='{"a": "}<b", "n": 1}')
    assert message == AssistantMessage(content="Sure.", reasoning="hm", tool_calls=(call,))
    assert forms.message("hm</think>A", is_open=True) == AssistantMessage(content="A", reasoning="hm")
    assert forms.is_open_after("user\nassistant\n<think>\n") and not forms.is_open_after("<think>\n\n</think>\n\n")


def test_a_message_of_channels_is_taken_apart():
    forms = MessageForms.of_template("<|channel|> <|constrain|>")
    text = "<|channel|>analysis<|message|>I think<|end|><|start|>assistant" + WRITTEN["harmony"]
    message = forms.message(text, tools=())
    assert message.reasoning == "I think" and message.content == "" and len(message.tool_calls) == 1
    text = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert forms.message(text) == AssistantMessage(content="Yes.", reasoning="so")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([], "required", None), "tool_choice is 'required' without tools"),
        ((TOOLS, {"type": "function", "function": {"name": "g"}}, None), "names 'g', and tools has weather, stop"),
        ((TOOLS, "sometimes", None), "tool_choice is 'sometimes'; it must be"),
        (([{"type": "function", "function": {}}], "auto", None), r"tools\[0\].function.name is None"),
        (([*TOOLS, TOOLS[1]], "auto", None), "tools names stop twice"),
        ((TOOLS, "auto", "yes"), "parallel_tool_calls is 'yes'"),
        (([{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}], "required", None),
         "the parameters of the tool f: .*#/not"),
    ],
)  # fmt: skip
def test_tools_that_are_none_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        tools_asked(*arguments)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("json", "response_format is 'json'; it must be an object"),
        ({"type": "xml"}, "response_format.type is 'xml'"),
        ({"type": "json_schema"}, "response_format.json_schema is None"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "has no schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}, "strict is 'yes'"),
    ],
)
def test_formats_that_are_none_are_refused(given, match):
    with pytest.raises(ValueError, match=match):
        format_of(given)


def test_a_model_whose_form_is_not_known_cannot_be_made_to_call():
    asked = StructuredOutputsParams(tools=tools_asked(TOOLS, "required", None))
    with pytest.raises(ValueError, match="shows no form of calls that is known"):
        Grammars(demo_vocabulary()).get(asked)


TEXTS = [
    *WRITTEN.values(),
    "<think>\n\nhm\n\n</think>\n\n" + WRITTEN["hermes"] + "\n\n" + WRITTEN["hermes"] + "\nMore. \n<|im_end|>",
    "<|channel|>analysis<|message|>so\n<|end|><|start|>assistant<|channel|>analysis<|message|>and<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.<|start|>assistant" + WRITTEN["harmony"],
    "<|channel|>?<|message|>a<|channel|>final <|constrain|>json<|message|>{}<|return|>",
    "  \n<tool_call> nothing <|im_<|im_end|>end|>",
]


@settings(max_examples=200)
@given(st.sampled_from(TEXTS), st.integers(0, 200), st.sampled_from(FORMS), st.sampled_from((None, *REASONING_FORMS)),
       st.booleans(), st.integers(0, 10**6))  # fmt: skip
def test_a_message_is_the_same_however_it_is_cut(text, length, name, reasoning, is_open, seed):
    forms, rng = MessageForms(tools=tool_form_named(name), reasoning=reasoning), random.Random(seed)
    how = {"tools": (), "is_open": is_open, "specials": ["<|im_end|>", "<|im_start|>", "<|end|>", "<|start|>"]}
    text = text[: length or None]
    stream, parts, at = forms.stream(**how), [], 0
    while at < len(text):
        size = rng.randint(1, 7)
        parts += stream.feed(text[at : at + size])
        at += size
    parts += stream.flush()
    assert forms.joined(parts) == forms.message(text, **how)
    assert all(bool(part.content) + bool(part.reasoning) + len(part.tool_calls) == 1 for part in parts)


def test_parts_of_a_message_come_in_their_order_and_without_white_space_around_calls():
    forms = MessageForms(tools=tool_form_named("hermes"), reasoning=REASONING_FORMS[-1])
    text = "<think>\n\nhm\n</think>\n\n" + WRITTEN["hermes"] + "\n\nMore. \n"
    stream = forms.stream(tools=())
    parts = [part for character in text for part in stream.feed(character)] + stream.flush()
    joined = [part.reasoning or part.content or part.tool_calls[0].name for part in parts]
    assert "".join(joined) == "hmSure.fMore. \n"
