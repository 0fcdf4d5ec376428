"""The text of an assistant taken apart by the forms of its model: answer, reasoning, tool calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ferrum_jax.asked.message import AssistantMessage
from ferrum_jax.asked.tools import Tool
from ferrum_jax.structured.forms.reasoning_forms import ReasoningForm, reasoning_form, reasoning_form_named
from ferrum_jax.structured.forms.tool_forms import ToolForm, tool_form, tool_form_named, written
from ferrum_jax.structured.reading.message_stream import MessageStream
from ferrum_jax.structured.reading.reasoning_parser import is_open_after

PROMPT_END_TOKENS = 32  # of a prompt, that show whether it ends within the model's thinking


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
