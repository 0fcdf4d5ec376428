"""One tool call at a place of a text, in each style of `tool_forms.py`.

What reads raises `More` where what stands here depends on text that has not come, and `NoCall` where it is something
else. White space of the forms is matched as it comes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ferrum_jax.asked.message import ToolCall
from ferrum_jax.structured.forms.tool_forms import ToolForm
from ferrum_jax.structured.reading.quoted_values import quoted_value
from ferrum_jax.structured.reading.spelled_values import spelled_value
from ferrum_jax.structured.reading.text_reader import NoCall, TextReader

Properties = Mapping[str, Mapping[str, Any]]


class Found(NamedTuple):
    """A call, and where the text goes on after it."""

    call: ToolCall
    end: int


_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_LOOSE = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?<![\w.])0+(?=[1-9])""", re.DOTALL)
_ID = re.compile(r"[A-Za-z0-9_\-]+")


def call_at(reader: TextReader, at: int, form: ToolForm, properties: Properties) -> Found:
    """The call that stands here. properties: of the tools that there are, by name.

    Where no more text will come, a call that lacks its end mark alone is whole: an end token may have been it.
    """
    start = reader.after_space(reader.after(reader.after_space(at), form.begin))
    found = _BODIES[form.style](reader, start, form, properties)
    if not form.end:
        return found
    return Found(found.call, reader.after(reader.after_space(found.end), form.end, may_be_cut=True))


def _object(reader: TextReader, at: int, form: ToolForm, _properties: Properties) -> Found:
    end = reader.end_of_brackets(at, "{")
    value = _loads(reader.text[at:end])
    name = value.get(form.name_key) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or not name:
        raise NoCall
    keys = (form.arguments_key, "arguments", "parameters")
    key = next((key for key in keys if key in value), None)
    if key is None and form.leads:  # nothing but its keys says that this is a call
        raise NoCall
    arguments = None if key is None else value[key]
    if isinstance(arguments, str):  # some models write the object as a text
        arguments = _loads(arguments.strip() or "{}")
        if arguments is None:
            raise NoCall
    return Found(_call(name, arguments), end)


def _named(reader: TextReader, at: int, form: ToolForm, _properties: Properties) -> Found:
    name = _name(reader, at)
    end, call_id = _call_id(reader, at + len(name), form, name)
    start = reader.after_space(reader.after(reader.after_space(end), form.middle))
    if form.quote:
        value, end = quoted_value(reader, start, form.quote)
        return Found(_call(name, value, call_id), end)
    end = reader.end_of_brackets(start, "{")
    value = _loads(reader.text[start:end])
    if value is None:
        raise NoCall
    return Found(_call(name, value, call_id), end)


def _call_id(reader: TextReader, at: int, form: ToolForm, name: str) -> tuple[int, str | None]:
    """Where the id after a name ends, and the id that users see; where there is none, `at`, and None."""
    if not form.id_mark:
        return at, None
    try:
        start = reader.after(at, form.id_mark)
    except NoCall:
        if form.call_id:
            raise
        return at, None
    found = reader.matched(_ID, start)
    return start + len(found), form.call_id.format(name=name, id=found) if form.call_id else found


def _spelled(reader: TextReader, at: int, form: ToolForm, properties: Properties) -> Found:
    """A name, then keys and values between marks, up to the end mark."""
    name = _name(reader, at)
    place = reader.after(reader.after_space(at + len(name)), form.middle)
    own = properties.get(name, {})
    arguments: dict[str, Any] = {}
    while True:
        place = reader.after_space(place)
        if reader.stands(place, form.end):
            return Found(_call(name, arguments), place)
        key, value, place = spelled_value(reader, reader.after(place, form.argument[0]), form)
        arguments[key] = _typed(value, own.get(key))


def _python(reader: TextReader, at: int, _form: ToolForm, _properties: Properties) -> Found:
    name = _name(reader, at)
    end = reader.end_of_brackets(at + len(name), "(")
    try:
        call = ast.parse("f" + _LOOSE.sub(_as_python, reader.text[at + len(name) : end]), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise NoCall
        arguments = {str(each.arg): _python_value(each.value) for each in call.keywords}
        return Found(_call(name, arguments), end)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NoCall from None


def _as_python(loose: re.Match[str]) -> str:
    """What models write in Python's place, as Python: new lines within texts, zeros before a number."""
    return loose[0].replace("\n", "\\n").replace("\0", "\\0") if loose[0][0] in "\"'" else ""


def _python_value(node: ast.expr) -> Any:
    """A literal, with JSON's names for true, false and null as well. Raises ValueError for anything else."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Set):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): _python_value(value) for key, value in pairs if isinstance(key, ast.Constant)}
    value = ast.literal_eval(node)
    json.dumps(value, allow_nan=False)
    return value


_BODIES = {"object": _object, "named": _named, "spelled": _spelled, "python": _python}


def _call(name: str, arguments: object, call_id: str | None = None) -> ToolCall:
    if arguments is not None and not isinstance(arguments, dict):
        raise NoCall
    return ToolCall(name=name, arguments=json.dumps(arguments or {}, ensure_ascii=False), id=call_id)


def _name(reader: TextReader, at: int) -> str:
    return reader.matched(_NAME, at)


_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_PYTHON_NAMES = {"True": True, "False": False, "None": None}


def _typed(value: str, schema: Any) -> Any:
    """An argument that stands without quotes: a text where its schema allows nothing else, else JSON where it is some.

    Where a schema allows texts and more, JSON of the other types is not read as a text.
    """
    kinds, text = _kinds(schema), value.strip()
    if kinds == {"string"}:
        return value
    found = _PYTHON_NAMES[text] if text in _PYTHON_NAMES and kinds else _loads(text)
    if found is None and text not in ("null", "None"):
        return value
    kind = _TYPES.get(type(found), "null")
    is_allowed = kind in kinds or (kind == "integer" and "number" in kinds)
    return value if "string" in kinds and not is_allowed else found


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names; none where it names none."""
    if not isinstance(schema, dict):
        return set()
    if "enum" in schema or "const" in schema:
        return {_TYPES.get(type(value), "null") for value in schema.get("enum", [schema.get("const")])}
    kinds = schema.get("type", [])
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    return found.union(*(_kinds(each) for key in ("anyOf", "oneOf") for each in schema.get(key, ())))


def _loads(text: str) -> Any:
    """The JSON value; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
