"""Bodies of /v1/responses: what they ask for, as the chat that it is. Every error names its field.

Nothing is stored, so what needs something stored is refused by name, and so are tools that a host would run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ferrum_jax.io.error_text import named, quoted
from ferrum_jax.openai.asked import AskedText, BodyLimits
from ferrum_jax.openai.bodies import asked_text, known_fields
from ferrum_jax.openai.body_fields import OF_RESPONSES, fields_of, given
from ferrum_jax.openai.body_rules import rules_of
from ferrum_jax.openai.errors import FieldError, naming_fields
from ferrum_jax.openai.response_input import input_messages

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedResponse:
    """chat: what is asked. shown: fields that the answer repeats, as they were given."""

    chat: AskedText
    shown: Mapping[str, Any]


def asked_response(body: Mapping[str, Any], limits: BodyLimits) -> AskedResponse:
    """What a body asks for. Raises FieldError for the first thing that is wrong."""
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
    """What is too long: "auto" keeps the end, as truncate_prompt_tokens does where that is not given."""
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
