"""The events of a stream added up into one: texts and lists are put together, and the last of all else stays.

Fields of a choice are sorted, for their order would tell how many tokens an event happened to hold.
"""

from collections.abc import Sequence
from typing import Any


def events_of(content: bytes) -> list[str]:
    """The JSON of each event. Completions and chats end with [DONE]."""
    *blocks, end = content.decode().split("\n\n")
    assert end == ""
    found = []
    for block in blocks:
        *kind, data = block.split("\n")
        assert len(kind) <= 1 and data.startswith("data: ")
        found.append(data.removeprefix("data: "))
    if blocks[0].startswith("event: "):
        return found
    assert found[-1] == "[DONE]"
    return found[:-1]


def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One event that says what all of them say."""
    if "type" in events[0]:
        return _response(events)
    found, choices = {**events[0], "choices": []}, {}
    assert all(choice.get("delta", {"role": "assistant"})["role"] == "assistant" for choice in events[0]["choices"])
    for event in events:
        assert all(event[name] == found[name] for name in ("id", "object", "model"))
        found |= {name: value for name, value in event.items() if name != "choices"}
        for choice in event["choices"]:
            index = choice["index"]
            choices[index] = _added(choices[index], choice) if index in choices else choice
    return {**found, "choices": [dict(sorted(choices[index].items())) for index in sorted(choices)]}


def _added(old: Any, new: Any, name: str = "") -> Any:
    if new is None or old is None:
        return old if new is None else new
    if isinstance(old, dict):
        return {key: _added(old.get(key), new.get(key), key) for key in {**old, **new}}
    return old + new if isinstance(old, list) or name in ("text", "content", "reasoning") else new


def _response(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The kinds of the events in their order, runs of one kind as one; their deltas; and the last one's response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas: dict[str, str] = {}
    for kind, event in zip(kinds, events, strict=True):
        if "delta" in event:
            deltas[kind] = deltas.get(kind, "") + event["delta"]
    runs = [kind for place, kind in enumerate(kinds) if place == 0 or kind != kinds[place - 1]]
    return {"events": runs, "deltas": deltas, "response": events[-1]["response"]}
