"""What is recorded of one body agrees across its doors; where it does not, differences.py names the body and why."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ferrum_jax.openai.body_rules import rules_of
from tests.openai.differences import ANSWERED_ELSEWHERE, OTHER_ANSWERS, OTHER_WORDS
from tests.openai.sections import CHAT, COMPLETE, EMBED, RANK, RESPOND, SCORE, SECTIONS, differences_of, recorded

# What one door's answer has and another's has not: a job names its tokens' ids, a server counts what it had cached.
ONE_SIDED = {"created", "system_fingerprint", "stop_reason", "token_ids", "prompt_token_ids", "prompt_tokens_details"}
ONE_SIDED |= {"id", "usage", "Warning"}
KNOWN_AT = {
    RESPOND: (rules_of("response", "http"),),
    **{
        path: (rules_of(body, "http"), rules_of(body, "row"))
        for path, body in (
            *((COMPLETE, "completion"), (CHAT, "chat")),
            *((EMBED, "embedding"), (SCORE, "score"), (RANK, "rerank")),
        )
    },
}


def is_refusal(answer: Any) -> bool:
    return isinstance(answer, Mapping) and "message" in answer


def answered_by_both(name: str, *doors: str) -> Iterator[tuple[Any, ...]]:
    for body, answers in recorded(name).items():
        found = [answers.get(door) for door in doors]
        if not any(each is None or is_refusal(each) for each in found):
            yield body, *found


@pytest.mark.parametrize("path", KNOWN_AT)
def test_every_field_that_a_door_knows_or_refuses_is_in_a_body(path):
    known = {name for rules in KNOWN_AT[path] for name in (*rules.known, *rules.refused)}
    asked = {name for each in SECTIONS.values() if each.path == path for body in each.bodies.values() for name in body}
    assert not known - asked


@pytest.mark.parametrize("name", SECTIONS)
def test_a_body_is_answered_through_all_doors_or_none(name):
    differing = [body for body, found in recorded(name).items() if len(set(map(is_refusal, found.values()))) > 1]
    marked = [body for bodies in ANSWERED_ELSEWHERE.values() for body in bodies.get(name, ())]
    assert sorted(differing) == sorted(marked)


@pytest.mark.parametrize("name", OTHER_WORDS)
def test_a_refusal_reads_alike_in_a_row_and_over_http(name):
    differing = []
    for body, found in recorded(name).items():
        row, asked = found.get("job", {}), found.get("http", {})
        if "message" in row and "message" in asked and row["message"].removeprefix("line N: ") != asked["message"]:
            differing.append(body)
    assert sorted(differing) == sorted(OTHER_WORDS[name])


@pytest.mark.parametrize("name", SECTIONS)
def test_the_body_of_a_rows_answer_is_that_of_http(name):
    for body, row, asked in answered_by_both(name, "job", "http"):
        assert not list(unlike(row, asked)), body


@pytest.mark.parametrize("name", SECTIONS)
def test_a_stream_adds_up_to_the_whole(name):
    for body, stream, whole in answered_by_both(name, "stream", "http"):
        if "response" in stream:
            assert stream["response"] == {key: value for key, value in whole.items() if key != "Warning"}, body
            continue
        choices = [as_whole(choice) for choice in stream["choices"]]
        whole_ones = [{**choice, **_full(choice)} for choice in whole["choices"]]
        assert not list(unlike(choices, whole_ones)), body
        assert stream.get("usage", whole["usage"]) == whole["usage"], body
        assert stream.get("Warning") == whole.get("Warning"), body


@pytest.mark.parametrize(
    ("name", "body"),
    [("chats", "a stop string"), ("chats", "up to a stop token")]
    + [("completions", body) for body in ("a stop string", "a stop string that is shown", "a stop token")],
)
def test_what_is_to_stop_an_answer_has_stopped_it(name, body):
    """Where other weights write other texts, the body needs another stop."""
    assert {choice["finish_reason"] for choice in recorded(name)[body]["http"]["choices"]} == {"stop"}


def test_a_response_says_what_the_chat_with_the_same_messages_says():
    said, chat = recorded("responses")["instructions"]["http"], recorded("chats")["several messages"]["http"]
    texts = [part["text"] for item in said["output"] for part in item["content"]]
    assert texts == [chat["choices"][0]["message"]["content"]]
    assert said["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def as_whole(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A streamed choice as it stands in an answer that comes whole."""
    if "delta" not in choice:
        return dict(choice)
    said = dict(choice["delta"])
    for place, call in enumerate(said.get("tool_calls", ())):
        assert call["index"] == place
        said["tool_calls"][place] = {key: value for key, value in call.items() if key != "index"}
    found = {("message" if key == "delta" else key): value for key, value in choice.items()}
    return found | _full({"message": said})


def _full(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The choice's message with "" for texts that it has not; nothing of a completion."""
    if "message" not in choice:
        return {}
    said = choice["message"]
    return {"message": {**said, "content": said.get("content") or "", "reasoning": said.get("reasoning") or ""}}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_call_gives_what_http_answers(name):
    found = answered_by_both(name, "call", "http")
    differing = [body for body, call, whole in found if list(differences_of(_called(whole), _plain(call)))]
    assert sorted(differing) == sorted(OTHER_ANSWERS.get(name, ()))


def _called(whole: dict[str, Any]) -> Any:
    """What a call would give for an answer."""
    if "data" in whole:
        values = [each.get("embedding", each.get("score")) for each in whole["data"]]
        return [each["base64"] if isinstance(each, dict) else each for each in values]
    return [_said(choice) for choice in whole["choices"]]


def _said(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {"content": choice["text"]}
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    ended = "stop" if calls else choice["finish_reason"]
    return {"content": message["content"] or "", "calls": calls, "ended": ended, "stop": choice["stop_reason"]}


_SAME = {"content": "content", "calls": "calls", "ended": "finish_reason", "stop": "stop_reason"}


def _plain(call: Any) -> Any:
    if not call or not isinstance(call[0], dict):
        return call
    said = [{"content": each["text"], "calls": [], **each.get("message", {}), **each} for each in call]
    return [{name: each[key] for name, key in _SAME.items()} for each in said]


def unlike(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """As `differences_of`, in any order of keys, and with those of ONE_SIDED in one alone."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() ^ other.keys()):
            if key not in ONE_SIDED:
                yield f"{place}.{key} is in one alone"
        for key in one.keys() & other.keys() - {"id"}:
            yield from unlike(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, each in enumerate(one):
            yield from unlike(each, other[index], f"{place}[{index}]")
    else:
        yield from differences_of(one, other, place)
