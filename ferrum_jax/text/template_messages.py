"""Messages as a chat template reads them, which is found out by rendering messages of our own.

A template may take contents as texts, as lists of parts, or both; arguments of calls as objects or as text; and it may
write calls only where the content is none. What it takes as it came stays, and nothing is left out without a word.

Source: vLLM and SGLang look into the template likewise; both join texts for templates that take no parts, vLLM by a new
line, as here.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrum_jax.prompt import Message, joined_text, media_of_part

_NAME, _KEY, _VALUE, _TEXT = "probe_name", "probe_key", "probe_value", "probe_text"
_ARGUMENTS = json.dumps({_KEY: _VALUE})
_MOST_KEPT = 64  # of what was found out; roles are a user's words
_ASKED = {"role": "user", "content": "a"}
_AS_IT_IS = re.compile(rf"""["']type["']\s*:\s*["']text["']|\{{'{_KEY}'""")  # a part or an object, written by Python


class TemplateMessages:
    """Makes messages readable for one template.

    render: of messages to a text; raises ValueError. writes_calls: whether the template reads calls at all.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str], *, writes_calls: bool) -> None:
        self._render, self._writes_calls = render, writes_calls
        self._takes = functools.lru_cache(_MOST_KEPT)(self._look_at_content)
        self._calls = functools.lru_cache(_MOST_KEPT)(self._look_at_calls)

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
        """How the template writes arguments of calls beside this content, "object" or "text"; None: it writes none.

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
