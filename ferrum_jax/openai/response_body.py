"""Bodies of /v1/responses: what they ask for, as the chat that it is. Every error names its field.

Nothing is stored, so what needs something stored is refused by name, and so are tools that a host would run.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ferrum_jax.io.error_text import named, quoted
from ferrum_jax.openai.asked import AskedText, BodyLimits
from ferrum_jax.openai.bodies import asked_text, known_fields
from ferrum_jax.openai.body_fields import OF_RESPONSES, fields_of, given
from ferrum_jax.openai.body_rules import rules_of
from ferrum_jax.openai.contents import MAX_PARTS
from ferrum_jax.openai.errors import FieldError, naming_fields
from ferrum_jax.openai.json_text import JsonError, decoded

_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text"}
_LOGPROBS = "message.output_text.logprobs"
_NOT_HERE = {  # OpenAI's names of what never stands in an answer here
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
}
_SAME = fields_of("response", "http").keys() - {*OF_RESPONSES, "top_logprobs", "stream_options"} | {"tool_choice"}
# What the chat's fields are called here, in errors.
_NAMES = (
    (r"\bmax_tokens\b", "max_output_tokens"),
    (r"\bresponse_format\.json_schema\b", "text.format"),
    (r"\bresponse_format\b", "text.format"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\blogprobs\b", "top_logprobs"),
    (r"(\btools\[\d+\])\.function\b", r"\1"),
)


def input_messages(given: object) -> list[dict[str, Any]]:
    """The messages of a chat: an assistant's neighbouring items are one. Raises FieldError naming the wrong item."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise FieldError(f"input is {quoted(given)}; it must be a string or a list with at least one item", "input")
    if len(given) > MAX_PARTS:
        raise FieldError(f"input has {len(given):,} items; at most {MAX_PARTS:,} are taken", "input")
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedResponse:
    """chat: what is asked. shown: fields that the answer repeats, as they were given."""

    chat: AskedText
    shown: Mapping[str, Any]


def asked_response(body: Mapping[str, Any], limits: BodyLimits) -> AskedResponse:
    """The request of a response's body. Raises FieldError for the first thing that is wrong."""
    body, warnings = known_fields(body, rules_of("response", "http"), limits)
    chat = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat["messages"] = _messages(body)
    chat |= _structure(body) | _tools(body) | _reasoning(body) | _logprobs(body) | _truncation(body)
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    with naming_fields(body):
        _check_stream_options(body)
    try:
        asked = asked_text(chat, limits, is_chat=True)
    except FieldError as error:
        raise FieldError(_renamed(str(error)), error.param and _renamed(error.param)) from error
    asked = dataclasses.replace(asked, warnings=(*warnings, *asked.warnings))
    return AskedResponse(chat=asked, shown=_shown(body, asked))


def _renamed(text: str) -> str:
    for pattern, name in _NAMES:
        text = re.sub(pattern, name, text)
    return text


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise FieldError(f"instructions is {quoted(instructions)}; it must be a string", "instructions")
    if body.get("input") is None:
        raise FieldError("input is missing; the body must have it", "input")
    system = [{"role": "system", "content": instructions}] if instructions else []
    return system + input_messages(body["input"])


def _object(body: Mapping[str, Any], name: str, known: set[str]) -> Mapping[str, Any]:
    """A field that is an object. Raises FieldError for what is none, and for parts that are not known."""
    found = body.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise FieldError(f"{name} is {quoted(found)}; it must be an object", name)
    unknown = sorted(key for key in set(found) - known if found[key] is not None)
    if unknown:
        raise FieldError(
            f"{name}.{named(unknown[:1])} is not known; known are {', '.join(sorted(known))}", f"{name}.{unknown[0]}"
        )
    return found


def _structure(body: Mapping[str, Any]) -> dict[str, Any]:
    """text.format as a chat's response_format."""
    text = _object(body, "text", {"format", "verbosity"})
    _one_of("text.verbosity", text.get("verbosity"), "low", "medium", "high")
    form = text.get("format")
    if form is None:
        return {}
    if not isinstance(form, Mapping) or form.get("type") not in ("text", "json_object", "json_schema"):
        kind = form.get("type") if isinstance(form, Mapping) else form
        raise FieldError(
            f'text.format is {quoted(kind)}; its type must be "text", "json_object" or "json_schema"', "text.format"
        )
    if form["type"] != "json_schema":
        return {"response_format": {"type": form["type"]}}
    return {"response_format": {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}}


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """tools and tool_choice as a chat has them, where what is called has an object of its own."""
    found: dict[str, Any] = {}
    tools = body.get("tools")
    if tools is not None:
        if not isinstance(tools, list):
            raise FieldError(f"tools is {quoted(tools)}; it must be a list of tools", "tools")
        found["tools"] = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            message = f'tool_choice is {quoted(dict(choice))}; it must be "auto", "none", "required" or '
            raise FieldError(message + '{"type": "function", "name": ...}', "tool_choice")
        found["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    return found


def _tool(place: str, tool: object) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise FieldError(f"{place} is {quoted(tool)}; it must be an object", place)
    if tool.get("type") != "function":
        message = (
            f"{place}.type is {quoted(tool.get('type'))}; only tools of type 'function' are supported, which you run"
        )
        raise FieldError(message, f"{place}.type")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _reasoning(body: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = _object(body, "reasoning", {"effort", "summary", "generate_summary"})
    for name in ("summary", "generate_summary"):
        _one_of(f"reasoning.{name}", reasoning.get(name), "auto", "concise", "detailed")
    return {} if reasoning.get("effort") is None else {"reasoning_effort": reasoning["effort"]}


def _truncation(body: Mapping[str, Any]) -> dict[str, Any]:
    """Truncation: "auto" keeps the prompt's end, unless truncate_prompt_tokens says how much."""
    _one_of("truncation", body.get("truncation"), "auto", "disabled")
    cuts = body.get("truncation") == "auto" and body.get("truncate_prompt_tokens") is None
    return {"truncate_prompt_tokens": -1} if cuts else {}


def _one_of(name: str, value: object, *known: str) -> None:
    if value not in (None, *known):
        raise FieldError(f"{name} is {quoted(value)}; it must be {' or '.join(map(repr, known))}", name)


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    include, top = body.get("include"), body.get("top_logprobs")
    if include is not None and not isinstance(include, list):
        raise FieldError(f"include is {quoted(include)}; it must be a list", "include")
    other = [each for each in include or () if each not in (_LOGPROBS, *_NOT_HERE)]
    if other:
        raise FieldError(f"include has {quoted(other[0])}; only {_LOGPROBS!r} is supported", "include")
    wants = _LOGPROBS in (include or ()) or (top is not None and (type(top) is not int or top != 0))
    return {"logprobs": True, "top_logprobs": top} if wants else {}


def _check_stream_options(body: Mapping[str, Any]) -> None:
    options = _object(body, "stream_options", {"include_obfuscation"})
    if options and not given(body, "stream"):
        raise FieldError("stream_options is given without stream; set stream to true", "stream_options")
    if options.get("include_obfuscation") not in (None, False):
        name = "stream_options.include_obfuscation"
        raise FieldError(f"{name} is not supported; set it to false", name)


def _shown(body: Mapping[str, Any], asked: AskedText) -> dict[str, Any]:
    """The fields that an answer repeats."""
    return {
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "max_output_tokens": body.get("max_output_tokens"),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
        "temperature": asked.params.temperature,
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": asked.params.logprobs or 0,
        "top_p": asked.params.top_p,
        "truncation": body.get("truncation") or "disabled",
        "user": body.get("user"),
    }
