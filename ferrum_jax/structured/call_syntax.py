"""One tool call at a place of a text, in each style of `tool_forms.py`.

Each function says what stands at `at`: where it ends, `MORE` where that depends on text that has not come, or None
where it is something else. White space of the forms is matched as it comes.
"""

from __future__ import annotations

import ast
import enum
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ferrum_jax.structured.asked.message import ToolCall
from ferrum_jax.structured.tool_forms import ToolForm
from ferrum_jax.structured.tool_grammar import is_plain_text


class Unfinished(enum.Enum):
    """What stands here is not all there yet."""

    MORE = 0


MORE = Unfinished.MORE


class Found(NamedTuple):
    """A call, and where the text goes on after it."""

    call: ToolCall
    end: int


_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


def literal(text: str, at: int, wanted: str) -> int | Unfinished | None:
    """Where `wanted` ends if it stands here; each run of white space in it stands for any, or none."""
    for part in re.split(r"(\s+)", wanted):
        if part.isspace():
            at = after_space(text, at)
        if not part.strip():
            continue
        here = text[at : at + len(part)]
        if here != part:
            return MORE if part.startswith(here) and at + len(here) == len(text) else None
        at += len(part)
    return at


def after_space(text: str, at: int) -> int:
    """The next place that is no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def call_at(
    text: str, at: int, form: ToolForm, properties: Mapping[str, Mapping[str, Any]], *, is_last: bool = False
) -> Found | Unfinished | None:
    """The call that stands here. properties: of the tools that there are, by name.

    is_last: no more text will come, so a call that lacks its end mark alone is whole: an end token may have been it.
    """
    start = literal(text, at, form.begin)
    if not isinstance(start, int):
        return start
    start = after_space(text, start)
    found = _BODIES[form.style](text, start, form, properties)
    if not isinstance(found, Found):
        return found
    end = literal(text, found.end, form.end)
    if end is MORE and is_last:
        end = len(text)
    return Found(found.call, end) if isinstance(end, int) else end


def _object(text: str, at: int, form: ToolForm, _properties: object) -> Found | Unfinished | None:
    end = _end_of_brackets(text, at, "{")
    value = _loads(text[at:end]) if isinstance(end, int) else None
    if not isinstance(end, int):
        return end
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = next((value[key] for key in (form.arguments_key, "arguments", "parameters") if key in value), None)
    if isinstance(arguments, str):  # some models write the object as a text
        arguments = _loads(arguments)
    return Found(_call(value["name"], arguments), end) if isinstance(arguments, dict) else None


def _named(text: str, at: int, form: ToolForm, _properties: object) -> Found | Unfinished | None:
    name = _name(text, at)
    if not isinstance(name, str):
        return name
    start = literal(text, at + len(name), form.middle)
    if not isinstance(start, int):
        return start
    start = after_space(text, start)
    end = _end_of_brackets(text, start, "{")
    if not isinstance(end, int):
        return end
    arguments = _loads(text[start:end])
    return Found(_call(name, arguments), end) if isinstance(arguments, dict) else None


def _parameters(
    text: str, at: int, _form: ToolForm, properties: Mapping[str, Mapping[str, Any]]
) -> Found | Unfinished | None:
    return _spelled(
        text, literal(text, at, "<function="), ">", "<parameter=", ">", "</parameter>", "</function>", properties
    )


def _pairs(
    text: str, at: int, form: ToolForm, properties: Mapping[str, Mapping[str, Any]]
) -> Found | Unfinished | None:
    found = _spelled(text, at, "", "<arg_key>", "</arg_key> <arg_value>", "</arg_value>", form.end, properties)
    return Found(found.call, found.end - len(form.end)) if isinstance(found, Found) else found


def _spelled(
    text: str,
    at: int | Unfinished | None,
    after_name: str,
    before_key: str,
    after_key: str,
    after_value: str,
    close: str,
    properties: Mapping[str, Mapping[str, Any]],
) -> Found | Unfinished | None:
    """A name, then keys and values between marks, then `close`."""
    if not isinstance(at, int):
        return at
    name = _name(text, at)
    if not isinstance(name, str):
        return name
    place = literal(text, at + len(name), after_name)
    arguments: dict[str, Any] = {}
    while isinstance(place, int):
        place = after_space(text, place)
        end = literal(text, place, close)
        if isinstance(end, int):
            return Found(_call(name, arguments), end)
        key_at = literal(text, place, before_key)
        if not isinstance(key_at, int):
            return MORE if MORE in (end, key_at) else None
        pair = _pair(text, key_at, after_key, after_value)
        if not isinstance(pair, tuple):
            return pair
        key, value, place = pair
        arguments[key] = _typed(value, properties.get(name, {}).get(key))
    return place


def _pair(text: str, at: int, after_key: str, after_value: str) -> tuple[str, str, int] | Unfinished:
    """A key, its value and where they end."""
    first = after_key.split()[0]
    stop = text.find(first, at)
    start = literal(text, stop, after_key) if stop >= 0 else MORE
    if not isinstance(start, int):
        return MORE
    end = text.find(after_value, start)
    if end < 0:
        return MORE
    value = text[start:end]
    if after_value == "</parameter>":  # which stands on a line of its own
        value = value.removeprefix("\n").removesuffix("\n")
    return text[at:stop].strip(), value, end + len(after_value)


def _python(text: str, at: int, _form: ToolForm, _properties: object) -> Found | Unfinished | None:
    name = _name(text, at)
    if not isinstance(name, str):
        return name
    end = _end_of_brackets(text, at + len(name), "(")
    if not isinstance(end, int):
        return end
    try:
        (keywords,) = [ast.parse(text[at:end].strip(), mode="eval").body]
        assert isinstance(keywords, ast.Call) and not keywords.args
        arguments = {str(each.arg): _python_value(each.value) for each in keywords.keywords}
        return Found(_call(name, arguments), end)
    except (AssertionError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _python_value(node: ast.expr) -> Any:
    """A literal, with JSON's names for true, false and null as well. Raises ValueError for anything else."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): _python_value(value) for key, value in pairs if isinstance(key, ast.Constant)}
    value = ast.literal_eval(node)
    json.dumps(value)
    return value


_BODIES = {"object": _object, "named": _named, "parameters": _parameters, "pairs": _pairs, "python": _python}


def _call(name: str, arguments: dict[str, Any] | None) -> ToolCall:
    return ToolCall(name=name, arguments=json.dumps(arguments or {}, ensure_ascii=False))


def _name(text: str, at: int) -> str | Unfinished | None:
    found = _NAME.match(text, at)
    if found is None:
        return MORE if at == len(text) else None
    return MORE if found.end() == len(text) else found.group()


def _typed(value: str, schema: Any) -> Any:
    """An argument that stands without quotes: a text where its schema says so, else JSON where it is some."""
    if is_plain_text(schema):
        return value
    found = _loads(value.strip())
    return value if found is None and value.strip() != "null" else found


def _loads(text: str) -> Any:
    """The JSON value; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _end_of_brackets(text: str, at: int, opening: str) -> int | Unfinished | None:
    """Where what `opening` opens here is closed, brackets within texts aside."""
    if at >= len(text):
        return MORE
    if text[at] != opening:
        return None
    waiting: list[str] = []
    quotes = '"' if opening == "{" else "\"'"
    within, escaped = "", False
    for place in range(at, len(text)):
        character = text[place]
        if within:
            within = within if escaped or character != within else ""
            escaped = character == "\\" and not escaped
        elif character in quotes:
            within, escaped = character, False
        elif character in _CLOSERS:
            waiting.append(_CLOSERS[character])
        elif character in "}])":
            if character != waiting.pop():
                return None
            if not waiting:
                return place + 1
    return MORE
