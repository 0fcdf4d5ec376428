"""Answers of /v1/responses: a list of items, whole or as events in OpenAI's order, each with its number.

An item is what was thought, a message, or a call. A whole answer is made by the steps of a stream, so they are equal.
"""

import json
import time
from typing import Any

from ferrum_jax.core.outputs import ABORTED
from ferrum_jax.inputs.params.message import AssistantMessage, ToolCall
from ferrum_jax.io.error_text import bounded
from ferrum_jax.openai.answers import call_id
from ferrum_jax.openai.logprob_forms import chat_logprobs
from ferrum_jax.openai.response_body import AskedResponse
from ferrum_jax.text.output_processor.choice_text import NewText
from ferrum_jax.text.output_processor.collect import Collected

_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseForm:
    """One answer while it grows."""

    def __init__(self, asked: AskedResponse, *, request_id: str, model: str) -> None:
        self._id = request_id
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": int(time.time()), "model": model}
        self._shown, self._answer = asked.shown, asked.chat.form
        self._tier = "flex" if asked.chat.is_flex else "default"
        self._number = 0  # of events
        self._events: list[bytes] = []
        self._output: list[dict[str, Any]] = []  # the last one may be open
        self._is_open = False
        self._text: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not come yet
        self._num_calls = self._num_tokens = self._num_thought = 0
        self._finish_reason: str | None = None
        self.response: dict[str, Any] = {}

    # -- steps -----------------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """The events with which an answer begins."""
        for kind in ("response.created", "response.in_progress"):
            self._tell(kind, response=self._response("in_progress", None))
        return self._take()

    def add(self, new: NewText) -> bytes:
        """The events of what is new."""
        self._num_tokens += len(new.token_ids)
        self._finish_reason = new.finish_reason
        if new.logprobs is not None:
            self._logprobs += chat_logprobs(new, self._answer)
        parts = (AssistantMessage(content=new.text),) if new.parts is None else new.parts
        for part in parts:
            self._add(part)
        return self._take()

    def end(self, collected: Collected) -> bytes:
        """The last events; `response` is complete then."""
        if self._finish_reason == "abort":
            return self.fail(ABORTED)
        self._close()
        num_prompt_tokens = len(collected.prompt_token_ids)
        usage = {
            "input_tokens": num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": collected.num_cached_tokens},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_thought},
            "total_tokens": num_prompt_tokens + self._num_tokens,
        }
        status = "incomplete" if self._finish_reason == "length" else "completed"
        if status == "incomplete" and self._output:
            self._output[-1]["status"] = status
        self.response = self._response(status, usage)
        self._tell(f"response.{status}", response=self.response)
        return self._take()

    def fail(self, message: str) -> bytes:
        """The events of an answer that could not go on."""
        self._close()
        self.response = self._response("failed", None) | {
            "error": {"code": "server_error", "message": bounded(message)}
        }
        self._tell("response.failed", response=self.response)
        return self._take()

    # -- items -----------------------------------------------------------------------------------------

    def _add(self, part: AssistantMessage) -> None:
        if part.reasoning:
            self._num_thought, self._logprobs = self._num_tokens, []
            self._grow("reasoning", part.reasoning)
        if part.content:
            self._grow("message", part.content)
        for call in part.tool_calls:
            self._logprobs = []
            self._call(call)

    def _grow(self, kind: str, text: str) -> None:
        """More text of the open item, or of one that is opened for it."""
        if not self._is_open or self._output[-1]["type"] != kind:
            self._close()
            self._open(kind)
        self._text.append(text)
        if kind == "message":
            logprobs, self._logprobs = self._logprobs, []
            self._output[-1]["content"][0]["logprobs"] += logprobs
            self._tell_of_part("response.output_text.delta", delta=text, logprobs=logprobs)
        else:
            self._tell_of_part("response.reasoning_text.delta", delta=text)

    def _open(self, kind: str) -> None:
        item = {"type": kind, "id": self._item_id(kind), "status": "in_progress", "content": []}
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item |= {"summary": []}
        self._output.append(item)
        self._is_open, self._text = True, []
        self._tell("response.output_item.added", output_index=len(self._output) - 1, item=item)
        self._tell_of_part("response.content_part.added", part=part)
        item["content"] = [part]

    def _close(self) -> None:
        """The open item is whole."""
        if not self._is_open:
            return
        self._is_open = False
        item, text = self._output[-1], "".join(self._text)
        (part,) = item["content"]
        part["text"], item["status"] = text, "completed"
        if item["type"] == "message":
            self._tell_of_part("response.output_text.done", text=text, logprobs=part["logprobs"])
        else:
            self._tell_of_part("response.reasoning_text.done", text=text)
        self._tell_of_part("response.content_part.done", part=part)
        self._tell("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _call(self, call: ToolCall) -> None:
        self._close()
        item = {"type": "function_call", "id": self._item_id("function_call"), "status": "in_progress"}
        item |= {"call_id": call_id(call, self._id, 0, self._num_calls), "name": call.name, "arguments": ""}
        self._num_calls += 1
        self._output.append(item)
        where: dict[str, Any] = {"output_index": len(self._output) - 1}
        self._tell("response.output_item.added", **where, item=item)
        where["item_id"] = item["id"]
        self._tell("response.function_call_arguments.delta", **where, delta=call.arguments)
        self._tell("response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments)
        item |= {"arguments": call.arguments, "status": "completed"}
        self._tell("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _item_id(self, kind: str) -> str:
        return f"{_PREFIXES[kind]}_{self._id}_{len(self._output)}"

    # -- forms -----------------------------------------------------------------------------------------

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "output": self._output,
            "usage": usage,
            "background": False,
            "previous_response_id": None,
            "service_tier": self._tier,
            "store": False,
            **self._shown,
        }

    def _tell_of_part(self, kind: str, **fields: Any) -> None:
        place = len(self._output) - 1
        self._tell(kind, item_id=self._output[place]["id"], output_index=place, content_index=0, **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        event = _json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        self._events.append(f"event: {kind}\ndata: {event}\n\n".encode())

    def _take(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)
