"""An assistant's message in OpenAI's form: its answer, what it thought, and its tool calls."""

from __future__ import annotations

import hashlib
from typing import Any

from ferrum_jax.inputs.params.message import AssistantMessage, ToolCall

_ID_CHARACTERS = 9  # letters and digits, as some families' templates demand of the ids that they are given back


def call_id(call: ToolCall, request: str, choice: int, place: int) -> str:
    """The id of a call: the one that the model gave it, else the same for the same request.

    place: of the call among those of its choice.
    """
    return (
        call.id or hashlib.blake2b(f"{request} {choice} {place}".encode(), digest_size=16).hexdigest()[:_ID_CHARACTERS]
    )


def tool_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    """One call of a message."""
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def assistant_message(
    said: AssistantMessage, *, request: str, choice: int, before: str = "", shows_reasoning: bool = True
) -> dict[str, Any]:
    """The message of a choice. before: what its content begins with, of a message that was continued."""
    content = None if said.tool_calls and not said.content else before + said.content
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if shows_reasoning and said.reasoning is not None:
        found["reasoning"] = said.reasoning
    if said.tool_calls:
        calls = enumerate(said.tool_calls)
        found["tool_calls"] = [tool_call(call, call_id(call, request, choice, place)) for place, call in calls]
    return found


def finish_reason_of(finish_reason: str | None, *, has_calls: bool) -> str | None:
    """OpenAI's word for how a choice ended: a text that ended by itself and calls tools ended for them."""
    return "tool_calls" if has_calls and finish_reason == "stop" else finish_reason
