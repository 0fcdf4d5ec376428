"""StructuredOutputsParams: the structure that a generated text must have, under vLLM's names.

Complete and hashable once made: a schema is kept as its JSON text, so that equal wishes are equal, and a grammar is
compiled once for all of them. What only a compiler can refuse (a pattern that does not parse) is refused when the
request is added.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrum_jax.inputs.params.schema import MAX_TEXT, check_schema, number_of, refuse_rounded, subschemas
from ferrum_jax.inputs.params.tools import ToolsAsked
from ferrum_jax.io.error_text import quoted

MOST_BYTES = 1 << 18  # of a schema, a grammar, a regular expression or all choices together
_WHITE_SPACE = re.compile(r"(?:[ \n\r\t()|?*+\[\]]|\\[nrt]|\{[0-9]{0,4}(?:,[0-9]{0,4})?\})*")  # of JSON
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "tools")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one kind of structure, and how its JSON is written.

    json: a JSON schema (an object, its text, or a class with `model_json_schema`), kept as text. json_object: any JSON
    object. regex: the whole text matches it. choice: the text is one of these. grammar: Lark or GBNF.
    structural_tag: vLLM's structures and triggers, as text or object. tools: calls that `tool_choice` demands, in the
    model's own form.
    disable_any_whitespace: JSON without white space between its parts. whitespace_pattern: what may stand there.
    disable_additional_properties: objects of a schema that does not say so have no further properties.

    Raises ValueError with the field, its value, the place inside a schema, and what is allowed.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    tools: ToolsAsked | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            what = f"has {' and '.join(given)}" if given else "asks for nothing"
            raise ValueError(f"structured_outputs {what}; give exactly one of {', '.join(_KINDS[:-1])}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json, closed=self.disable_additional_properties))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _tag_text(self.structural_tag))
        for field in ("regex", "grammar", "whitespace_pattern"):
            _check_text(field, getattr(self, field))
        for field in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, field) is not None and not isinstance(getattr(self, field), bool):
                raise ValueError(
                    f"structured_outputs.{field} is {quoted(getattr(self, field))}; it must be true or false"
                )
        self._check_layout()
        if self.grammar is not None:
            with_schemas(self.grammar, _checked)

    @property
    def kind(self) -> str:
        """Which of the fields says what the structure is."""
        (kind,) = self._given()
        return kind

    @functools.cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about unknown keywords of schemas, which enforce nothing."""
        if self.json is not None:
            return check_schema(json.loads(str(self.json)))
        found: list[str] = []
        for tool in self.tools.tools if self.tools is not None else ():
            found += [f"tool {tool.name}: {each}" for each in check_schema(json.loads(tool.parameters))]
        if self.grammar is not None:
            with_schemas(self.grammar, lambda text: found.extend(check_schema(json.loads(text))) or text)
        return tuple(found)

    def _given(self) -> list[str]:
        """The kinds that are asked for; `false` is a schema, and elsewhere the same as nothing."""
        return [
            kind
            for kind in _KINDS
            if getattr(self, kind) is not None and (kind == "json" or getattr(self, kind) is not False)
        ]

    def _check_layout(self) -> None:
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError(
                "structured_outputs has whitespace_pattern beside disable_any_whitespace; give one of them"
            )
        if self.whitespace_pattern is not None and not _WHITE_SPACE.fullmatch(self.whitespace_pattern):
            raise ValueError(
                f"structured_outputs.whitespace_pattern is {quoted(self.whitespace_pattern)}; it must be made of spaces"
                ", \\n, \\r, \\t, brackets, alternatives and counts: nothing else may stand between the parts of JSON"
            )
        for field in ("whitespace_pattern", "disable_any_whitespace"):
            if getattr(self, field) and self.kind not in ("json", "json_object", "tools"):
                raise ValueError(f"structured_outputs has {field} beside {self.kind}; it is for json and json_object")
        if self.disable_additional_properties and self.json is None:
            raise ValueError(f"structured_outputs has disable_additional_properties beside {self.kind}; it is for json")

    @classmethod
    def from_dict(cls, values: object, field: str = "structured_outputs") -> StructuredOutputsParams:
        """The wishes of a JSON object. Raises ValueError naming every key that is not known."""
        if not isinstance(values, Mapping):
            raise ValueError(f"{field} is {quoted(values)}; it must be an object such as {{'json': {{...}}}}")
        known = {f.name for f in dataclasses.fields(cls)} - {"tools"}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"{field} has unknown keys {quoted(unknown)}; known are {sorted(known)}")
        return cls(**values)


def with_schemas(grammar: str, change: Callable[[str], str]) -> str:
    """A grammar with each JSON schema in it changed. Raises ValueError for one that is no JSON."""
    parts: list[str] = []
    end = 0
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        if found.start() < end:
            continue
        try:
            schema, after = json.JSONDecoder(parse_float=number_of).raw_decode(grammar, found.end())
            refuse_rounded(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.grammar has a %json that is no JSON: {error}") from error
        parts += [grammar[end : found.end()], change(compact(schema))]
        end = after
    return "".join((*parts, grammar[end:]))


def compact(value: object) -> str:
    """JSON text without white space; the order of properties, which a grammar keeps, is as given."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _checked(schema_text: str) -> str:
    """The text of a schema. Raises ValueError for keywords that are not enforced."""
    check_schema(json.loads(schema_text))
    return schema_text


def _schema_text(schema: object, *, closed: bool) -> str:
    if isinstance(schema, type):
        make = getattr(schema, "model_json_schema", None)
        if make is None:
            raise ValueError(
                f"structured_outputs.json is the class {schema.__name__}, which has no model_json_schema()"
            )
        schema = make()
    if isinstance(schema, str):
        _check_size("json", schema)
        try:
            schema = json.loads(schema, parse_float=number_of)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.json is not JSON: {error}") from error
    refuse_rounded(schema)
    try:
        text = compact(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json cannot be written as JSON: {error}") from error
    _check_size("json", text)
    check_schema(schema)
    return _closed(text) if closed else text


def _closed(text: str) -> str:
    """The schema with `additionalProperties: false` in each object that names properties and says nothing of others."""
    schema = json.loads(text)
    for _, part in list(subschemas(schema)):
        if isinstance(part, dict) and "properties" in part:
            part.setdefault("additionalProperties", False)
    return compact(schema)


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise ValueError(f"structured_outputs.choice is {quoted(choices)}; it must be a list with at least one text")
    for index, text in enumerate(choices):
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"structured_outputs.choice[{index}] is {quoted(text)}; it must be a text that is not empty"
            )
        if len(text) > MAX_TEXT:
            what = f"structured_outputs.choice[{index}] has {len(text):,} characters"
            raise ValueError(f"{what}; at most {MAX_TEXT:,} are allowed")
    _check_size("choice", "".join(choices))
    return tuple(choices)


def _tag_text(tag: object) -> str:
    if isinstance(tag, Mapping):
        tag = compact(tag)
    _check_text("structural_tag", tag)
    return tag  # type: ignore[return-value]


def _check_text(field: str, text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str) or (not text and field != "whitespace_pattern"):
        raise ValueError(f"structured_outputs.{field} is {quoted(text)}; it must be a text that is not empty")
    _check_size(field, text)


def _check_size(field: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"structured_outputs.{field} is not text in Unicode; remove lone surrogates") from error
    if size > MOST_BYTES:
        raise ValueError(f"structured_outputs.{field} has {size:,} bytes; at most {MOST_BYTES:,} are allowed")
