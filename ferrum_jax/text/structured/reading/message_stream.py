"""MessageStream: an assistant's text taken apart while it grows: reasoning, answer and tool calls, in their order.

    text ─► thinking, frame of the answer, tool calls, or channels ─► without special tokens ─► without space around it

Each stage gives what has become certain and holds the rest. How the text is cut into pieces changes nothing of what
comes out in all; what is cut off within a call stays text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ferrum_jax.inputs.params.message import AssistantMessage, ToolCall
from ferrum_jax.inputs.params.tools import Tool
from ferrum_jax.text.structured.forms.reasoning_forms import ReasoningForm, reasoning_form, reasoning_form_named
from ferrum_jax.text.structured.forms.tool_forms import ToolForm, tool_form, tool_form_named, written
from ferrum_jax.text.structured.reading.harmony import HarmonyMessages
from ferrum_jax.text.structured.reading.reasoning_parser import (
    FramedAnswer,
    ReasoningParser,
    UnclosedThought,
    is_open_after,
)
from ferrum_jax.text.structured.reading.text_reader import Marks
from ferrum_jax.text.structured.reading.tool_parser import ToolParser

PROMPT_END_TOKENS = 32  # of a prompt, that show whether it ends within the model's thinking
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
        self._space: list[str] = []  # at the end of the answer so far: dropped if nothing but calls comes
        self._has_said = self._after_call = False
        self._ids: set[str] = set()  # of the calls so far
        form = tool_form if tools is not None else None
        has_channels = reasoning_form is not None and reasoning_form.has_channels
        if has_channels or (tool_form is not None and tool_form.has_channels):
            known = tools if tool_form is not None else None
            self._source: _Source = HarmonyMessages(known, self._think, self._say, is_open=is_open)
        else:
            self._source = _Thinking(form, tools or (), reasoning_form, is_open, self._think, self._say)

    def feed(self, text: str) -> list[AssistantMessage]:
        """The parts that this piece has made certain."""
        self._source.feed(text)
        return self._take()

    def flush(self) -> list[AssistantMessage]:
        """The rest, since no more text will come."""
        self._source.flush()
        self._answer(self._filter.flush())
        if (space := "".join(self._space)) and not self._after_call:
            self._found.append(AssistantMessage(content=space))
        self._space = []
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
        self._after_call = True
        if piece.id in self._ids:  # a model that counts wrong; one of our own will do
            piece = dataclasses.replace(piece, id=None)
        self._ids |= {piece.id} if piece.id is not None else set()
        self._found.append(AssistantMessage(content="", tool_calls=(piece,)))

    def _answer(self, text: str) -> None:
        """White space between texts stays, calls aside; what stands before the first text or behind the last goes."""
        if not (certain := text.rstrip()):
            self._space.append(text)
            return
        space, self._space = "".join(self._space), [text[len(certain) :]]
        if self._after_call and not self._has_said:
            space, certain = "", certain.lstrip()
        self._has_said, self._after_call = True, False
        self._found.append(AssistantMessage(content=space + certain))


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
        self._frame = None if reasoning is None or reasoning.answer is None else FramedAnswer(*reasoning.answer)
        self._calls = None if form is None else ToolParser(form, tools)
        self._thought = None if form is None else UnclosedThought(form, tools)
        self._think, self._say = think, say
        self._lines: list[str] = []  # new lines that a thought ends with so far
        self._has_thought = self._has_answer = False

    def feed(self, text: str) -> None:
        thought, answer = ("", text) if self._reasoning is None else self._reasoning.push(text)
        self._take(thought, answer)

    def flush(self) -> None:
        calls: list[ToolCall] = []
        if self._reasoning is not None:
            self._take(*self._reasoning.flush())
            if self._thought is not None:
                rest, calls = self._thought.flush()
                self._note(rest)
        if self._frame is not None:
            self._read(self._frame.flush())
        for piece in calls or (self._calls and self._calls.flush()) or ():
            self._say(piece)

    def _take(self, thought: str, answer: str) -> None:
        if self._thought is not None and self._reasoning is not None:
            thought = self._thought.push(thought) + ("" if self._reasoning.thinks else self._thought.close())
        self._note(thought)
        if not self._has_answer and self._has_thought:
            answer = answer.lstrip("\n")
        if answer:
            self._has_answer = True
            self._read(answer if self._frame is None else self._frame.push(answer))

    def _note(self, thought: str) -> None:
        """Adds reasoning, without the new lines around it."""
        certain = thought if self._has_thought else thought.lstrip("\n")
        thought, certain = certain, certain.rstrip("\n")
        if not certain:
            self._lines += [thought] if thought else []
        else:
            lines, self._lines = "".join(self._lines), [thought[len(certain) :]]
            self._has_thought = True
            self._think(lines + certain)

    def _read(self, answer: str) -> None:
        for piece in [answer] if self._calls is None else self._calls.push(answer):
            self._say(piece)


class _WithoutTexts:
    """A growing text without certain others."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts, self._held = Marks(texts), ""

    def push(self, text: str) -> str:
        *parts, text = self._texts.pattern.split(self._held + text)
        kept = self._texts.kept(text)
        self._held = text[len(text) - kept :]
        return "".join(parts) + text[: len(text) - kept]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageForms:
    """How a model writes calls and reasoning; either may be None."""

    tools: ToolForm | None = None
    reasoning: ReasoningForm | None = None

    @classmethod
    def of_template(
        cls, template: str | None, *, tools: str | None = None, reasoning: str | None = None
    ) -> MessageForms:
        """The forms of these names, or by default those that a chat template shows.

        Raises ValueError listing the known names.
        """
        return cls(
            tools=tool_form(template) if tools is None else tool_form_named(tools),
            reasoning=reasoning_form(template) if reasoning is None else reasoning_form_named(reasoning),
        )

    @classmethod
    def named(cls, tools: str | None, reasoning: str | None) -> MessageForms:
        """The forms of these names."""
        return cls.of_template(None, tools=tools, reasoning=reasoning)

    @property
    def names(self) -> tuple[str | None, str | None]:
        """The names of the two forms."""
        return self.tools and self.tools.name, self.reasoning and self.reasoning.name

    @property
    def thought_end(self) -> str | None:
        """The text that ends a thought."""
        return None if self.reasoning is None else written(self.reasoning.end)

    def is_open_after(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so leaves the thinking open."""
        return self.reasoning is not None and is_open_after(self.reasoning, prompt_end)

    def stream(
        self, *, tools: Sequence[Tool] | None = None, is_open: bool = False, specials: Iterable[str] = ()
    ) -> MessageStream:
        """A stream that takes a text apart while it grows; the arguments are those of `message`."""
        return MessageStream(self.tools, self.reasoning, tools=tools, is_open=is_open, specials=specials)

    def message(
        self, text: str, *, tools: Sequence[Tool] | None = None, is_open: bool = False, specials: Iterable[str] = ()
    ) -> AssistantMessage:
        """The message that a whole text is. specials: texts of special tokens, which are no part of an answer.

        tools: that the model was given; None leaves calls in the text.
        """
        stream = self.stream(tools=tools, is_open=is_open, specials=specials)
        return self.joined([*stream.feed(text), *stream.flush()])

    def joined(self, parts: Iterable[AssistantMessage]) -> AssistantMessage:
        """The message that these parts are, in their order."""
        parts = list(parts)
        reasoning = "".join(part.reasoning or "" for part in parts)
        return AssistantMessage(
            content="".join(part.content for part in parts),
            reasoning=None if self.reasoning is None else reasoning,
            tool_calls=tuple(call for part in parts for call in part.tool_calls),
        )


NO_FORMS = MessageForms()
