"""MessageStream: an assistant's text taken apart while it grows: reasoning, answer and tool calls, in their order.

    text ─► thinking or channels ─► tool calls ─► without special tokens ─► without white space around calls

Each stage gives what has become certain and holds the rest. How the text is cut into pieces changes nothing of what
comes out in all; what is cut off within a call stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ferrum_jax.structured.asked.message import AssistantMessage, ToolCall
from ferrum_jax.structured.asked.tools import Tool
from ferrum_jax.structured.reasoning_parser import ReasoningParser, overlap
from ferrum_jax.structured.tool_forms import ReasoningForm, ToolForm
from ferrum_jax.structured.tool_parser import ToolParser

_CHANNEL, _MESSAGE, _ROLE = "<|channel|>", "<|message|>", "<|start|>assistant"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")  # of a channel's content; the last begins what comes next
_Think = Callable[[str], None]
_Say = Callable[[str | ToolCall], None]


class _Source(Protocol):
    """The first stages: what is thought and what is said."""

    def feed(self, text: str) -> None: ...

    def flush(self) -> None: ...


class MessageStream:
    """Fed pieces of a text, gives parts of a message, each with one of reasoning, content and calls."""

    def __init__(
        self,
        tool_form: ToolForm | None,
        reasoning_form: ReasoningForm | None,
        *,
        tools: Sequence[Tool] | None = None,
        is_open: bool = False,
        specials: Iterable[str] = (),
    ) -> None:
        """tools: that the model was given; None leaves calls in the text. is_open: the prompt has opened the thinking.

        specials: texts of special tokens, which are no part of an answer.
        """
        self._found: list[AssistantMessage] = []
        self._filter = _WithoutTexts(specials)
        self._space = ""  # at the end of the answer so far: dropped if a call comes
        self._after_call = False
        form = tool_form if tools is not None else None
        if reasoning_form is not None and reasoning_form.end == "<|end|>" and not is_open:
            self._source: _Source = _Channels(form, tools or (), self._think, self._say)
        else:
            self._source = _Thinking(form, tools or (), reasoning_form, is_open, self._think, self._say)

    def feed(self, text: str) -> list[AssistantMessage]:
        """What has become certain with this piece."""
        self._source.feed(text)
        return self._take()

    def flush(self) -> list[AssistantMessage]:
        """The rest, since no more text will come."""
        self._source.flush()
        self._answer(self._filter.flush())
        if self._space and not self._after_call:
            self._found.append(AssistantMessage(content=self._space))
        self._space = ""
        return self._take()

    def _take(self) -> list[AssistantMessage]:
        found, self._found = self._found, []
        return found

    def _think(self, text: str) -> None:
        if text:
            self._found.append(AssistantMessage(content="", reasoning=text))

    def _say(self, piece: str | ToolCall) -> None:
        if isinstance(piece, str):
            self._answer(self._filter.push(piece))
            return
        self._answer(self._filter.flush())
        self._space, self._after_call = "", True
        self._found.append(AssistantMessage(content="", tool_calls=(piece,)))

    def _answer(self, text: str) -> None:
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        certain = text.rstrip()
        self._space = text[len(certain) :]
        if certain:
            self._after_call = False
            self._found.append(AssistantMessage(content=certain))


class _Thinking:
    """A text that thinks, if it does, before it answers. The new lines around a thought are no part of it."""

    def __init__(
        self,
        form: ToolForm | None,
        tools: Sequence[Tool],
        reasoning: ReasoningForm | None,
        is_open: bool,
        think: _Think,
        say: _Say,
    ) -> None:
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning, is_open=is_open)
        self._calls = None if form is None else ToolParser(form, tools)
        self._think, self._say = think, say
        self._lines = ""  # new lines that a thought ends with so far
        self._has_thought = self._has_answer = False

    def feed(self, text: str) -> None:
        thought, answer = ("", text) if self._reasoning is None else self._reasoning.push(text)
        self._take(thought, answer)

    def flush(self) -> None:
        if self._reasoning is not None:
            self._take(*self._reasoning.flush())
        if self._calls is not None:
            for piece in self._calls.flush():
                self._say(piece)

    def _take(self, thought: str, answer: str) -> None:
        if thought:
            thought = self._lines + thought
            thought = thought if self._has_thought else thought.lstrip("\n")
            certain = thought.rstrip("\n")
            self._lines = thought[len(certain) :]
            self._has_thought = self._has_thought or bool(certain)
            self._think(certain)
        if not self._has_answer and self._has_thought:
            answer = answer.lstrip("\n")
        if answer:
            self._has_answer = True
            for piece in [answer] if self._calls is None else self._calls.push(answer):
                self._say(piece)


class _Channels:
    """A text in the channels of harmony: a message names its channel, and its recipient where it is a call.

    Text outside of them is answer, and so is a message to a recipient that is no call which can be read.
    Source: OpenAI, "harmony response format".
    """

    def __init__(self, form: ToolForm | None, tools: Sequence[Tool], think: _Think, say: _Say) -> None:
        self._form, self._tools, self._think, self._say = form, tools, think, say
        self._held = ""
        self._channel: str | None = None  # whose content is read; None outside of all
        self._header: str | None = None  # of a message to a recipient, which is read whole
        self._thoughts = 0  # messages that were thought

    def feed(self, text: str) -> None:
        self._held += text
        while self._advance(is_last=False):
            pass

    def flush(self) -> None:
        while self._advance(is_last=True):
            pass
        if self._held:
            self._say(self._held)
            self._held = ""

    def _advance(self, *, is_last: bool) -> bool:
        """Whether more of what is held may be certain."""
        return self._outside(is_last) if self._channel is None else self._within(self._channel, is_last)

    def _outside(self, is_last: bool) -> bool:
        start = self._held.find(_CHANNEL)
        if start < 0:
            kept = 0 if is_last else max(overlap(self._held, _CHANNEL), overlap(self._held, _ROLE + _CHANNEL))
            self._emit(len(self._held) - kept)
            return False
        if start:
            before, self._held = self._held[:start].removesuffix(_ROLE), self._held[start:]
            if before:
                self._say(before)
        header, mark, rest = self._held[len(_CHANNEL) :].partition(_MESSAGE)
        if not mark:
            return False
        found = re.match(r"\w+", header)
        if found is None:
            self._emit(len(_CHANNEL))
            return True
        self._channel, self._held = found[0], rest
        self._header = _CHANNEL + header + _MESSAGE if "to=" in header else None
        if self._channel == "analysis" and self._header is None:
            self._think("\n" if self._thoughts else "")
            self._thoughts += 1
        return True

    def _within(self, channel: str, is_last: bool) -> bool:
        ends = [(place, end) for end in _ENDS if (place := self._held.find(end)) >= 0]
        place, end = min(ends) if ends else (len(self._held), "")
        if self._header is not None:
            if not (ends or is_last):
                return False
            self._call(self._header + self._held[:place], end)
        else:
            kept = 0 if ends or is_last else max(overlap(self._held, each) for each in _ENDS)
            content = self._held[: place - kept]
            if content:
                (self._think if channel == "analysis" else self._say)(content)
            if not ends:
                self._held = self._held[place - kept :]
                return False
        self._held = self._held[place + (0 if end == _ROLE[: len(end)] else len(end)) :]
        self._channel = self._header = None
        return bool(ends)

    def _call(self, text: str, end: str) -> None:
        """A message to a recipient, which may be a call."""
        if self._form is None:
            self._say(text + end)
            return
        parser = ToolParser(self._form, self._tools)
        for piece in (*parser.push(text + end), *parser.flush()):
            self._say(piece)

    def _emit(self, count: int) -> None:
        if count:
            self._say(self._held[:count])
            self._held = self._held[count:]


class _WithoutTexts:
    """A growing text without certain others."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted(filter(None, texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts))) if self._texts else None
        self._starts = frozenset(text[0] for text in self._texts)
        self._longest = len(self._texts[0]) if self._texts else 0
        self._held = ""

    def push(self, text: str) -> str:
        if self._pattern is None:
            return text
        text, before = self._held + text, ""
        if not self._starts.isdisjoint(text):
            *parts, text = self._pattern.split(text)
            before = "".join(parts)
        kept = self._kept(text)
        self._held = text[len(text) - kept :]
        return before + text[: len(text) - kept]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _kept(self, text: str) -> int:
        """How long an end of the text may become one of the texts."""
        for place in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[place] in self._starts and any(each.startswith(text[place:]) for each in self._texts):
                return len(text) - place
        return 0
