"""The `input` of /v1/responses as the messages of a chat.

What an assistant thought, said and called stands in items that follow one another; in a chat they are one message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrum_jax.io.error_text import quoted
from ferrum_jax.openai.contents import MOST_PARTS
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.openai.json_text import JsonError, decoded

_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text"}


def input_messages(given: object) -> list[dict[str, Any]]:
    """The messages. Raises FieldError naming the item that is wrong."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise FieldError(f"input is {quoted(given)}; it must be a string or a list with at least one item", "input")
    if len(given) > MOST_PARTS:
        raise FieldError(f"input has {len(given):,} items; at most {MOST_PARTS:,} are taken", "input")
    found: list[dict[str, Any]] = []
    is_open = False  # the last message is an assistant's that may go on
    for index, item in enumerate(given):
        place = f"input[{index}]"
        message = _message(place, item)
        goes_on = message["role"] == "assistant"
        if not (is_open and goes_on and _join(found[-1], message)):
            found.append(message)
        is_open = goes_on
    return found


def _message(place: str, item: object) -> dict[str, Any]:
    """One item as a message, or as a part of an assistant's."""
    if not isinstance(item, Mapping):
        raise FieldError(f"{place} is {quoted(item)}; it must be an object", place)
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or not role:
            raise FieldError(f"{place}.role is {quoted(role)}; it must be a string such as 'user'", f"{place}.role")
        return {"role": role, "content": _parts(f"{place}.content", item.get("content"))}
    if kind == "function_call":
        function = {name: _string(place, item, name) for name in ("name", "arguments")}
        _check_arguments(f"{place}.arguments", function["arguments"])
        call = {"id": _string(place, item, "call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = _parts(f"{place}.output", item.get("output"))
        return {"role": "tool", "tool_call_id": _string(place, item, "call_id"), "content": output}
    if kind == "reasoning":
        if item.get("encrypted_content") is not None:
            name = f"{place}.encrypted_content"
            raise FieldError(f"{name} cannot be read here; give the item's content", name)
        return {"role": "assistant", "content": None, "reasoning": _text(f"{place}.content", item.get("content") or [])}
    message = f"{place}.type is {quoted(kind)}; it must be message, function_call, function_call_output or reasoning"
    raise FieldError(message, f"{place}.type")


def _join(message: dict[str, Any], more: Mapping[str, Any]) -> bool:
    """Puts the next part into an assistant's message; False where it begins another one."""
    has_calls, has_content = "tool_calls" in message, message["content"] is not None
    if "tool_calls" in more:
        message.setdefault("tool_calls", []).extend(more["tool_calls"])
    elif "reasoning" in more or has_content or has_calls:
        return False
    else:
        message["content"] = more["content"]
    return True


def _check_arguments(place: str, arguments: str) -> None:
    try:
        decoded(arguments.strip() or "{}")
    except JsonError as error:
        raise FieldError(f"{place} is {error}", place) from error


def _string(place: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise FieldError(f"{place}.{name} is {quoted(value)}; it must be a string", f"{place}.{name}")
    return value


def _text(place: str, content: object) -> str:
    """A text, or the text of its parts."""
    parts = _parts(place, content)
    return parts if isinstance(parts, str) else "".join(part.get("text", "") for part in parts)


def _parts(place: str, content: object) -> str | list[dict[str, Any]]:
    """A text, or the parts of a chat's message."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(f"{place} is {quoted(content)}; it must be a string or a list of parts", place)
    return [_part(f"{place}[{index}]", part) for index, part in enumerate(content)]


def _part(place: str, part: object) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and isinstance(kind, str) and kind in _PARTS:
        return {"type": "text", "text": _string(place, part, _PARTS[kind])}
    if isinstance(part, Mapping) and kind == "input_image" and part.get("file_id") is None:
        detail = {} if part.get("detail") is None else {"detail": part["detail"]}
        return {"type": "image_url", "image_url": {"url": _string(place, part, "image_url"), **detail}}
    if isinstance(part, Mapping) and kind == "input_audio":
        return dict(part)
    raise FieldError(
        f"{place}.type is {quoted(kind)}; it must be input_text, output_text, input_audio, or input_image with its URL",
        f"{place}.type",
    )
