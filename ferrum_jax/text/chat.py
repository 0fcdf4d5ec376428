"""The checkpoint's own chat template: messages in, the text of a prompt out.

A template is a program that came with the weights, so it runs in jinja's sandbox: it can read what it is
given and write text, nothing else. Filters, globals and block rules are those of the field, with which
templates are written. The text is encoded without special tokens: the template writes BOS if it wants one.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ferrum_jax.text.tokenizer import read_json, read_tokenizer_config, special_tokens

Message = Mapping[str, Any]

_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """A compiled template.

    special_tokens: texts by role, which templates see as bos_token, eos_token and so on.
    variables: names that the template reads.
    now: the clock of `strftime_now`; a job that must give the same prompts again passes its own start.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """Raises ValueError if the source is not a template."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self.variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not parse, line {error.lineno}: {error.message}") from error

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate | None:
        """The template of a checkpoint folder (a file of its own, or in tokenizer_config.json); None if none.

        Raises ValueError for one that cannot be read.
        """
        folder = Path(folder)
        folder = folder.parent if folder.is_file() else folder
        tokens = special_tokens(read_tokenizer_config(folder))
        if (folder / "chat_template.jinja").is_file():
            return cls((folder / "chat_template.jinja").read_text(encoding="utf-8"), tokens)
        for name in ("chat_template.json", "tokenizer_config.json"):
            source = read_json(folder / name).get("chat_template")
            if source:
                return cls(_default_of(source, folder / name), tokens)
        return None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt's text. template_kwargs: further variables of this template, such as enable_thinking.

        Raises ValueError for messages that are no messages and for what the template itself refuses.
        """
        variables = {
            **self._special_tokens,
            **template_kwargs,
            "messages": [_message(index, message) for index, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
        }
        if not variables["messages"]:
            raise ValueError("a chat needs at least one message; messages is empty")
        try:
            return self._template.render(variables)
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error


def require_chat_template(template: ChatTemplate | None, source: str | Path) -> ChatTemplate:
    """The template, or ValueError that says what to do without one. source: the checkpoint's folder."""
    if template is None:
        raise ValueError(f"{source} has no chat template: give a prompt as text instead of messages")
    return template


def _message(index: int, message: Message) -> dict[str, Any]:
    """The message with its content as text, where it came as a list of text parts."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{index}] is {message!r}; it must be an object with a role and a content")
    content = message.get("content")
    if isinstance(content, str) or (content is None and len(message) > 1):
        return dict(message)
    if not isinstance(content, list | tuple):
        raise ValueError(f"messages[{index}].content is {content!r}; it must be a string or a list of text parts")
    return {**message, "content": "\n".join(_part(index, part) for part in content)}


def _part(index: int, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise ValueError(
        f'messages[{index}].content holds {part!r}; only parts {{"type": "text", "text": ...}} are supported'
    )


def _default_of(source: object, path: Path) -> str:
    if isinstance(source, str):
        return source
    entries = [entry for entry in source if isinstance(entry, Mapping)] if isinstance(source, list) else []
    named = {str(entry.get("name")): entry.get("template") for entry in entries}
    default = named.get("default")
    if not isinstance(default, str):
        raise ValueError(f"{path} names the chat templates {sorted(named)}; one of them must be 'default', and a text")
    return default


def _tojson(value: object, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """JSON as templates of the field expect it: plain text, not escaped for HTML as jinja's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what an assistant said, for training; here it is only text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
