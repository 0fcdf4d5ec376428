"""Terms of grammars in Lark: texts with special tokens in them, JSON, texts up to a mark, and lists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ferrum_jax.text.structured.compiled_schema import compiled_schema


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
