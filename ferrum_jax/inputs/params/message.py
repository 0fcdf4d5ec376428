"""An assistant's message: its answer, its reasoning, and its tool calls."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call. arguments: a JSON object, as text. id: the one that the model gave it, in forms that have some."""

    name: str
    arguments: str
    id: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantMessage:
    """content: the answer; reasoning: what was thought before it, None where the model's template shows no thinking."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
