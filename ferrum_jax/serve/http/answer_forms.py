"""Answers as OpenAI's clients read them: whole, and in chunks of a stream of events.

A chunk is put together from texts that do not change in a stream and the JSON of what does: tokens of all streams pass
here, and making an encoder of a dictionary for each would cost more than all else.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

from ferrum_jax.core.outputs import RequestOutput
from ferrum_jax.inputs.params.message import ToolCall
from ferrum_jax.openai.answers import TextForm, call_id, finish_reason_of, text_answer, tool_call
from ferrum_jax.openai.asked import AskedText
from ferrum_jax.openai.logprob_forms import chat_logprobs, choice_entries, completion_logprobs
from ferrum_jax.text.output_processor.choice_text import NewText

_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"


class AnswerForm:
    """The form of one answer: of a completion or a chat, under one id."""

    def __init__(self, asked: AskedText, *, request_id: str, model: str, fingerprint: str) -> None:
        self._asked = asked
        self._form = TextForm(
            id=request_id,
            is_chat=asked.is_chat,
            options=asked.form,
            before=asked.echoed,
            echo=asked.echo,
            generates=asked.generates,
            returns_token_ids=asked.returns_token_ids is True,
            tells_run=True,
        )
        fields = {"id": f"{self._form.kind}-{request_id}", "created": int(time.time()), "model": model}
        self._fields = fields | {"system_fingerprint": fingerprint}
        if asked.is_flex:
            self._fields["service_tier"] = "flex"
        of_chunk = self._form.object + (".chunk" if asked.is_chat else "")
        self._head = _json({"object": of_chunk, **self._fields})[:-1]
        self._num_calls: dict[int, int] = {}  # of the choices so far
        self._offsets: dict[int, int] = {}  # of the text of a completion's choices, for their log-probabilities

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer. outputs: of the prompts; choices are numbered prompt by prompt."""
        return text_answer(self._form, outputs, {"object": self._form.object, **self._fields})

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
        return {"index": place, **tool_call(call, call_id(call, self._form.id, index, place))}

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
