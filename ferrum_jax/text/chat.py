"""The checkpoint's own chat template: messages in, the text of a prompt out.

A template is a program that came with the weights, so it runs in jinja's sandbox: it can read what it is
given and write text, nothing else. Filters, globals and block rules are the usual ones, for which templates are
written. The text is encoded without special tokens, because the template writes BOS if it wants one.

What a template reads is found out by rendering messages of our own. It may take contents as texts, as lists of parts,
or both; arguments of calls as objects or as text; and it may write calls only where the content is none. What it takes
as it came stays, and nothing is left out without a word.
Source: vLLM and SGLang look into the template likewise; both join texts for templates that take no parts, vLLM by a new
line, as here.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from ferrum_jax.inputs.identity import digest_of
from ferrum_jax.inputs.prompt import Message, joined_text, media_of_part
from ferrum_jax.io.files.json_files import read_optional_json
from ferrum_jax.text.template_limits import BoundedEnvironment, TemplateTooCostly, bounded
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
_NAME, _KEY, _VALUE, _TEXT = "probe_name", "probe_key", "probe_value", "probe_text"
_ARGUMENTS = json.dumps({_KEY: _VALUE})
_MAX_KEPT = 64  # of what was found out; roles are a user's words
_ASKED = {"role": "user", "content": "a"}
_AS_IT_IS = re.compile(rf"""["']type["']\s*:\s*["']text["']|\{{'{_KEY}'""")  # a part or an object, written by Python


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
        """The template of a checkpoint folder (a file of its own, or in tokenizer_config.json), or None.

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


class TemplateMessages:
    """Makes messages readable for one template.

    render: of messages to a text; raises ValueError. writes_calls: whether the template reads calls at all.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str], *, writes_calls: bool) -> None:
        self._render, self._writes_calls = render, writes_calls
        self._takes = functools.lru_cache(_MAX_KEPT)(self._look_at_content)
        self._calls = functools.lru_cache(_MAX_KEPT)(self._look_at_calls)

    def readable(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages. Raises ValueError for what is none."""
        return [each for index, message in enumerate(messages) for each in self._readable(index, message)]

    def _readable(self, index: int, message: Message) -> list[dict[str, Any]]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] is {message!r}; it must be an object with a role and a content")
        found = {name: value for name, value in message.items() if name != "tool_calls" or value}
        thought = message.get("reasoning") or message.get("reasoning_content")
        if thought and isinstance(thought, str):  # under both names that templates read
            alone = not (message.get("content") and message.get("tool_calls"))  # gpt-oss takes no text beside both
            found |= {"reasoning_content": thought} | ({"thinking": thought} if alone else {})
        if found["role"] == "developer" and not self._writes("developer") and self._writes("system"):
            found["role"] = "system"  # what that role was called before
        found["content"] = self._content(index, found)
        calls = found.get("tool_calls")
        if self._writes_calls and isinstance(calls, list | tuple) and all(map(_has_function, calls)):
            return self._with_calls(found)
        return [found]

    def _content(self, index: int, message: Mapping[str, Any]) -> Any:
        content, role = message.get("content"), message["role"]
        if content is None and len(message) > 1:
            return None if message.get("tool_calls") else ""
        if isinstance(content, str):
            takes_parts_alone = not self._takes(role, False) and self._takes(role, True)
            return [{"type": "text", "text": content}] if takes_parts_alone else content
        if not isinstance(content, list | tuple):
            raise ValueError(f"messages[{index}].content is {content!r}; it must be a string or a list of text parts")
        has_media = any(map(media_of_part, content))
        parts = [
            {"type": noun} if (noun := media_of_part(part)) else {"type": "text", "text": _text(index, part)}
            for part in content
        ]
        # Results of tools are texts in most templates, whatever else these take.
        prefers_text = role == "tool" and self._takes(role, False)
        return parts if has_media or (parts and not prefers_text and self._takes(role, True)) else joined_text(parts)

    def _with_calls(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The message with its calls as the template reads them, its text as one before where it takes none beside."""
        spoken, content, before = bool(message["content"]), message["content"], []
        empty = next((each for each in (None if spoken else content, None, "") if self._calls(each)), "")
        if spoken and self._calls(_TEXT) is None and self._calls(empty, _TEXT):
            before = [{name: value for name, value in message.items() if name != "tool_calls"}]
        if before or not spoken:
            message = {**message, "content": empty}
        kind = (spoken and not before and self._calls(_TEXT)) or self._calls(empty)
        calls = [_with_arguments(call, kind == "text") for call in message["tool_calls"]]
        return [*before, {**message, "tool_calls": calls}]

    def _writes(self, role: str) -> bool:
        return self._takes(role, False) or self._takes(role, True)

    def _look_at_content(self, role: str, as_parts: bool) -> bool:
        """Whether the template writes a message's text, of a list of parts or of one text."""
        texts = ["probe_one", "probe_two"]
        parts = [{"type": "text", "text": text} for text in texts]
        probe = {"role": role, "content": parts if as_parts else " ".join(texts)}
        around = {"user": [probe], "assistant": [_ASKED, probe], "tool": [_ASKED, probe]}
        written = self._written(around.get(role, [probe, _ASKED]))
        return all(text in written for text in texts) and not _AS_IT_IS.search(written)

    def _look_at_calls(self, content: str | None, before: str = "") -> str | None:
        """How the template writes arguments of calls beside this content: "object", "text", or None for no calls.

        before: a text that the assistant says in a message of its own, in a chat that goes on.
        """
        beside = self._content(0, {"role": "assistant", "content": content}) if content else content
        nones = self._written([_ASKED]).count("None")
        for kind, arguments in (("object", {_KEY: _VALUE}), ("text", _ARGUMENTS)):
            call = {"id": "probe0001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
            said = {"role": "assistant", "content": beside, "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": "probe0001", "name": "other", "content": "b"}
            first = [_ASKED, {"role": "assistant", "content": before}] if before else [_ASKED]
            more = [{"role": "assistant", "content": "c"}, _ASKED] if before else []
            written = self._written([*first, said, result, *more])
            texts = (_NAME, content or "", before, *((_ARGUMENTS,) if kind == "text" else (_KEY, _VALUE)))
            is_whole = all(text in written for text in texts) and not _AS_IT_IS.search(written)
            if is_whole and written.count("None") == nones:
                return kind
        return None

    def _written(self, messages: Sequence[Message]) -> str:
        try:
            return self._render(messages)
        except ValueError:
            return ""


def _has_function(call: object) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)


def _with_arguments(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    """The call with its arguments as a text or as an object; what is no JSON stays."""
    given = call["function"].get("arguments")
    arguments = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given.strip() or "null")
        except (ValueError, RecursionError):
            return dict(call)
    if arguments is None:
        given = arguments = {}
    if as_text:
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _text(index: int, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise ValueError(
        f'messages[{index}].content holds {part!r}; only parts {{"type": "text", "text": ...}}, images, videos and '
        "sounds are taken"
    )
