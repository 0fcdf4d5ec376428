"""The text of an assistant taken apart by the forms of its model: answer, reasoning, tool calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from ferrum_jax.structured.asked.message import AssistantMessage, ToolCall
from ferrum_jax.structured.asked.tools import Tool
from ferrum_jax.structured.reasoning_parser import is_open_after, without_reasoning
from ferrum_jax.structured.tool_forms import ReasoningForm, ToolForm, reasoning_form, tool_form
from ferrum_jax.structured.tool_parser import parsed

# Source: OpenAI, "harmony response format": a message names its channel, and its recipient where it is a call.
_CHANNEL = re.compile(
    r"<\|channel\|>(\w+)((?:(?!<\|message\|>)(?:.|\n))*)<\|message\|>"
    r"((?:.|\n)*?)(<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|\Z)"
)


PROMPT_END_TOKENS = 32  # of a prompt, that show whether it ends within the model's thinking


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageForms:
    """How a model writes calls and reasoning; either may be None."""

    tools: ToolForm | None = None
    reasoning: ReasoningForm | None = None

    @classmethod
    def of_template(cls, template: str | None) -> MessageForms:
        return cls(tools=tool_form(template), reasoning=reasoning_form(template))

    def is_open_after(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so leaves the thinking open."""
        return self.reasoning is not None and is_open_after(self.reasoning, prompt_end)

    def message(
        self, text: str, *, tools: Sequence[Tool] | None = None, is_open: bool = False, specials: Iterable[str] = ()
    ) -> AssistantMessage:
        """The message that a whole text is. specials: texts of special tokens, which are no part of an answer.

        tools: that the model was given; None leaves calls in the text.
        """
        if self.reasoning is not None and self.reasoning.end == "<|end|>" and not is_open:
            message = self._of_channels(text, tools)
        else:
            message = self._of_text(text, tools, is_open)
        content = message.content
        for special in specials:
            content = content.replace(special, "")
        return dataclasses.replace(message, content=content.strip() if message.tool_calls else content)

    def _of_text(self, text: str, tools: Sequence[Tool] | None, is_open: bool) -> AssistantMessage:
        reasoning = None
        if self.reasoning is not None:
            reasoning, text = without_reasoning(self.reasoning, text, is_open=is_open)
            if reasoning:
                text = text.lstrip("\n")
        calls: list[ToolCall] = []
        if tools is not None and self.tools is not None:
            text, calls = parsed(self.tools, text, tools)
        return AssistantMessage(content=text, reasoning=reasoning and reasoning.strip("\n"), tool_calls=tuple(calls))

    def _of_channels(self, text: str, tools: Sequence[Tool] | None) -> AssistantMessage:
        """Of a text in the channels of harmony; text outside of them is answer."""
        answer, thoughts, calls = [], [], []
        end = 0
        for found in _CHANNEL.finditer(text):
            channel, header, content, _ = found.groups()
            answer.append(text[end : found.start()].removesuffix("<|start|>assistant"))
            end = found.end()
            called = parsed(self.tools, found.group(), tools)[1] if tools is not None and self.tools else []
            if called:
                calls += called
            elif channel == "analysis":
                thoughts.append(content)
            else:
                answer.append(content if "to=" not in header else found.group())
        answer.append(text[end:])
        return AssistantMessage(content="".join(answer), reasoning="\n".join(thoughts), tool_calls=tuple(calls))


NO_FORMS = MessageForms()
