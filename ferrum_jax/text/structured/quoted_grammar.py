"""Grammars of the values that `quoted_values.py` reads, by their JSON schema."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ferrum_jax.text.structured.grammar_terms import Terms, described, refuse_bounds, with_commas

# Beside what is written here, these say nothing of what is valid, or are read with their schema.
_READ = {"type", "properties", "required", "items", "minItems", "maxItems", "enum", "const", "anyOf", "oneOf", "$ref"}
_READ |= {"additionalProperties", "$defs", "definitions", "pattern", "format", "minLength", "maxLength", "nullable"}
_NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_ANY_TYPES = ("string", "number", "boolean", "null", "array", "object")


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
