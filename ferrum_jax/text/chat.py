"""The checkpoint's own chat template: messages in, the text of a prompt out.

A template is a program that came with the weights, so it runs in jinja's sandbox: it can read what it is
given and write text, nothing else. Filters, globals and block rules are the usual ones, for which templates are
written. The text is encoded without special tokens, because the template writes BOS if it wants one.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from ferrum_jax.files.json_files import read_optional_json
from ferrum_jax.prompt import Message, joined_text
from ferrum_jax.spec.identity import digest_of
from ferrum_jax.text.template_limits import BoundedEnvironment, TemplateTooCostly, bounded
from ferrum_jax.text.template_messages import TemplateMessages
from ferrum_jax.text.tokenizer import read_tokenizer_config, special_tokens

_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,  # RecursionError among others
    MemoryError,
)

_LONGEST_SOURCE = 1 << 18  # characters
_LONGEST_DATE, _LONGEST_ERROR = 100, 1000


_MARK = "\ue000end of the last message\ue000\t "  # the white space at its end shows whether a template strips messages


class ChatTemplate:
    """A compiled template.

    special_tokens: texts by role, which templates see as bos_token, eos_token and so on.
    variables: names that the template reads.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, tool_use: str | None = None
    ) -> None:
        """Raises ValueError if the source is not a template. tool_use: of the template that chats with tools take."""
        self.source = source
        self._tool_use = None if tool_use is None else ChatTemplate(tool_use, special_tokens)
        self._special_tokens = dict(special_tokens or {})
        if len(source) > _LONGEST_SOURCE:
            raise ValueError(f"the chat template has {len(source):,} characters; {_LONGEST_SOURCE:,} are allowed")
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.add_filter("tojson", _tojson)
        environment.globals["raise_exception"] = _refuse
        try:
            self.variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            what = _shortened(error.message or "")
            raise ValueError(f"the chat template does not parse, line {error.lineno}: {what}") from error
        except (*_TEMPLATE_ERRORS, SyntaxError) as error:  # nested beyond what Python compiles
            raise ValueError(f"the chat template cannot be compiled: {_shortened(str(error))}") from error
        self.writes_calls = "tool_calls" in source
        self._messages = TemplateMessages(self._probed, writes_calls=self.writes_calls)

    @property
    def digest(self) -> str:
        """The digest of everything that decides what it renders, besides its arguments."""
        return digest_of(
            self.source, self._special_tokens, *([] if self._tool_use is None else [self._tool_use.source])
        )

    def with_tools(self) -> ChatTemplate:
        """The template of chats with tools."""
        return self._tool_use or self

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate | None:
        """The template of a checkpoint folder (a file of its own, or in tokenizer_config.json); None if none.

        Raises ValueError for one that cannot be read.
        """
        folder = Path(folder)
        folder = folder.parent if folder.is_file() else folder
        named: dict[str, object] = {}
        for name in ("tokenizer_config.json", "chat_template.json"):
            named = _by_name(read_optional_json(folder / name).get("chat_template")) or named
        paths = {
            "default": folder / "chat_template.jinja",
            "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
        }
        named = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()} or named
        if not named:
            return None
        default, tool_use = named.get("default"), named.get("tool_use")
        if not isinstance(default, str) or not isinstance(tool_use, str | None):
            raise ValueError(
                f"{folder} names the chat templates {sorted(named)}; one of them must be 'default', and a text"
            )
        return cls(default, special_tokens(read_tokenizer_config(folder)), tool_use=tool_use)

    def render(
        self,
        messages: Sequence[Message],
        now: datetime.datetime | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt's text. template_kwargs: further variables of this template, such as enable_thinking.

        now: the time that `strftime_now` gives; None reads the clock.
        Raises ValueError for values that are not messages and for what the template itself refuses.
        """
        moment = now or datetime.datetime.now()
        variables = {
            **self._special_tokens,
            **template_kwargs,
            "strftime_now": lambda form: _date(moment, form),
            "messages": self._messages.readable(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
        }
        if not variables["messages"]:
            raise ValueError("a chat needs at least one message; messages is empty")
        return self._rendered(variables)

    def _probed(self, messages: Sequence[Message]) -> str:
        """Messages as they are, without a user's arguments."""
        moment = datetime.datetime.min
        variables = {**self._special_tokens, "strftime_now": lambda form: _date(moment, form), "messages": messages}
        return self._rendered({**variables, "add_generation_prompt": False, "tools": None})

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        try:
            return bounded(lambda: self._template.render(variables))
        except TemplateTooCostly as error:
            raise ValueError(f"the chat template was stopped: {error}") from error
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template refuses these messages: {_shortened(str(error))}") from error

    def render_open(
        self, messages: Sequence[Message], now: datetime.datetime | None = None, /, **arguments: Any
    ) -> str:
        """The prompt's text up to the end of the last message's content, for an answer that continues it.

        White space at the end is kept if the template keeps it. Raises ValueError as `render` does, and if the last
        message has no text or the template does not write it unchanged.
        """
        content = joined_text(messages[-1].get("content")) if messages else None
        if content is None:
            raise ValueError("continue_final_message needs a last message with a text that goes on")
        last = {**messages[-1], "content": content + _MARK}
        text = self.render([*messages[:-1], last], now, add_generation_prompt=False, **arguments)
        before, mark, _ = text.partition(_MARK.strip())
        if not mark or text.count(mark) > 1:
            raise ValueError(
                "continue_final_message: the chat template does not write the last message as it is; end with a "
                "message that it does, or give the text as a prompt"
            )
        trims = _MARK not in text
        return before.removesuffix(content[len(content.rstrip()) :]) if trims and content.strip() else before


def require_chat_template(template: ChatTemplate | None, source: str | Path) -> ChatTemplate:
    """The template, or ValueError that says what to do without one. source: the checkpoint's folder."""
    if template is None:
        raise ValueError(f"{source} has no chat template: give a prompt as text instead of messages")
    return template


def _by_name(source: object) -> dict[str, object]:
    """The templates of a configuration: one text, or a list of names and texts."""
    if isinstance(source, str):
        return {"default": source} if source else {}
    entries = [entry for entry in source if isinstance(entry, Mapping)] if isinstance(source, list) else []
    return {str(entry.get("name")): entry.get("template") for entry in entries}


def _tojson(value: object, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """JSON as published templates expect it: plain text, not escaped for HTML as jinja's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _date(now: datetime.datetime, form: str) -> str:
    if len(form) > _LONGEST_DATE or any(character.isdecimal() for character in form):  # digits after % are widths
        raise jinja2.TemplateError(f"the form of a date is {form[:_LONGEST_DATE]!r}")
    return now.strftime(form)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}.."


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what an assistant said, for training; here it is only text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
