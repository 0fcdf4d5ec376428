"""Tool calls: one row of the table gives the grammar that demands them and the parser that finds them."""

import json
import random

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ferrum_jax.inputs.params.message import AssistantMessage, ToolCall
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.params.tools import tools_asked, tools_of
from ferrum_jax.text.structured.forms.reasoning_forms import REASONING_FORMS, reasoning_form
from ferrum_jax.text.structured.forms.tool_forms import TOOL_FORMS, tool_form, tool_form_named
from ferrum_jax.text.structured.grammars import Grammars
from ferrum_jax.text.structured.reading.message_stream import MessageForms
from ferrum_jax.text.structured.reading.reasoning_parser import ReasoningParser
from ferrum_jax.text.structured.reading.tool_parser import ToolParser
from tests.histories import seeded
from tests.rows import rows_beside
from tests.structured.form_samples import DEMANDED
from tests.structured.vocabularies import demo_tokenizer, demo_vocabulary, drawn, fed

ROWS = rows_beside(__file__)

PARAMETERS = ROWS["parameters"]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
KNOWN = tools_of(TOOLS)
HERMES = 'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}<b", "n": 1}}\n</tool_call>'
HARMONY = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}<|call|>'
FORMS = sorted(DEMANDED)
BETWEEN = st.sampled_from([None, "", "\n", "tail", "<tool_call>", "{"])


def parsed(form, text, tools=()):
    """The text without its calls, and the calls."""
    parser = ToolParser(form, tools)
    pieces = [*parser.push(text), *parser.flush()]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [piece for piece in pieces if isinstance(piece, ToolCall)]


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


@settings(max_examples=150)
@given(st.sampled_from(FORMS), st.integers(0, 400), st.sampled_from(FORMS), BETWEEN, st.integers(0, 10**9))
@example("mistral", 0, "deepseek_v31", "\n", 215856229)
def test_how_a_text_is_cut_into_pieces_changes_nothing(name, length, other, between, seed):
    form, text = tool_form_named(name), DEMANDED[name][: length or None]
    text += "" if between is None else between + DEMANDED[other]
    parser = ToolParser(form)
    pieces = [*fed(parser.push, text, random.Random(seed)), *parser.flush()]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    assert (content, [piece for piece in pieces if isinstance(piece, ToolCall)]) == parsed(form, text)


@settings(max_examples=150)
@given(st.sampled_from(FORMS), st.text(alphabet='<>{}[]()"|;a:,\n tool_c/`=', max_size=60))
@example("hermes", '<tool_call>{"arguments": {}}</tool_call>')
@example("hermes", '<tool_call>{"name": [}</tool_call>')
def test_what_is_no_call_stays_text(name, text):
    content, calls = parsed(tool_form_named(name), text)
    assert calls or content == text


def test_texts_without_quotes_are_texts_where_the_schema_says_so():
    text = "<tool_call>weather\n<arg_key>note</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n" \
        "<arg_value>3</arg_value>\n</tool_call>"  # fmt: skip
    (call,) = parsed(tool_form_named("glm"), text, KNOWN)[1]
    assert json.loads(call.arguments) == {"note": "12", "days": 3}


KINDS = {
    "list": {"type": "array"}, "object": {"type": "object"}, "count": {"type": "integer"}, "share": {"type": "number"},
    "flag": {"type": "boolean"}, "either": {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]},
    "free": {}, "text": {"type": "string"},
}  # fmt: skip
SPELLED = ["qwen3_coder", "glm", "minimax_m2", "seed_oss"]


@pytest.mark.parametrize("name", SPELLED)
@pytest.mark.parametrize(
    ("key", "written", "want"), ROWS["arguments that stand as python writes them have the types of their schema"]
)
def test_arguments_that_stand_as_python_writes_them_have_the_types_of_their_schema(name, key, written, want):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": KINDS}}}
    text = DEMANDED[name].replace("days", key).replace("3", written, 1)
    (call,) = parsed(tool_form_named(name), text, tools_of([tool]))[1][:1]
    found = json.loads(call.arguments, parse_constant=pytest.fail)[key]
    assert (found, type(found)) == (want, type(want))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN"])
def test_arguments_are_json_whatever_number_a_model_writes(name, number):
    calls = MessageForms.named(name, None).message(DEMANDED[name].replace("3", number, 1), tools=KNOWN).tool_calls
    for call in calls:
        days = json.loads(call.arguments, parse_constant=pytest.fail).get("days")
        assert days in (None, "NaN") or abs(days) == 1.7976931348623157e308
    assert calls or number == "NaN"  # which Python has no literal of


def test_a_template_without_marks_has_no_form():
    assert tool_form("{{ messages }}") is None and reasoning_form(None) is None


@settings(max_examples=100)
@given(st.text(alphabet="<>/think ab\n", max_size=40), st.booleans(), st.integers(0, 10**6))
def test_reasoning_is_the_same_however_it_is_cut(text, is_open, seed):
    form = REASONING_FORMS[-1]
    parser, whole = (ReasoningParser(form, is_open=is_open) for _ in range(2))
    parts = [*fed(lambda piece: [parser.push(piece)], text, random.Random(seed)), parser.flush()]
    read = [whole.push(text), whole.flush()]
    assert [*map("".join, zip(*parts, strict=True))] == [*map("".join, zip(*read, strict=True))]


def test_a_message_is_reasoning_answer_and_calls():
    forms = MessageForms(tools=tool_form_named("hermes"), reasoning=REASONING_FORMS[-1])
    text = "<think>\nhm\n</think>\n\n" + HERMES + "<|im_end|>"
    message = forms.message(text, tools=(), specials=["<|im_end|>"])
    call = ToolCall(name="f", arguments='{"a": "}<b", "n": 1}')
    assert message == AssistantMessage(content="Sure.", reasoning="hm", tool_calls=(call,))
    assert forms.message("hm</think>A", is_open=True) == AssistantMessage(content="A", reasoning="hm")
    assert forms.is_open_after("user\nassistant\n<think>\n") and not forms.is_open_after("<think>\n\n</think>\n\n")


def test_a_message_of_channels_is_taken_apart():
    forms = MessageForms.of_template("<|channel|> <|constrain|>")
    text = "<|channel|>analysis<|message|>I think<|end|><|start|>assistant" + HARMONY
    message = forms.message(text, tools=())
    assert message.reasoning == "I think" and message.content == "" and len(message.tool_calls) == 1
    text = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert forms.message(text) == AssistantMessage(content="Yes.", reasoning="so")


@pytest.mark.parametrize(("arguments", "match"), ROWS["tools that are none are refused"])
def test_tools_that_are_none_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        tools_asked(*arguments)


def test_a_model_whose_form_is_not_known_cannot_be_made_to_call():
    asked = StructuredOutputsParams(tools=tools_asked(TOOLS, "required", None))
    with pytest.raises(ValueError, match="shows no form of calls that is known"):
        Grammars(demo_vocabulary()).get(asked)


def test_parts_of_a_message_come_in_their_order_and_white_space_between_texts_stays():
    forms = MessageForms(tools=tool_form_named("hermes"), reasoning=REASONING_FORMS[-1])
    text = "<think>\n\nhm\n</think>\n\n" + HERMES + "\n\nMore. \n"
    stream = forms.stream(tools=())
    parts = [part for character in text for part in stream.feed(character)] + stream.flush()
    joined = [part.reasoning or part.content or part.tool_calls[0].name for part in parts]
    assert "".join(joined) == "hmSure.f\n\n\nMore. \n"
