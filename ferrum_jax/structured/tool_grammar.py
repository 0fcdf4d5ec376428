"""The grammar of tool calls that must come, in a model's own form, as Lark text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ferrum_jax.structured.asked.tools import Tool, ToolsAsked
from ferrum_jax.structured.tool_forms import ToolForm

_LAZY_TEXT = r"/(.|\n)*"  # ends where the text after it first comes


def tool_calls_grammar(
    asked: ToolsAsked, form: ToolForm | None, options: Mapping[str, Any], specials: Mapping[str, int]
) -> str:
    """Lark text. options: how JSON is written. specials: the tokenizer's special tokens, which are no text.

    Raises ValueError for a model whose form of calls is not known.
    """
    if form is None:
        raise ValueError(
            "tool_choice demands a call, and this model's chat template shows no form of calls that is known; ask for "
            "JSON with response_format, or leave the choice to the model"
        )
    writer = _CallRules(form, options, specials)
    rules = [rule for number, tool in enumerate(asked.tools) for rule in writer.rules(number, tool)]
    call = " | ".join(f"call_{number}" for number in range(len(asked.tools)))
    more = f" ({writer.text(form.between)} call)*" if asked.parallel else ""
    start = f"start: {writer.text(form.opening)} call{more} {writer.text(form.closing)}"
    return "\n".join([start, f"call: {call}", *rules]) + "\n"


class _CallRules:
    """Writes the rules of one form."""

    def __init__(self, form: ToolForm, options: Mapping[str, Any], specials: Mapping[str, int]) -> None:
        self._form = form
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

    def rules(self, number: int, tool: Tool) -> Iterator[str]:
        """Those of one tool's calls; the first is `call_{number}`."""
        form, schema = self._form, json.loads(tool.parameters)
        if form.style in ("object", "named"):
            before, middle, after = self._around(tool.name)
            yield f"call_{number}: {self.text(before + tool.name + middle)} args_{number} {self.text(after)}"
            yield f"args_{number}: {self._json(schema)}"
            return
        yield from self._spelled(number, tool.name, schema)

    def _around(self, name: str) -> tuple[str, str, str]:
        """What stands before a call's name, between it and its arguments, and after them."""
        form = self._form
        if form.style == "named":
            # An end token that closes a call is drawn as such.
            return form.begin, form.middle, "" if form.name == "harmony" else form.end
        return f'{form.begin}{{"name": "', f'", "{form.arguments_key}": ', f"}}{form.end}"

    def _spelled(self, number: int, name: str, schema: dict[str, Any]) -> Iterator[str]:
        """The rules of a call whose arguments stand one by one, in the order of the schema."""
        form, shared = self._form, {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        head, foot = {
            "parameters": (f"{form.begin}<function={name}>\n", f"</function>{form.end}"),
            "pairs": (f"{form.begin}{name}\n", form.end),
            "python": (f"{form.begin}{name}(", f"){form.end}"),
        }[form.style]
        terms: list[str] = []
        required = set(schema.get("required", ()))
        properties = schema.get("properties", {})
        missing = sorted(required - set(properties))
        if missing:
            raise ValueError(f"the tool {name} requires {missing}, which its properties do not have; describe them")
        for place, (key, value) in enumerate(properties.items()):
            rule = f"arg_{number}_{place}"
            yield from self._argument(rule, key, shared | value if isinstance(value, dict) else value)
            terms.append(rule if key in required else f"{rule}?")
        if form.style == "python":
            yield from _with_commas(f"list_{number}", terms)
            terms = [f"list_{number}"]
        yield f"call_{number}: {self.text(head)} {' '.join(terms)} {self.text(foot)}"

    def _argument(self, rule: str, key: str, schema: Any) -> Iterator[str]:
        """One argument with its key."""
        style, is_text = self._form.style, is_plain_text(schema)
        if style == "python":
            yield f"{rule}: {json.dumps(key + '=', ensure_ascii=False)} {rule}_value"
            python = '"True" | "False"' if isinstance(schema, dict) and schema.get("type") == "boolean" else None
            yield f"{rule}_value: {python or self._json(schema)}"
            return
        before, after = {
            "parameters": (f"<parameter={key}>\n", "\n</parameter>\n"),
            "pairs": (f"<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
        }[style]
        if is_text:
            _refuse_bounds(key, schema)
            ending = after.rstrip("\n")
            yield f"{rule}: {self.text(before)} {rule}_text {self.text(after[len(ending) :])}"
            yield f"{rule}_text[lazy]: {_LAZY_TEXT}{_in_regex(ending)}/"
        else:
            yield f"{rule}: {self.text(before)} {rule}_value {self.text(after)}"
            yield f"{rule}_value: {self._unquoted(schema)}"

    def _unquoted(self, schema: Any) -> str:
        """A value that stands as JSON, but for texts out of a list, which stand without quotes."""
        values = (
            schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, dict) else None
        )
        if values and all(isinstance(value, str) and value for value in values):
            return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
        return self._json(schema)

    def _json(self, schema: Any) -> str:
        options = {"x-guidance": self._options} if self._options else {}
        return f"%json {json.dumps({**schema, **options} if isinstance(schema, dict) else schema, ensure_ascii=False)}"


def is_plain_text(schema: Any) -> bool:
    """Whether an argument is a text, which stands without quotes in forms that spell arguments one by one."""
    return isinstance(schema, dict) and schema.get("type") == "string" and not {"enum", "const"} & schema.keys()


def _refuse_bounds(key: str, schema: dict[str, Any]) -> None:
    """Raises ValueError for keywords that a text without quotes cannot be held to."""
    bounds = sorted({"pattern", "format", "minLength", "maxLength"} & schema.keys())
    if bounds:
        raise ValueError(
            f"the argument {key} has {' and '.join(bounds)}, and this model writes texts without quotes, where that "
            "cannot be enforced; leave it out, or list the texts with enum"
        )


def _with_commas(rule: str, terms: list[str]) -> Iterator[str]:
    """Rules of terms in order, those with `?` optional, with ", " between those that come."""
    if not terms:
        yield f'{rule}: ""'
    for place, term in enumerate(terms):
        name = rule if place == 0 else f"{rule}_{place}"
        rest = f"{rule}_{place + 1}" if place + 1 < len(terms) else '""'
        after = f"{rule}_after_{place + 1}" if place + 1 < len(terms) else '""'
        yield f"{name}: {term.rstrip('?')} {after}" + (f" | {rest}" if term.endswith("?") else "")
        if place:
            yield f'{rule}_after_{place}: ", " {term.rstrip("?")} {after}' + (
                f" | {after}" if term.endswith("?") else ""
            )


def _in_regex(text: str) -> str:
    """A text within a regular expression between slashes."""
    return re.sub(r"([^A-Za-z0-9_<>=\n ])", r"\\\1", text).replace("\n", r"\n")
