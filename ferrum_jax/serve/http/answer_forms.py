"""Answers as OpenAI's clients read them: whole, and in chunks of a stream of events.

A chunk is put together from texts that do not change in a stream and the JSON of what does: tokens of all streams pass
here, and making an encoder of a dictionary for each would cost more than all else.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from typing import Any

from ferrum_jax.answers.choice_text import NewText
from ferrum_jax.asked.message import ToolCall
from ferrum_jax.openai.logprob_forms import (
    by_token_id,
    chat_logprobs,
    choice_entries,
    completion_logprobs,
    echo_entries,
    number,
)
from ferrum_jax.openai.message_forms import assistant_message, call_id, finish_reason_of, tool_call
from ferrum_jax.outputs import CompletionOutput, RequestOutput
from ferrum_jax.serve.bodies.http_body import AskedText
from ferrum_jax.serve.link.engine_client import EngineVector

_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"


def usage_of(num_prompt: int, num_generated: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class AnswerForm:
    """The form of one answer: of a completion or a chat, under one id."""

    def __init__(self, asked: AskedText, *, request_id: str, model: str, fingerprint: str) -> None:
        self._asked = asked
        kind, whole = ("chatcmpl", "chat.completion") if asked.is_chat else ("cmpl", "text_completion")
        self._of_chunk = whole + ".chunk" if asked.is_chat else whole
        self._id = request_id
        self._num_calls: dict[int, int] = {}  # of the choices so far
        self._fields = {"id": f"{kind}-{request_id}", "created": int(time.time()), "model": model}
        self._more = {"system_fingerprint": fingerprint}
        self._head = _json({"object": self._of_chunk, **self._fields, **self._more})[:-1]
        self._whole = whole
        self._offsets: dict[int, int] = {}  # of the text of a completion's choices, for their log-probabilities

    # -- whole -----------------------------------------------------------------------------------------

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer. outputs: of the prompts; choices are numbered prompt by prompt."""
        asked = self._asked
        pairs = [(output, choice) for output in outputs for choice in output.outputs]
        num_generated = sum(len(choice.token_ids) for _, choice in pairs) if asked.generates else 0
        usage = usage_of(
            sum(len(output.prompt_token_ids) for output in outputs),
            num_generated,
            sum(output.num_cached_tokens for output in outputs),
        )
        choices = [self._choice(index, output, choice) for index, (output, choice) in enumerate(pairs)]
        answer = {"object": self._whole, **self._fields, **self._more, "choices": choices, "usage": usage}
        return answer | (self._of_prompt(outputs[0]) if asked.is_chat else {})

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What is said of a prompt: beside a chat's choices, and in each choice of a completion."""
        found = _prompt_logprobs(output)
        if self._asked.returns_token_ids:
            found["prompt_token_ids"] = list(output.prompt_token_ids)
        return found

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        asked = self._asked
        found: dict[str, Any] = {"index": index}
        if asked.is_chat:
            found["message"] = self._message(choice)
            found["logprobs"] = None if choice.logprobs is None else {"content": chat_logprobs(choice, asked.form)}
        else:
            found["text"] = choice.text if asked.generates else output.prompt or ""
            found["logprobs"] = None if choice.logprobs is None else self._completion_logprobs(output, choice)
        has_calls = choice.message is not None and bool(choice.message.tool_calls)
        found["finish_reason"] = finish_reason_of(choice.finish_reason, has_calls=has_calls)
        found["stop_reason"] = choice.stop_reason
        if asked.returns_token_ids:
            found["token_ids"] = list(choice.token_ids) if asked.generates else []
        return found if asked.is_chat else found | self._of_prompt(output)

    def _message(self, choice: CompletionOutput) -> dict[str, Any]:
        said = choice.message
        if said is None:
            return {"role": "assistant", "content": self._asked.echoed + choice.text}
        asked = self._asked
        shows = asked.form.shows_reasoning
        before = asked.echoed
        return assistant_message(said, request=self._id, choice=choice.index, before=before, shows_reasoning=shows)

    def _completion_logprobs(self, output: RequestOutput, choice: CompletionOutput) -> dict[str, list[Any]]:
        first, entries = echo_entries(output) if self._asked.echo else (None, [])
        entries += choice_entries(choice) if self._asked.generates else ()
        return completion_logprobs(entries, first=first, ids_as_names=self._asked.form.ids_as_names)

    # -- in chunks -------------------------------------------------------------------------------------

    def opening(self, index: int, prompt: str, usage: dict[str, Any] | None) -> bytes:
        """The chunk that a choice begins with; b"" where it has none. prompt: the text of an echo."""
        asked = self._asked
        if asked.is_chat:
            delta = {"role": "assistant", "content": asked.echoed}
            return self._event(
                f'{{"index":{index},"delta":{_json(delta)},"logprobs":null,"finish_reason":null}}', usage
            )
        self._offsets[index] = len(prompt)
        if not prompt:
            return b""
        return self._event(f'{{"index":{index},"text":{_json(prompt)},"logprobs":null,"finish_reason":null}}', usage)

    def chunk(self, index: int, new: NewText, usage: dict[str, Any] | None) -> bytes:
        """The chunk of what is new of a choice; b"" where it says nothing. usage: so far, where every chunk has it."""
        asked = self._asked
        shows_ids = asked.returns_token_ids
        if not (new.text or new.parts or new.logprobs or new.finish_reason or shows_ids):
            return b""
        text = _json(new.text) if asked.generates else '""'
        body = self._delta(index, new) if asked.is_chat else f'"text":{text}'
        ended = _json(finish_reason_of(new.finish_reason, has_calls=index in self._num_calls))
        more = "" if new.finish_reason is None else f',"stop_reason":{_json(new.stop_reason)}'
        if shows_ids:
            more += f',"token_ids":{_json(list(new.token_ids))}'
        logprobs = "null" if new.logprobs is None else self._chunk_logprobs(index, new)
        return self._event(f'{{"index":{index},{body},"logprobs":{logprobs},"finish_reason":{ended}{more}}}', usage)

    def _delta(self, index: int, new: NewText) -> str:
        """What is new of a chat's message. A call comes in one piece, once it is whole."""
        content = f'"content":{_json(new.text)}' if new.text else ""
        if not new.parts:
            return f'"delta":{{{content}}}'
        fields = [content] if content else []
        shows = self._asked.form.shows_reasoning
        thought = "".join([part.reasoning or "" for part in new.parts]) if shows else ""
        if thought:
            fields.append(f'"reasoning":{_json(thought)}')
        calls = [self._call(index, call) for part in new.parts for call in part.tool_calls]
        if calls:
            fields.append(f'"tool_calls":{_json(calls)}')
        return f'"delta":{{{",".join(fields)}}}'

    def _call(self, index: int, call: ToolCall) -> dict[str, Any]:
        place = self._num_calls.get(index, 0)
        self._num_calls[index] = place + 1
        return {"index": place, **tool_call(call, call_id(call, self._id, index, place))}

    def _chunk_logprobs(self, index: int, new: NewText) -> str:
        if self._asked.is_chat:
            return _json({"content": chat_logprobs(new, self._asked.form)})
        entries = choice_entries(new)
        offset = self._offsets.get(index, 0)
        found = completion_logprobs(entries, offset=offset, ids_as_names=self._asked.form.ids_as_names)
        lengths = [len(entry[token_id].decoded_token or "") for token_id, entry in entries]
        self._offsets[index] = self._offsets.get(index, 0) + sum(lengths)
        return _json(found)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last chunk, of a reader that asked for it."""
        return f'data: {self._head},"choices":[],"usage":{_json(usage)}}}\n\n'.encode()

    def _event(self, choice: str, usage: dict[str, Any] | None = None) -> bytes:
        counted = "" if usage is None else f',"usage":{_json(usage)}'
        return f'data: {self._head},"choices":[{choice}]{counted}}}\n\n'.encode()


def _prompt_logprobs(output: RequestOutput) -> dict[str, Any]:
    if output.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": [entry and by_token_id(entry) for entry in output.prompt_logprobs]}


def vectors_answer(vectors: Sequence[EngineVector], num_tokens: int, *, model: str, as_base64: bool) -> dict[str, Any]:
    """The answer of /v1/embeddings. vectors: of the texts, in their order."""

    def plain(values: Any) -> Any:
        return (
            base64.b64encode(values.tobytes()).decode() if as_base64 else [number(value) for value in values.tolist()]
        )

    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": plain(vector.values)}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
