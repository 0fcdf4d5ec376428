"""The grammar of tool calls that must come, in a model's own form, as Lark text."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ferrum_jax.inputs.params.tools import Tool, ToolsAsked
from ferrum_jax.text.structured.compiled_schema import compiled_schema
from ferrum_jax.text.structured.forms.tool_forms import ToolForm, written

# Beside what is written here, these say nothing of what is valid, or are read with their schema.
_READ = {"type", "properties", "required", "items", "minItems", "maxItems", "enum", "const", "anyOf", "oneOf", "$ref"}
_NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_ANY_TYPES = ("string", "number", "boolean", "null", "array", "object")
_NUMBER = "/0|[1-9][0-9]{0,2}/"  # of a call


class Terms:
    """options: how JSON is written. specials: the tokenizer's special tokens, which are no text."""

    def __init__(self, options: Mapping[str, Any], specials: Mapping[str, int]) -> None:
        self._options = dict(options)
        self._specials = specials
        names = sorted(map(re.escape, specials), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(names)})") if names else None

    def text(self, text: str) -> str:
        """A text as terms of a rule: literals, and special tokens by their ids."""
        parts = self._special.split(text) if self._special else [text]
        return " ".join(
            f"<[{self._specials[part]}]>" if part in self._specials else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def json(self, schema: Any) -> str:
        """A value of the schema."""
        options = {"x-guidance": self._options} if self._options else {}
        schema = json.loads(compiled_schema(json.dumps(schema, ensure_ascii=False)))
        return f"%json {json.dumps({**schema, **options} if isinstance(schema, dict) else schema, ensure_ascii=False)}"

    def text_until(self, rule: str, mark: str, no_lines: Sequence[str] = ()) -> Iterator[str]:
        """The rules of any text and the mark at which it ends. no_lines: how no line of it may begin."""
        lines = "|".join(map(_in_regex, no_lines))
        without = rf" & ~/(.|\n)*\n[ \t]*({lines})(.|\n)*/" if lines else ""
        word = rule.upper()
        if mark in self._specials:  # no text has it, so the text need not look for its end
            yield f"{rule}: {word} {self.text(mark)}"
            yield rf"{word}: /(.|\n)*/{without}"
        else:
            yield f"{rule}[lazy]: {word}"
            yield rf"{word}: /(.|\n)*{_in_regex(mark)}/{without}"


def _in_regex(text: str) -> str:
    """A text within a regular expression between slashes."""
    return re.sub(r"([^A-Za-z0-9_<>=\n ])", r"\\\1", text).replace("\n", r"\n")


def with_commas(rule: str, terms: Sequence[str], comma: str) -> Iterator[str]:
    """Rules of terms in order, those with `?` optional, with the comma between those that come."""
    if not terms:
        yield f'{rule}: ""'
    for place, term in enumerate(terms):
        name = rule if place == 0 else f"{rule}_{place}"
        rest = f"{rule}_{place + 1}" if place + 1 < len(terms) else '""'
        after = f"{rule}_after_{place + 1}" if place + 1 < len(terms) else '""'
        yield f"{name}: {term.rstrip('?')} {after}" + (f" | {rest}" if term.endswith("?") else "")
        if place:
            yield f'{rule}_after_{place}: "{comma}" {term.rstrip("?")} {after}' + (
                f" | {after}" if term.endswith("?") else ""
            )


def described(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of an object. Raises ValueError where it requires others."""
    properties = schema.get("properties", {})
    missing = sorted(set(schema.get("required", ())) - set(properties))
    if missing:
        raise ValueError(f"the tool {name} requires {missing}, which its properties do not have; describe them")
    return properties


def is_plain_text(schema: Any) -> bool:
    """Whether an argument is a text, which stands without quotes in forms that spell arguments one by one."""
    return isinstance(schema, dict) and schema.get("type") == "string" and not {"enum", "const"} & schema.keys()


def refuse_bounds(key: str, schema: Mapping[str, Any]) -> None:
    """Raises ValueError for keywords that a text without quotes cannot be held to."""
    bounds = sorted({"pattern", "format", "minLength", "maxLength"} & schema.keys())
    if bounds:
        raise ValueError(
            f"the argument {key} has {' and '.join(bounds)}, and this model writes texts without quotes, where that "
            "cannot be enforced; leave it out, or list the texts with enum"
        )


_READ |= {"additionalProperties", "$defs", "definitions", "pattern", "format", "minLength", "maxLength", "nullable"}


class QuotedRules:
    """The rules of one tool's arguments; the first is `rule`, and all others begin with its name."""

    def __init__(self, terms: Terms, quote: str, rule: str, tool: str) -> None:
        self._terms, self._quote, self._rule, self._tool = terms, quote, rule, tool
        self._definitions: dict[str, Any] = {}
        self._named: dict[str, str] = {}  # rules of definitions, by their place
        self._numbers = itertools.count()

    def rules(self, schema: Mapping[str, Any]) -> Iterator[str]:
        """Raises ValueError naming what such a call cannot be held to."""
        self._definitions = {
            f"#/{key}/{name}": each for key in ("$defs", "definitions") for name, each in schema.get(key, {}).items()
        }
        yield f"{self._rule}_any: {self._any()}"
        yield from self._terms.text_until(f"{self._rule}_rest", self._quote)
        yield f"{self._rule}_string: {self._terms.text(self._quote)} {self._rule}_rest"
        yield f"{self._rule}_key: /[A-Za-z_][A-Za-z0-9_.\\-]*/"
        yield from self._value(self._rule, dict(schema) | {"type": "object"})

    def _any(self) -> str:
        rule = self._rule
        scalars = f"{rule}_string | {self._terms.json({'type': ['number', 'boolean', 'null']})}"
        pairs = f'{rule}_key ":" {rule}_any ("," {rule}_key ":" {rule}_any)*'
        return f'{scalars} | "[" ({rule}_any ("," {rule}_any)*)? "]" | "{{" ({pairs})? "}}"'

    def _value(self, rule: str, schema: Any) -> Iterator[str]:
        """The rules of one value; `rule` is the last."""
        if schema is True or schema == {}:
            yield f"{rule}: {self._rule}_any"
            return
        unknown = sorted(schema.keys() - _READ - _NOTES - _NUMBERS) if isinstance(schema, dict) else [str(schema)]
        if unknown:
            raise ValueError(
                f"the parameters of the tool {self._tool} have {', '.join(unknown)}, which a call in this model's form "
                "cannot be held to; leave it out, or leave the choice to the model"
            )
        if "$ref" in schema:
            yield from self._reference(rule, schema["$ref"])
        elif "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            yield f"{rule}: {' | '.join(self._terms.text(self._written(value)) for value in values)}"
        elif "anyOf" in schema or "oneOf" in schema:
            yield from self._alternatives(rule, schema.get("anyOf") or schema["oneOf"])
        else:
            yield from self._of_type(rule, schema)

    def _of_type(self, rule: str, schema: dict[str, Any]) -> Iterator[str]:
        kind = schema.get("type", _ANY_TYPES if not _READ & schema.keys() else "object")
        if not isinstance(kind, str):
            yield from self._alternatives(rule, [{**schema, "type": each} for each in kind])
        elif kind == "object":
            yield from self._object(rule, schema)
        elif kind == "array":
            yield from self._list(rule, schema)
        elif kind == "string":
            refuse_bounds(rule, schema)
            yield f"{rule}: {self._rule}_string"
        else:
            yield f"{rule}: {self._terms.json({key: schema[key] for key in _NUMBERS & schema.keys()} | {'type': kind})}"

    def _object(self, rule: str, schema: dict[str, Any]) -> Iterator[str]:
        required, terms = set(schema.get("required", ())), list[str]()
        if "properties" not in schema and schema.get("additionalProperties", True) is not False:
            other = self._next()
            yield from self._value(other, schema.get("additionalProperties", True))
            pair = f'{self._rule}_key ":" {other}'
            yield f'{rule}: "{{" ({pair} ("," {pair})*)? "}}"'
            return
        for key, value in described(self._tool, schema).items():
            each = self._next()
            yield from self._value(f"{each}_value", value)
            yield f"{each}: {self._terms.text(key + ':')} {each}_value"
            terms.append(each if key in required else f"{each}?")
        listed = self._next()
        yield from with_commas(listed, terms, ",")
        yield f'{rule}: "{{" {listed} "}}"'

    def _list(self, rule: str, schema: dict[str, Any]) -> Iterator[str]:
        item = self._next()
        yield from self._value(item, schema.get("items", True))
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            yield f'{rule}: "[" "]"'
            return
        more = f"{{{max(0, fewest - 1)},{'' if most is None else most - 1}}}"
        items = f"{item} {item}_more{more}"
        yield f'{item}_more: "," {item}'
        yield f'{rule}: "[" {items if fewest else f"({items})?"} "]"'

    def _alternatives(self, rule: str, schemas: list[Any]) -> Iterator[str]:
        names = [self._next() for _ in schemas]
        for name, schema in zip(names, schemas, strict=True):
            yield from self._value(name, schema)
        yield f"{rule}: {' | '.join(names)}"

    def _reference(self, rule: str, place: str) -> Iterator[str]:
        if place not in self._definitions:
            raise ValueError(f"the parameters of the tool {self._tool} name {place}, which is not among their $defs")
        if place not in self._named:
            self._named[place] = self._next()
            yield from self._value(self._named[place], self._definitions[place])
        yield f"{rule}: {self._named[place]}"

    def _next(self) -> str:
        return f"{self._rule}_{next(self._numbers)}"

    def _written(self, value: Any) -> str:
        """A value as these forms write it."""
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self._written(each)}' for key, each in value.items())}}}"
        return json.dumps(value)


def tool_calls_grammar(
    asked: ToolsAsked, form: ToolForm | None, options: Mapping[str, Any], specials: Mapping[str, int]
) -> str:
    """Lark text. options: how JSON is written. specials: the tokenizer's special tokens, which are no text.

    Raises ValueError for a model whose form of calls is not known.
    """
    if form is None:
        raise ValueError(
            "tool_choice demands a call, and this model's chat template shows no form of calls that is known; name one "
            "with --tool-form, ask for JSON with response_format, or leave the choice to the model"
        )
    writer = _CallRules(form, options, specials)
    rules = [rule for number, tool in enumerate(asked.tools) for rule in writer.rules(number, tool)]
    call = " | ".join(f"call_{number}" for number in range(len(asked.tools)))
    more = f" ({writer.text(written(form.between))} call)*" if asked.parallel else ""
    start = f"start: {writer.text(written(form.opening))} call{more} {writer.text(written(form.closing))}"
    return "\n".join([start, f"call: {call}", *rules]) + "\n"


class _CallRules:
    """Writes the rules of one form."""

    def __init__(self, form: ToolForm, options: Mapping[str, Any], specials: Mapping[str, int]) -> None:
        self._form = form
        self._terms = Terms(options, specials)
        self.text = self._terms.text

    def rules(self, number: int, tool: Tool) -> Iterator[str]:
        """The rules of one tool's calls; the first is `call_{number}`."""
        form, schema = self._form, json.loads(tool.parameters)
        if form.style == "object" or (form.style == "named" and not form.quote):
            before, after = self._around(tool.name)
            yield f"call_{number}: {before} args_{number} {self.text(after)}"
            yield f"args_{number}: {self._terms.json(schema)}"
        elif form.quote:
            head = self.text(written(form.begin) + tool.name + written(form.middle))
            yield f"call_{number}: {head} args_{number} {self.text(written(form.end))}"
            yield from QuotedRules(self._terms, form.quote, f"args_{number}", tool.name).rules(schema)
        else:
            yield from self._spelled(number, tool.name, schema)

    def _around(self, name: str) -> tuple[str, str]:
        """The terms before a call's arguments, and the text after them."""
        form = self._form
        begin, middle, end = written(form.begin), written(form.middle), written(form.end)
        if form.style == "named" and form.call_id:
            return f"{self.text(begin + name + form.id_mark)} {_NUMBER} {self.text(middle)}", end
        if form.style == "named":
            return self.text(begin + name + middle), end
        head = f'"{form.name_key}": "{name}", "{form.arguments_key}": '
        if form.id_key:
            before, after = f'{begin}{{"{form.id_key}": "', f'", {head}'
            return f"{self.text(before)} {_NUMBER} {self.text(after)}", "}" + end
        return self.text(begin + "{" + head), "}" + end

    def _spelled(self, number: int, name: str, schema: dict[str, Any]) -> Iterator[str]:
        """The rules of a call whose arguments stand one by one, in the order of the schema."""
        form, shared = self._form, {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        begin, end = written(form.begin), written(form.end)
        head, foot = (f"{begin}{name}(", f"){end}") if form.style == "python" else (begin + name, end)
        head += written(form.middle)
        terms: list[str] = []
        required = set(schema.get("required", ()))
        properties = described(name, schema)
        for place, (key, value) in enumerate(properties.items()):
            rule = f"arg_{number}_{place}"
            yield from self._argument(rule, key, shared | value if isinstance(value, dict) else value)
            terms.append(rule if key in required else f"{rule}?")
        if form.style == "python":
            yield from with_commas(f"list_{number}", terms, ", ")
            terms = [f"list_{number}"]
        yield f"call_{number}: {self.text(head)} {' '.join(terms)} {self.text(foot)}"

    def _argument(self, rule: str, key: str, schema: Any) -> Iterator[str]:
        """One argument with its key."""
        form = self._form
        if form.style == "python":
            yield f"{rule}: {json.dumps(key + '=', ensure_ascii=False)} {rule}_value"
            python = '"True" | "False"' if isinstance(schema, dict) and schema.get("type") == "boolean" else None
            yield f"{rule}_value: {python or self._terms.json(schema)}"
            return
        before_key, before_value, after_value = form.argument
        before = before_key + key + before_value
        if is_plain_text(schema):
            refuse_bounds(key, schema)
            ending = after_value.rstrip("\n")
            yield f"{rule}: {self.text(before)} {rule}_text {self.text(after_value[len(ending) :])}"
            yield from self._terms.text_until(f"{rule}_text", ending, form.stop_lines)
        else:
            yield f"{rule}: {self.text(before)} {rule}_value {self.text(after_value)}"
            yield f"{rule}_value: {self._unquoted(schema)}"

    def _unquoted(self, schema: Any) -> str:
        """A value that stands as JSON, but for texts out of a list, which stand without quotes."""
        values = (
            schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, dict) else None
        )
        if values and all(isinstance(value, str) and value for value in values):
            return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
        return self._terms.json(schema)
