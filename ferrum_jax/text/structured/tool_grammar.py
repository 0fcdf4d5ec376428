"""The grammar of tool calls that must come, in a model's own form, as Lark text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ferrum_jax.inputs.params.tools import Tool, ToolsAsked
from ferrum_jax.text.structured.forms.tool_forms import ToolForm, written
from ferrum_jax.text.structured.grammar_terms import Terms, described, is_plain_text, refuse_bounds, with_commas
from ferrum_jax.text.structured.quoted_grammar import QuotedRules

_NUMBER = "/0|[1-9][0-9]{0,2}/"  # of a call


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
