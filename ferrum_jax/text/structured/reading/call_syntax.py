"""One tool call at a place of a text, in each style of `tool_forms.py`.

What reads waits where what stands here depends on text that has not come, and raises `NoCall` where it is something
else. White space of the forms is matched as it comes.
"""

import ast
import bisect
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ferrum_jax.inputs.params.message import ToolCall
from ferrum_jax.text.structured.forms.tool_forms import ToolForm, spelled
from ferrum_jax.text.structured.reading.text_reader import Marks, NoCall, Reading, TextReader, loads

_BARE = re.compile(r"[^,{}\[\]]+")
_KEY = re.compile(r"[^:,{}\[\]]+")
_CUT_NUMBER = re.compile(r"-?\d+\.")
_DEEPEST = 64
Properties = Mapping[str, Mapping[str, Any]]


def quoted_value(reader: TextReader, at: int, quote: str) -> Reading[tuple[dict[str, Any], int]]:
    """The object that stands here, as {city:<|"|>Oslo<|"|>,days:2}, and where it ends. Raises NoCall."""
    return (yield from _Values(reader, quote).object(at, 0))


class _Values:
    def __init__(self, reader: TextReader, quote: str) -> None:
        self._reader, self._quote = reader, quote
        self._end = Marks([quote])

    def object(self, at: int, depth: int) -> Reading[tuple[dict[str, Any], int]]:
        place, found = (yield from self._after(at, "{")), dict[str, Any]()
        while not (yield from self._stands(place, "}")):
            place = (yield from self._after(place, ",")) if found else place
            key, place = yield from self._key(place)
            found[key], place = yield from self._value((yield from self._after(place, ":")), depth + 1)
        return found, (yield from self._after(place, "}"))

    def _key(self, at: int) -> Reading[tuple[str, int]]:
        at = yield from self._reader.after_space(at)
        if (yield from self._stands(at, self._quote)):
            return (yield from self._text(at))
        key = yield from self._reader.matched(_KEY, at)
        return key.strip(), at + len(key)

    def _value(self, at: int, depth: int) -> Reading[tuple[Any, int]]:
        at = yield from self._reader.after_space(at)
        if depth > _DEEPEST:
            raise NoCall
        if (yield from self._stands(at, self._quote)):
            return (yield from self._text(at))
        if (yield from self._stands(at, "{")):
            return (yield from self.object(at, depth))
        if (yield from self._stands(at, "[")):
            return (yield from self._list(at, depth))
        bare = yield from self._reader.matched(_BARE, at)
        end, bare = at + len(bare), bare.strip()
        try:
            return loads(bare + "0" if _CUT_NUMBER.fullmatch(bare) else bare), end
        except ValueError:
            return bare, end

    def _list(self, at: int, depth: int) -> Reading[tuple[list[Any], int]]:
        place, found = (yield from self._after(at, "[")), list[Any]()
        while not (yield from self._stands(place, "]")):
            place = (yield from self._after(place, ",")) if found else place
            value, place = yield from self._value(place, depth + 1)
            found.append(value)
        return found, (yield from self._after(place, "]"))

    def _text(self, at: int) -> Reading[tuple[str, int]]:
        start = at + len(self._quote)
        end, after = yield from self._reader.find(self._end, start)
        return self._reader.part(start, end), after

    def _after(self, at: int, wanted: str) -> Reading[int]:
        return (yield from self._reader.after((yield from self._reader.after_space(at)), wanted))

    def _stands(self, at: int, wanted: str) -> Reading[bool]:
        at = yield from self._reader.after_space(at)
        if at == len(self._reader):
            raise NoCall
        try:
            return (yield from self._reader.after(at, wanted)) > at
        except NoCall:
            return False


class SpelledValues:
    """Arguments without quotes between marks. Where values end is looked for once, whatever call they are of.

    A value ends at its end mark, which may be missing, or where a line begins like the next argument or like the end of
    the call: a grammar allows no such line in a text.

    failed: places of arguments that are of no call, in whichever they stand.
    """

    def __init__(self, form: ToolForm, reader: TextReader) -> None:
        _, after_key, after_value = form.argument
        self._form, self._reader = form, reader
        self._end = after_value.strip()
        self._stop = Marks((self._end, *form.stop_lines))
        begins = (each.split()[0] for each in spelled(form.begin))  # no key goes on behind the begin of another call
        self._key_end = Marks((after_key.split()[0], *begins))
        self._starts: list[int] = []  # of the stops up to `_looked`, in order
        self._ends: list[int] = []
        self._looked = 0
        self.failed: set[int] = set()

    def argument(self, at: int) -> Reading[tuple[str, str, int]]:
        """The key that stands here, its value and where they end. Raises NoCall."""
        before_key, after_key, after_value = self._form.argument
        reader = self._reader
        at = yield from reader.after(at, before_key)
        stop, _ = yield from reader.find(self._key_end, at)
        start = yield from reader.after(stop, after_key.rstrip())
        end, place = yield from self._stop_from(start)
        value = reader.part(start, end)
        if after_key.endswith("\n"):
            value = value.removeprefix("\n")
        if after_value.startswith("\n"):
            value = value.removesuffix("\n")
        return reader.part(at, stop).strip(), value, place

    def _stop_from(self, at: int) -> Reading[tuple[int, int]]:
        """Where the value that begins here ends, and where the text goes on."""
        while not self._starts or self._starts[-1] < at:
            if (found := self._reader.search(self._stop.pattern, self._looked)) is not None:
                self._looked = found[1]
                self._note(*found)
            else:
                self._looked = max(self._looked, len(self._reader) - self._stop.longest + 1)
                yield from self._reader.more()
        number = bisect.bisect_left(self._starts, at)
        return self._starts[number], self._ends[number]

    def _note(self, place: int, end: int) -> None:
        """An end mark, or what is one if no more than blanks stand before it on its line."""
        if self._reader.part(place, end) != self._end:
            while (before := self._reader.part(place - 1, place)) in (" ", "\t"):
                place -= 1
            if before != "\n":
                return
            place = end = place - 1
        self._starts.append(place)
        self._ends.append(end)


class Found(NamedTuple):
    """A call, and where the text goes on after it."""

    call: ToolCall
    end: int


_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_LOOSE = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?<![\w.])0+(?=[1-9])""", re.DOTALL)
_ID = re.compile(r"[A-Za-z0-9_\-]+")


class CallSyntax:
    """Reads the calls of one form in a text. properties: of the tools that there are, by name."""

    def __init__(self, form: ToolForm, reader: TextReader, properties: Properties) -> None:
        self.form = form
        self._reader, self._properties = reader, properties
        self._values = SpelledValues(form, reader) if form.style == "spelled" else None
        bodies = {"object": self._object, "named": self._named, "spelled": self._spelled, "python": self._python}
        self._body = bodies[form.style]

    def call_at(self, at: int) -> Reading[Found]:
        """The call that stands here. Raises NoCall.

        Where no more text will come, a call that lacks its end mark alone is whole: an end token may have been it.
        """
        reader, form = self._reader, self.form
        start = yield from reader.after((yield from reader.after_space(at)), form.begin)
        found = yield from self._body((yield from reader.after_space(start)))
        if not form.end:
            return found
        end = yield from reader.after_space(found.end)
        return Found(found.call, (yield from reader.after(end, form.end, may_be_cut=True)))

    def _object(self, at: int) -> Reading[Found]:
        end = yield from self._reader.end_of_brackets(at, "{")
        value, form = _loads(self._reader.part(at, end)), self.form
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

    def _named(self, at: int) -> Reading[Found]:
        reader, form = self._reader, self.form
        name = yield from reader.matched(_NAME, at)
        end, call_id = yield from self._call_id(at + len(name), name)
        start = yield from reader.after((yield from reader.after_space(end)), form.middle)
        start = yield from reader.after_space(start)
        if form.quote:
            value, end = yield from quoted_value(reader, start, form.quote)
            return Found(_call(name, value, call_id), end)
        end = yield from reader.end_of_brackets(start, "{")
        value = _loads(reader.part(start, end))
        if value is None:
            raise NoCall
        return Found(_call(name, value, call_id), end)

    def _call_id(self, at: int, name: str) -> Reading[tuple[int, str | None]]:
        """Where the id after a name ends, and the id that users see; where there is none, `at`, and None."""
        form = self.form
        if not form.id_mark:
            return at, None
        try:
            start = yield from self._reader.after(at, form.id_mark)
        except NoCall:
            if form.call_id:
                raise
            return at, None
        found = yield from self._reader.matched(_ID, start)
        return start + len(found), form.call_id.format(name=name, id=found) if form.call_id else found

    def _spelled(self, at: int) -> Reading[Found]:
        """A name, then keys and values between marks, up to the end mark."""
        reader, values = self._reader, self._values
        assert values is not None, "they are of the forms that are spelled"
        name = yield from reader.matched(_NAME, at)
        place = yield from reader.after((yield from reader.after_space(at + len(name))), self.form.middle)
        own = self._properties.get(name, {})
        arguments: dict[str, Any] = {}
        places: list[int] = []
        try:
            while True:
                place = yield from reader.after_space(place)
                if (yield from reader.stands(place, self.form.end)):
                    return Found(_call(name, arguments), place)
                if place in values.failed:
                    raise NoCall
                places.append(place)
                key, value, place = yield from values.argument(place)
                arguments[key] = _typed(value, own.get(key))
        except NoCall:
            values.failed.update(places)
            raise

    def _python(self, at: int) -> Reading[Found]:
        name = yield from self._reader.matched(_NAME, at)
        end = yield from self._reader.end_of_brackets(at + len(name), "(")
        try:
            call = _parsed("f" + self._reader.part(at + len(name), end))
            if not isinstance(call, ast.Call) or call.args:
                raise NoCall
            arguments = {str(each.arg): _python_value(each.value) for each in call.keywords}
            return Found(_call(name, arguments), end)
        except _NOT_PYTHON:
            raise NoCall from None


_NOT_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def _parsed(text: str) -> ast.expr:
    """The expression that a model wrote as Python. Raises one of _NOT_PYTHON."""
    return ast.parse(_LOOSE.sub(_as_python, text), mode="eval").body


def _as_python(loose: re.Match[str]) -> str:
    """Models' loose Python as Python: new lines within texts, zeros before a number."""
    return loose[0].replace("\n", "\\n").replace("\0", "\\0") if loose[0][0] in "\"'" else ""


def _python_value(node: ast.expr) -> Any:
    """A literal, with JSON's names for true, false and null as well. Raises ValueError for anything else."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Set | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): _python_value(value) for key, value in pairs if isinstance(key, ast.Constant)}
    return loads(json.dumps(ast.literal_eval(node)))


def _call(name: str, arguments: object, call_id: str | None = None) -> ToolCall:
    if arguments is not None and not isinstance(arguments, dict):
        raise NoCall
    return ToolCall(name=name, arguments=json.dumps(arguments or {}, ensure_ascii=False), id=call_id)


_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def _typed(value: str, schema: Any) -> Any:
    """An argument that stands without quotes: a text where its schema allows nothing else, else JSON where it is some.

    Where a schema allows texts and more, JSON of the other types is not read as a text. Lists and objects may stand as
    Python writes them, and so may other values where the schema names types without texts.
    """
    kinds, text = _kinds(schema), value.strip()
    if kinds == {"string"}:
        return value
    try:
        found = loads(text)
    except ValueError:
        try:
            found = _python_value(_parsed(text))
        except _NOT_PYTHON:
            return value
        if not isinstance(found, list | dict | None) and (not kinds or "string" in kinds):
            return value
    kind = _TYPES.get(type(found), "null")
    is_allowed = kind in kinds or (kind == "integer" and "number" in kinds)
    return value if "string" in kinds and not is_allowed else found


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names."""
    if not isinstance(schema, dict):
        return set()
    if "enum" in schema or "const" in schema:
        return {_TYPES.get(type(value), "null") for value in schema.get("enum", [schema.get("const")])}
    kinds = schema.get("type", [])
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    return found.union(*(_kinds(each) for key in ("anyOf", "oneOf") for each in schema.get(key, ())))


def _loads(text: str) -> Any:
    """The value of a JSON text; None for any other text."""
    try:
        return loads(text)
    except ValueError:
        return None
