"""Each line of input becomes a row with exactly the parameters it names, or an error that says what is wrong."""

import json
import math
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.batch.input.formats import BadRow, Row, duplicate_row, own_name, parse_line
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.prompt import take_apart
from ferrum_jax.openai.body_fields import ROW_BODIES
from ferrum_jax.sampling_params import SamplingParams
from tests.openai.sections import SECTIONS


def parse(line: object, **kwargs) -> Row | BadRow:
    return parse_line(json.dumps(line).encode(), 7, **kwargs)


def row(line: object) -> Row:
    found = parse(line)
    assert isinstance(found, Row), found
    return found


def error(line: object) -> str:
    found = parse(line)
    assert isinstance(found, BadRow), found
    assert found.message.startswith("line 7: ")
    return found.message


def short(**fields) -> dict:
    return {"custom_id": "a", "prompt": "def f():", **fields}


def openai(url: str = "/v1/completions", **body) -> dict:
    body = body if "messages" in body else {"prompt": "def f():", **body}
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


def chat(**body) -> dict:
    return openai("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **body)


def test_the_short_form_sets_every_sampling_parameter():
    fields = {"n": 2, "max_tokens": 9, "min_tokens": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    fields |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 5}
    fields |= {"stop": ["x", "y"], "stop_token_ids": [1, 2], "allowed_token_ids": [3, 4], "bad_words": ["z"]}
    fields |= {"include_stop_str_in_output": True, "skip_special_tokens": False, "ignore_eos": True, "logprobs": 2}
    fields |= {"prompt_logprobs": 1, "truncate_prompt_tokens": -1, "detokenize": True, "echo": True}
    fields |= {"prompt_logprob_token_ids": [5, 6], "prompt_logprob_start": 1, "speculative": False}
    found = row(short(**fields, logit_bias={"17": -3.0}))
    listed = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    assert found.params == SamplingParams(**listed, logit_bias={17: -3.0})
    made = {"logit_bias", "structured_outputs", "transcript", "max_new_tokens"}  # the last two by no row
    assert set(fields) | made == set(SamplingParams.__dataclass_fields__)


def test_openais_names_of_structure_are_those_of_the_parameters():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    asked = StructuredOutputsParams(json=schema)
    assert row(chat(response_format=named)).params.structured_outputs == asked
    assert row(short(structured_outputs={"json": schema})).params.structured_outputs == asked
    assert row(short(response_format={"type": "text"})).params.structured_outputs is None
    first, second = (row(chat(response_format=named)).asked for _ in range(2))
    assert first.structured_outputs is second.structured_outputs


def test_tools_are_shown_to_the_template_and_a_choice_of_them_is_demanded():
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    free, forced, named, none = (
        row(chat(tools=tools, tool_choice=choice))
        for choice in ("auto", "required", {"type": "function", "function": {"name": "g"}}, "none")
    )
    assert free.params.structured_outputs is None and take_apart(free.prompt).template == {"tools": tools}
    assert none.params.structured_outputs is None and not take_apart(none.prompt).template
    asked = [found.params.structured_outputs.tools for found in (forced, named)]
    assert [[tool.name for tool in each.tools] for each in asked] == [["f", "g"], ["g"]]
    assert [each.parallel for each in asked] == [True, False]


def test_a_conversation_goes_on_after_calls_and_their_results():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ]
    found = row({"custom_id": "a", "messages": messages}).prompt
    arguments = found[1]["tool_calls"][0]["function"]["arguments"]  # as it came: the template decides how it is given
    assert arguments == '{"a": 1}' and found[2]["tool_call_id"] == "1"


def test_a_row_has_the_defaults_of_sampling_params_where_it_names_nothing():
    found = row(short(seed=1))
    assert found.params == SamplingParams(seed=1)
    assert (found.custom_id, found.prompt, found.is_chat, found.returns_token_ids) == ("a", "def f():", False, False)


def test_a_prompt_may_be_text_or_token_ids_or_messages_in_both_forms():
    messages = [{"role": "user", "content": "hi"}]
    assert row(short()).prompt == row(openai()).prompt == "def f():"
    ids = array("i", [1, 2])
    assert row({"custom_id": "a", "prompt_token_ids": [1, 2]}).prompt == row(openai(prompt=[1, 2])).prompt == ids
    assert row({"custom_id": "a", "messages": messages}).prompt == row(chat()).prompt == messages
    assert row({"custom_id": "a", "messages": messages, "prompt": None}).prompt == messages


def test_the_token_limit_defaults_to_16_or_in_a_chat_to_the_models_limit():
    assert row(openai()).params.max_tokens == row(short()).params.max_tokens == 16
    assert row(chat()).params.max_tokens is None
    assert row(short(max_tokens=None)).params.max_tokens is None


def test_a_null_is_a_field_that_was_not_given():
    nothing = dict.fromkeys(("temperature", "top_p", "stop", "logit_bias", "logprobs", "stream", "tools", "n"))
    assert row(openai(seed=3, **nothing)).params == SamplingParams(seed=3)
    assert row(openai(seed=None)).params.seed is not None


def test_a_row_that_does_not_give_a_field_has_the_jobs_own():
    defaults = {"max_tokens": 5, "temperature": 0.5, "logprobs": 2, "logit_bias": {"7": -1.5}, "stop": ["x"]}

    def asked(line: dict) -> SamplingParams:
        found = parse(line, defaults=defaults)
        assert isinstance(found, Row), found
        return found.asked

    whole = SamplingParams(max_tokens=5, temperature=0.5, logprobs=2, logit_bias={7: -1.5}, stop=("x",))
    for line in (short(), short(temperature=None), chat(), openai()):
        assert asked(line) == whole
    assert asked(short(max_tokens=9, temperature=0, stop=["y"], logit_bias={})) == SamplingParams(
        max_tokens=9, temperature=0, logprobs=2, logit_bias={}, stop=("y",)
    )
    assert asked(short(max_tokens=None)).max_tokens is None
    assert asked(chat(max_completion_tokens=8)).max_tokens == 8
    assert asked(chat(logprobs=True, top_logprobs=4)).logprobs == 4 and asked(chat(logprobs=False)).logprobs is None
    assert asked({"custom_id": "a", "input": "x"}) == row({"custom_id": "a", "input": "x"}).asked
    assert parse(short(), defaults=defaults).id == parse(short()).id
    message = parse(short(min_tokens=6), defaults=defaults).message
    assert "min_tokens is 6, more than max_tokens, 5" in message


def test_token_ids_come_back_for_token_prompts_or_on_request():
    ids = {"custom_id": "a", "prompt_token_ids": [1]}
    assert row(ids).returns_token_ids and not row({**ids, "return_token_ids": False}).returns_token_ids
    assert row(short(return_token_ids=True)).returns_token_ids
    assert not row({"custom_id": "a", "input": "x"}).returns_token_ids
    assert "return_token_ids is 1; it must be true or false" in error(short(return_token_ids=1))


def test_ids_follow_content_and_not_spacing_or_order():
    plain = parse_line(b'{"custom_id": "a", "prompt": "x", "n": 1}', 1)
    spaced = parse_line(b' { "n":1,"prompt":"\\u0078",  "custom_id":"a"}\r\n', 9)
    assert plain.id == spaced.id and len(plain.id) == 32
    tokens = [parse({"custom_id": "a", "prompt_token_ids": ids}).id for ids in ([1, 2], [1, 3], [1, 2.0])]
    assert (
        len({plain.id, *tokens, parse_line(b'{"custom_id": "b", "prompt": "x", "n": 1}', 1).id, row(short()).id}) == 6
    )


def test_whole_numbers_of_columns_with_gaps_are_taken():
    found = row(short(n=2.0, max_tokens=4.0, seed=7.0, priority=3.0))
    assert found.params == row(short(n=2, max_tokens=4, seed=7)).params and found.priority == 3
    assert list(row({"custom_id": "a", "prompt_token_ids": [1.0, 2]}).prompts[0]) == [1, 2]
    assert row({"custom_id": "a", "input": "x", "dimensions": 2.0}).how.form.dimensions == 2
    assert row(short(max_tokens=0.0, echo=True)).how.generates is False
    assert "dimensions is 1.5" in error({"custom_id": "a", "input": "x", "dimensions": 1.5})
    assert "max_tokens is True" in error(short(max_tokens=True))


def test_a_row_without_a_seed_gets_one_from_its_content_and_the_jobs_seed():
    first, second = parse(short(), seed=1), parse(short(), seed=1)
    assert isinstance(first, Row) and isinstance(second, Row)
    assert first.params.seed == second.params.seed
    others = [parse(short(), seed=2), parse(short(n=2), seed=1), parse({**short(), "custom_id": "b"}, seed=1)]
    assert len({first.params.seed} | {found.params.seed for found in others if isinstance(found, Row)}) == 4


def test_whether_a_row_is_drafted_for_changes_neither_its_id_nor_its_seed():
    for form in (short, openai, chat):
        plain, off, on, none = (
            row(form(**given)) for given in ({}, {"speculative": False}, {"speculative": True}, {"speculative": None})
        )
        assert (plain.asked.speculative, off.asked.speculative) == (True, False)
        assert all((each.id, each.seeds) == (plain.id, plain.seeds) for each in (off, on, none))
        assert parse(form(), defaults={"speculative": False}).seeds == plain.seeds
    assert parse(short(), defaults={"speculative": False}).asked.speculative is False
    assert row(short(user="a")).id != row(short(user="b")).id
    assert "speculative is 1; it must be true or false" in error(short(speculative=1))
    assert parse(short(speculative=1)).id != row(short()).id


def test_a_rows_priority_changes_neither_its_id_nor_its_seed():
    for form in (short, openai, chat):
        plain, late, none = (row(form(**given)) for given in ({}, {"priority": 7}, {"priority": None}))
        assert (plain.priority, late.priority, none.priority) == (0, 7, 0)
        assert (late.id, late.seeds, late.how) == (plain.id, plain.seeds, plain.how) and none.id == plain.id
    assert "priority is 1.5; it must be a whole number" in error(short(priority=1.5))
    assert "priority is 2147483648;" in error(short(priority=2**31))
    assert "it must be a whole number from -2147483647 to 2147483647, and" in error(short(priority=10**30))
    assert "priority is True;" in error(short(priority=True))


@pytest.mark.parametrize(
    ("raw", "code", "message"),
    [
        (b'{"custom_id": "a",', "invalid_json", "not valid JSON"),
        (b"[1]", "invalid_json", "is a list; each line must be a JSON object"),
        (b'{"custom_id": "a", "temperature": NaN}', "invalid_json", "NaN is not a JSON number"),
        (b'{"custom_id": "a", "temperature": 1e999}', "invalid_json", "not valid JSON"),
        (b'{"custom_id": "a", "n": 1, "n": 2}', "invalid_json", "keys given twice: ['n']"),
        (b'{"custom_id": "a", "prompt": "\\ud800"}', "invalid_json", "half of a surrogate pair"),
        (b"[" * 100_000, "invalid_json", "nested too deeply"),
        (b'{"custom_id": "a", "prompt": "\xff"}', "invalid_utf8", "not UTF-8 at byte 31"),
        (b'{"prompt": "x"}', "missing_custom_id", "has no custom_id"),
        (b'{"custom_id": 7, "prompt": "x"}', "missing_custom_id", "custom_id is 7; it must be a string"),
        (b'{"custom_id": "", "prompt": "x"}', "missing_custom_id", "custom_id is ''"),
    ],
)
def test_a_line_without_a_usable_custom_id_is_an_error_that_names_its_number(raw, code, message):
    found = parse_line(raw, 12)
    assert isinstance(found, BadRow)
    said = "7" if b": 7" in raw else "a" if b"ud800" in raw else None
    assert (found.custom_id, found.code, found.line) == (said, code, 12)
    assert found.name == (said or "line-12") and own_name(found) is None
    assert found.message.startswith("line 12: ") and message in found.message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**openai(), "url": ["x"]}, "url is ['x']; it must be"),
        (openai("/v1/images"), "url is '/v1/images'; it must be one of '/v1/completions', '/v1/chat/completions'"),
        ({**openai(), "method": "GET"}, "method is 'GET'; it must be 'POST'"),
        ({**openai(), "n": 2}, "unknown fields ['n'] beside body"),
        ({**openai(), "body": []}, "body is []; it must be an object"),
        ({"custom_id": "a"}, "has no prompt; give exactly one of"),
        (short(input="x"), "has prompt and input; give exactly one of"),
        (short(messages=[]), "has prompt and messages; give exactly one of"),
        ({"custom_id": "a", "prompt_token_ids": "x"}, "prompt_token_ids is 'x'; it must be a list of token ids"),
        ({"custom_id": "a", "prompt_token_ids": [[1], "x"]}, "prompt_token_ids[1] is 'x'; it must be a list of token"),
    ],
)
def test_an_envelope_that_is_wrong_is_refused_by_name_with_what_to_do(line, message):
    assert message in error(line)
    found = parse(line)
    assert isinstance(found, BadRow) and found.custom_id == "a" and found.code == "invalid_request"


@pytest.mark.parametrize("name", [name for name in SECTIONS if SECTIONS[name].path in ROW_BODIES])
def test_a_body_is_read_alike_in_both_forms(name):
    """What is answered of the OpenAI form, and refused, is recorded in tests/openai/answers."""
    for each, body in SECTIONS[name].bodies.items():
        if sum(body.get(field) is not None for field in ("prompt", "messages", "input", "text_1", "query")) != 1:
            continue  # the short form does not say what is asked then
        whole, plain = parse(openai(SECTIONS[name].path) | {"body": body}), parse({"custom_id": "a", **body})
        if isinstance(whole, BadRow) or isinstance(plain, BadRow):
            assert (whole.message, whole.code) == (plain.message, plain.code), each
        else:
            seeds = whole.seeds if body.get("seed") is not None else plain.seeds  # others are drawn from the line
            assert whole._replace(id=plain.id, seeds=seeds) == plain and len(whole.seeds) == len(seeds), each


def test_all_unsupported_fields_of_a_row_are_named_at_once():
    message = error(short(tools=[1], stream=True, colour="red"))
    assert all(name in message for name in ("tools", "stream", "colour"))


def test_a_duplicate_names_both_lines_and_keeps_its_custom_id():
    found = duplicate_row(b"{}", 9, "a", 3)
    assert (found.custom_id, found.line, found.code) == ("a", 9, "duplicate_custom_id")
    assert "line 9" in found.message and "line 3" in found.message and "'a'" in found.message


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
_NAMES = sorted(
    [*SamplingParams.__dataclass_fields__, "prompt", "messages", "prompt_token_ids", "stream", "top_logprobs"]
)


@settings(max_examples=80)
@given(st.dictionaries(st.sampled_from(_NAMES), _JSON, max_size=4), st.booleans())
def test_no_line_however_strange_raises(fields, is_openai):
    line = openai(**fields) if is_openai else {"custom_id": "a", **fields}
    found = parse(line)
    assert found.custom_id == "a"
    assert parse(line) == found


_ANY_LINE = st.fixed_dictionaries(
    {"custom_id": st.just("a") | _JSON},
    optional={
        "method": st.just("POST") | _JSON,
        "url": st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/embeddings"]) | _JSON,
        "body": _JSON
        | st.dictionaries(st.sampled_from([*_NAMES, "input", "logprobs", "tools", "user"]), _JSON, max_size=4),
        "input": _JSON,
        "cache_salt": _JSON,
    },
)


@settings(max_examples=200)
@given(_ANY_LINE)
def test_no_envelope_however_strange_raises(line):
    assert len(parse(line).id) == 32


@settings(max_examples=50)
@given(st.binary(max_size=40))
def test_no_bytes_however_strange_raise(raw):
    assert len(parse_line(raw, 1).id) == 32


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


_NESTED_IN = (
    '{"custom_id": "a", "prompt": %s}',
    '{"custom_id": "a", "messages": %s}',
    '{"custom_id": "a", "prompt": "x", "metadata": %s}',
    '{"custom_id": "a", "prompt": "x", "logit_bias": %s}',
    '{"custom_id": "a", "prompt": "x", "colour": %s}',
    '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": %s}',
    '{"custom_id": %s, "prompt": "x"}',
)


@pytest.mark.parametrize("form", _NESTED_IN)
def test_a_line_is_the_same_row_however_deep_in_calls_it_is_read(form):
    """Python's own limit counts the callers too."""

    def below(num_calls: int, raw: bytes) -> Row | BadRow:
        return below(num_calls - 1, raw) if num_calls else parse_line(raw, 7)

    for depth in (60, 95, 105, 500, 991, 50_000):
        raw = (form % nested(depth)).encode()
        found = parse_line(raw, 7)
        assert found == below(600, raw)
        assert (depth > 100) == ("nested too deeply; at most 100" in getattr(found, "message", ""))


def test_the_demos_prompts_are_good_rows_that_show_every_kind_of_request():
    lines = (Path(__file__).parents[3] / "scripts" / "demo_prompts.jsonl").read_bytes().splitlines()
    rows = [parse_line(raw, number) for number, raw in enumerate(lines, start=1)]
    good = [row for row in rows if isinstance(row, Row)]
    assert len(good) == len(lines) == len({row.custom_id for row in good})
    assert {row.params.temperature == 0 for row in good} == {True, False}
    assert any(row.params.n > 1 for row in good) and any(row.params.stop for row in good)
    assert sum(str(row.prompt).startswith(str(good[0].prompt)[:900]) for row in good) >= 16


def test_a_cache_salt_goes_with_the_prompt_in_both_forms():
    for line in (short(cache_salt="a"), openai(cache_salt="a")):
        assert row(line).prompt == take_apart({"prompt": "def f():", "cache_salt": "a"})
    assert row(chat(cache_salt="a")).prompt.content == row(chat()).prompt
    assert row(short(cache_salt=None)).prompt == "def f():"
    assert "cache_salt is 5; it must be a string that is not empty" in error(short(cache_salt=5))


def test_a_row_may_have_several_prompts_as_texts_or_token_ids():
    assert row(short(prompt=["a", "b"])).prompts == row(openai(prompt=["a", "b"])).prompts == ("a", "b")
    ids = (array("i", [1, 2]), array("i", [3]))
    assert row(short(prompt=[[1, 2], [3]])).prompts == ids
    assert row({"custom_id": "a", "prompt_token_ids": [[1, 2], [3]]}).prompts == ids
    assert row({"custom_id": "a", "input": ["x", [4]]}).prompts == ("x", array("i", [4]))
    salted = row(short(prompt=["a", "b"], cache_salt="s"))
    assert salted.prompts == tuple(take_apart({"prompt": each, "cache_salt": "s"}) for each in "ab")


def test_the_prompts_of_a_row_have_the_rows_seed_or_one_each():
    seeded, free, single = row(short(prompt=["a", "b"], seed=5)), row(short(prompt=["a", "a"])), row(short())
    assert seeded.seeds == (5, 5)
    assert len(set(free.seeds)) == 2 and free.params_of(1).seed == free.seeds[1]
    assert len(single.seeds) == 1 and row({"custom_id": "a", "input": "x"}).seeds == ()


def test_what_a_row_says_of_its_prompt_goes_with_the_prompt():
    options = {"continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    found = row(chat(**options, add_special_tokens=True, add_generation_prompt=False))
    messages = [{"role": "user", "content": "hi"}]
    assert (found.prompt.content, found.prompt.add_special_tokens) == (messages, True)
    assert found.prompt.template == {**options, "add_generation_prompt": False}
    assert row(short(add_special_tokens=False)).prompt.add_special_tokens is False
    assert row(short(chat_template_kwargs={}, continue_final_message=False)).prompt == "def f():"


def test_a_bias_of_minus_infinity_is_read_as_pythons_json_writes_it():
    for line in (short(logit_bias={"5": -math.inf}), openai(logit_bias={"5": -math.inf})):
        assert row(line).params.logit_bias == {5: -math.inf}
    assert "Infinity is not a JSON number" in parse_line(b'{"custom_id": "a", "prompt": "x", "n": Infinity}', 1).message


def test_a_row_without_text_is_answered_with_token_ids():
    assert row(short(detokenize=False)).returns_token_ids and row(chat(detokenize=False)).returns_token_ids
    assert not row(short(detokenize=False, return_token_ids=False)).returns_token_ids
