"""Output of a batch job: one line for each line of input, in the OpenAI batch output form.

A line is a function of the row, its tokens and the job: ids are digests, `created` is the job's recorded
start, and floats follow one rule, so an interrupted job writes the same lines as one that was not. What
depends on the run (cached tokens, times) is not in a line. A row that failed has `response: null` and an
`error` with code and message. If the input was refused, the error has its line number, for lack of a custom_id.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ferrum_jax.batch.input.formats import EMBEDS, GENERATES, BadRow, Row
from ferrum_jax.batch.input.reading_rows import SCORE_URL
from ferrum_jax.openai.logprob_forms import (
    by_token_id,
    chat_logprobs,
    choice_entries,
    completion_logprobs,
    echo_entries,
    number,
)
from ferrum_jax.openai.message_forms import assistant_message, finish_reason_of
from ferrum_jax.outputs import CompletionOutput, EmbeddingOutput, RequestOutput, ScoreOutput
from ferrum_jax.prompt import take_apart

_json = json.JSONEncoder(allow_nan=False).encode  # of a string alone it is fast; of an object it makes an encoder first
_LINE = '{"id": "batch_req_%s", "custom_id": %s, "response": %s, "error": %s}\n'
_COMPLETION_USAGE = '{"prompt_tokens": %d, "completion_tokens": %d, "total_tokens": %d}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobLabel:
    """What all lines of a job share. created: its first start, in seconds since 1970. fingerprint: of its identity."""

    model: str
    created: int
    fingerprint: str

    @functools.cached_property
    def fields(self) -> str:
        """The fields as they stand in every line."""
        return self._named(self.model)

    def fields_of(self, row: Row) -> str:
        """The fields of a row's line, which carries the adapter's name where it has one."""
        return self.fields if row.adapter is None else self._named(row.adapter)

    def _named(self, name: str) -> str:
        return f'"created": {self.created}, "model": {_json(name)}, "system_fingerprint": {_json(self.fingerprint)}'


def completed_line(row: Row, outputs: Sequence[RequestOutput], job: JobLabel) -> bytes:
    """The line of a row that ran, with its newline. outputs: one per prompt; choices are numbered prompt by prompt."""
    kind, name = ("chatcmpl", "chat.completion") if row.is_chat else ("cmpl", "text_completion")
    pairs = [(output, choice) for output in outputs for choice in output.outputs]
    choices = ", ".join([_choice(row, output, choice, index) for index, (output, choice) in enumerate(pairs)])
    num_prompt = sum([len(output.prompt_token_ids) for output in outputs])
    generated = sum([len(choice.token_ids) for _, choice in pairs]) if row.generates else 0
    usage = _COMPLETION_USAGE % (num_prompt, generated, num_prompt + generated)
    body = (
        f'"id": "{kind}-{row.id}", "object": "{name}", {job.fields_of(row)}, "choices": [{choices}], "usage": {usage}'
    )
    if row.is_chat:
        body += _prompt_logprobs(outputs[0])
    return _answer(row, body)


def answered_line(row: Row, outputs: Sequence[Any], job: JobLabel) -> bytes:
    """The line of a row all of whose prompts were answered. Raises ValueError for vectors shorter than it asks for."""
    if row.kind == GENERATES:
        return completed_line(row, outputs, job)
    return (embedding_line if row.kind == EMBEDS else score_line)(row, outputs, job)


def embedding_line(row: Row, outputs: Sequence[EmbeddingOutput], job: JobLabel) -> bytes:
    """The line of a row that asked for vectors, with its newline. outputs: of its texts.

    Raises ValueError where it asks for more dimensions than they have.
    """
    vectors = [_vector(output.cut(row.form.dimensions), as_base64=row.form.as_base64) for output in outputs]
    data = ", ".join(
        [f'{{"object": "embedding", "index": {i}, "embedding": {vector}}}' for i, vector in enumerate(vectors)]
    )
    count = sum([len(output.prompt_token_ids) for output in outputs])
    usage = f'{{"prompt_tokens": {count}, "total_tokens": {count}}}'
    return _answer(row, f'"object": "list", "data": [{data}], {job.fields}, "usage": {usage}')


def _vector(values: np.ndarray, *, as_base64: bool) -> str:
    if as_base64:
        return _json(base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode())
    return _json([number(value) for value in values.tolist()])


def score_line(row: Row, outputs: Sequence[ScoreOutput], job: JobLabel) -> bytes:
    """The line of a row that asked for scores or a ranking, with its newline. outputs: of its pairs."""
    scores = [number(output.score) for output in outputs]
    if row.url == SCORE_URL:
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
        answer = f'"object": "list", "data": {_json(data)}'
    else:
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: row.form.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if row.form.shows_documents:
            for result in results:
                result["document"] = {"text": row.prompts[result["index"]]["document"]}
        answer = f'"results": {_json(results)}'
    count = sum([len(output.prompt_token_ids) for output in outputs])
    usage = f'{{"prompt_tokens": {count}, "total_tokens": {count}}}'
    return _answer(row, f'{answer}, {job.fields}, "usage": {usage}')


def failed_line(bad: BadRow) -> bytes:
    """The line of a row that could not be run, with its newline."""
    error = {"code": bad.code, "message": bad.message} | ({} if bad.line is None else {"line": bad.line})
    return (_LINE % (bad.id, _json(bad.name), "null", _json(error))).encode()


def _answer(row: Row, body: str) -> bytes:
    response = f'{{"status_code": 200, "request_id": "req_{row.id}", "body": {{{body}}}}}'
    return (_LINE % (row.id, _json(row.custom_id), response, "null")).encode()


def _choice(row: Row, output: RequestOutput, choice: CompletionOutput, index: int) -> str:
    if row.is_chat:
        message = f'"message": {_message(row, choice)}'
        logprobs = None if choice.logprobs is None else {"content": chat_logprobs(choice, row.answer)}
    else:
        message = f'"text": {_json(choice.text if row.generates else output.prompt or "")}'
        logprobs = None if choice.logprobs is None else _completion_logprobs(row, output, choice)
    logprobs_json = "null" if logprobs is None else _json(logprobs)
    has_calls = choice.message is not None and bool(choice.message.tool_calls)
    ended = _json(finish_reason_of(choice.finish_reason, has_calls=has_calls))
    token_ids = choice.token_ids if row.generates else ()
    more = f', "token_ids": {_json(token_ids)}' if row.returns_token_ids else ""
    if not row.is_chat:
        more += _prompt_logprobs(output)
    return f'{{"index": {index}, {message}, "logprobs": {logprobs_json}, "finish_reason": {ended}{more}}}'


def _message(row: Row, choice: CompletionOutput) -> str:
    """The assistant's message: its answer, and where the model's template shows them, reasoning and tool calls."""
    if choice.message is None:
        return f'{{"role": "assistant", "content": {_json(_continued(row) + choice.text)}}}'
    shows, before = row.answer.shows_reasoning, _continued(row)
    said = choice.message
    return _json(assistant_message(said, request=row.id, choice=choice.index, before=before, shows_reasoning=shows))


def _continued(row: Row) -> str:
    """The beginning of a chat's answer: with echo, the last message if it is the assistant's; otherwise nothing."""
    last: Any = take_apart(row.prompt).content[-1] if row.echo else {}
    return last["content"] if last.get("role") == "assistant" else ""


def _prompt_logprobs(output: RequestOutput) -> str:
    """The field, after a comma; "" where the output has no prompt log-probabilities."""
    if output.prompt_logprobs is None:
        return ""
    return f', "prompt_logprobs": {_json([entry and by_token_id(entry) for entry in output.prompt_logprobs])}'


def _completion_logprobs(row: Row, output: RequestOutput, choice: CompletionOutput) -> dict[str, list[Any]]:
    """Those of an echo first."""
    first, entries = echo_entries(output) if row.echo else (None, [])
    entries += choice_entries(choice) if row.generates else ()
    return completion_logprobs(entries, first=first, ids_as_names=row.answer.ids_as_names)
