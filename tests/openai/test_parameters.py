"""Bodies of any size: what is refused is said in a bounded length, at a cost that the first few problems decide."""

import json

import pytest

from ferrum_jax.batch.input.formats import BadRow, parse_line
from ferrum_jax.batch.journal.responses import failed_line
from ferrum_jax.io.error_text import MOST_CHARACTERS
from ferrum_jax.openai import contents, errors
from ferrum_jax.openai.asked import BodyLimits
from ferrum_jax.openai.bodies import asked_text
from ferrum_jax.openai.json_text import decoded
from ferrum_jax.serve.http.http_errors import http_error

MANY = {f"unknown_{i}": 1 for i in range(20_000)}
LONG = {
    "many unknown fields": MANY,
    "a long name": {"x" * 10**6: 1},
    "half a surrogate pair as a name": {"\ud800": 1},
    "a long text in place of a number": {"temperature": "x" * 10**6},
    "a long list in place of a number": {"n": [1] * 10**6},
    "a long text that is not supported": {"audio": "x" * 10**6},
    "many biases": {"logit_bias": {f"x{i}": 1 for i in range(10**5)}},
    "an unknown structure": {"response_format": {"type": "x" * 10**6}},
    "unknown parts of a structure": {"structured_outputs": MANY},
    "a schema of a long name": {"structured_outputs": {"json": {"properties": {"x" * 200_000: True}}}},
    "a schema of unknown keywords": {"structured_outputs": {"json": {f"k{i}": 1 for i in range(20_000)}}},
}


@pytest.fixture
def searches(monkeypatch):
    """How many known names each search for a close one has compared."""
    found = []
    search = errors.get_close_matches
    monkeypatch.setattr(
        errors, "get_close_matches", lambda *given, **named: found.append(given) or search(*given, **named)
    )
    return found


def refused_over_http(fields) -> str:
    with pytest.raises(ValueError) as error:
        asked_text({"prompt": "x", **fields}, BodyLimits(), is_chat=False)
    answer = http_error(error.value)
    assert answer is not None
    return json.dumps(answer.body, ensure_ascii=False).encode().decode()


def refused_in_a_batch(fields) -> str:
    row = parse_line(json.dumps({"custom_id": "a", "prompt": "x", **fields}).encode(), 1)
    assert isinstance(row, BadRow)
    return failed_line(row).decode()


@pytest.mark.parametrize("door", [refused_over_http, refused_in_a_batch])
@pytest.mark.parametrize("fields", LONG.values(), ids=LONG)
def test_an_error_has_a_bounded_length_whatever_is_asked(fields, door):
    assert len(door(fields)) < 2 * MOST_CHARACTERS + 500  # escapes, and the field's name beside it


@pytest.mark.parametrize("door", [refused_over_http, refused_in_a_batch])
def test_a_few_unknown_fields_are_named_and_the_others_counted(door, searches):
    message = door(MANY)
    assert len(searches) == 8
    assert message.count("is not known") == 8 and "19,992 more fields" in message
    assert message.count("known are") == 1 and "temperature" in message


def test_no_close_name_is_looked_for_where_a_name_is_long(searches):
    refused_over_http({"x" * 10**6: 1})
    assert not searches


SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(3000)}}
TEXTS = [f"stop {i}" for i in range(300_000)]
LISTS = {
    "stop": (TEXTS, "stop holds 300,000 texts; at most 64 are allowed"),
    "a long stop": (["x" * 10_000], "stop holds a text of 10,000 characters; at most 256 are allowed"),
    "bad_words": (TEXTS, "bad_words holds 300,000 texts; at most 300 are allowed"),
    "a long bad_words": (["x" * 10_000], "bad_words holds a text of 10,000 characters; at most 256 are allowed"),
    "logit_bias": ({str(i): 1 for i in range(10**5)}, "logit_bias holds 100,000 entries; at most 300 are allowed"),
    "allowed_token_ids": ([5] * 300_000, "allowed_token_ids holds 300,000 ids; at most 262,144 are allowed"),
    "stop_token_ids": ([5] * 300_000, "stop_token_ids holds 300,000 ids; at most 262,144 are allowed"),
    "structured_outputs": ({"json": SCHEMA}, "the JSON schema has more than 2,048 schemas in it; say fewer properties"),
    "a value in structured_outputs": ({"json": {"const": "x" * 2000}}, "is too long; at most 1,024 characters"),
    "a choice in structured_outputs": ({"choice": ["x" * 2000]}, "choice[0] has 2,000 characters; at most 1,024"),
}
CHATS = {
    "messages": ([{"role": "user", "content": "x"}] * 20_000, "messages has 20,000 messages, parts and calls; at most"),
    "parts in messages": (
        [{"role": "user", "content": [{"type": "text", "text": ""}] * 10_000}] * 2,
        "messages has 20,002 messages, parts and calls; at most 16,384 are taken",
    ),
}


@pytest.mark.parametrize("door", [refused_over_http, refused_in_a_batch])
@pytest.mark.parametrize("field", LISTS)
def test_every_list_has_a_bound(field, door):
    value, words = LISTS[field]
    assert words in door({field.split()[-1]: value}).replace('\\"', '"')


@pytest.mark.parametrize("field", CHATS)
def test_a_chat_has_a_bound_of_its_parts_before_one_is_read(field, monkeypatch):
    read = []
    monkeypatch.setattr(contents, "_message", lambda name, message: read.append(name))
    messages, words = CHATS[field]
    with pytest.raises(ValueError, match=words):
        asked_text({"messages": messages}, BodyLimits(), is_chat=True)
    assert not read


def test_more_prompts_than_are_taken_are_refused_before_one_is_read(monkeypatch):
    read = []
    monkeypatch.setattr(contents, "_prompt_of", lambda field, prompt: read.append(field))
    assert "prompt has 100,000 prompts; at most 2,048" in refused_over_http({"prompt": ["x"] * 10**5})
    assert not read


@pytest.mark.parametrize("door", [refused_over_http, refused_in_a_batch])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"guided_json": {"type": "null"}}, "an older name of vLLM's: give it as json in structured_outputs"),
        ({"guided_choice": ["a"]}, "an older name of vLLM's: give it as choice in structured_outputs"),
        ({"structured_outputs": {"json": {"const": 9007199254740993}}}, "would be rounded"),
        ({"structured_outputs": {"json": '{"const": 0.12345678901234567890}'}}, "in a schema is kept as"),
    ],
    ids=str,
)
def test_older_names_and_numbers_that_would_be_rounded_are_refused(body, words, door):
    assert words in door(body)


def test_a_number_of_a_body_that_would_be_rounded_is_refused_in_a_schema_alone():
    body = '{"prompt": "a", "temperature": 0.70000000000000000001, "structured_outputs": {"json": {"minimum": %s}}}'
    assert asked_text(decoded(body % "0.7"), BodyLimits(), is_chat=False)
    with pytest.raises(ValueError, match=r"0\.70000000000000000001 in a schema is kept as 0\.7"):
        asked_text(decoded(body % "0.70000000000000000001"), BodyLimits(), is_chat=False)
