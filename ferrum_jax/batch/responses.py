"""Output of a batch job: one line for each line of input, in the OpenAI batch output form.

A line is a function of the row, its tokens and the job: ids are digests, `created` is the job's recorded
start, and floats follow one rule, so a job that was interrupted writes the lines of one that was not. What
depends on the run (cached tokens, times) is not in a line. A row that failed has `response: null` and an
`error` with code and message.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

from ferrum_jax.batch.formats import BadRow, Row
from ferrum_jax.request import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput

_NO_PROBABILITY = -9999.0  # JSON has no -inf; the value is OpenAI's
_json = json.JSONEncoder(allow_nan=False).encode  # of a string alone it is fast; of an object it makes an encoder first
_LINE = '{"id": "batch_req_%s", "custom_id": %s, "response": %s, "error": %s}\n'
_COMPLETION_USAGE = '{"prompt_tokens": %d, "completion_tokens": %d, "total_tokens": %d}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobIdentity:
    """What all lines of a job share. created: its first start, in seconds since 1970. fingerprint: of its settings."""

    model: str
    created: int
    fingerprint: str

    @functools.cached_property
    def fields(self) -> str:
        """As every line has them."""
        return (
            f'"created": {self.created}, "model": {_json(self.model)}, "system_fingerprint": {_json(self.fingerprint)}'
        )


def completed_line(row: Row, output: RequestOutput, job: JobIdentity) -> bytes:
    """The line of a row that ran, with its newline."""
    kind, name = ("chatcmpl", "chat.completion") if row.is_chat else ("cmpl", "text_completion")
    choices = ", ".join([_choice(row, choice) for choice in output.outputs])
    num_prompt, generated = len(output.prompt_token_ids), sum([len(choice.token_ids) for choice in output.outputs])
    usage = _COMPLETION_USAGE % (num_prompt, generated, num_prompt + generated)
    body = f'"id": "{kind}-{row.id}", "object": "{name}", {job.fields}, "choices": [{choices}], "usage": {usage}'
    if output.prompt_logprobs is not None:
        body += f', "prompt_logprobs": {_json([entry and _by_token_id(entry) for entry in output.prompt_logprobs])}'
    return _answer(row, body)


def embedding_line(row: Row, output: EmbeddingOutput, job: JobIdentity) -> bytes:
    """The line of a row that asked for a vector, with its newline."""
    vector = _json([_number(value) for value in output.embedding.tolist()])
    data = f'[{{"object": "embedding", "index": 0, "embedding": {vector}}}]'
    count = len(output.prompt_token_ids)
    usage = f'{{"prompt_tokens": {count}, "total_tokens": {count}}}'
    return _answer(row, f'"object": "list", "data": {data}, {job.fields}, "usage": {usage}')


def failed_line(bad: BadRow) -> bytes:
    """The line of a row that could not be run, with its newline."""
    custom_id = "null" if bad.custom_id is None else _json(bad.custom_id)
    return (_LINE % (bad.id, custom_id, "null", _json({"code": bad.code, "message": bad.message}))).encode()


def _answer(row: Row, body: str) -> bytes:
    response = f'{{"status_code": 200, "request_id": "req_{row.id}", "body": {{{body}}}}}'
    return (_LINE % (row.id, _json(row.custom_id), response, "null")).encode()


def _choice(row: Row, choice: CompletionOutput) -> str:
    if row.is_chat:
        message = f'"message": {{"role": "assistant", "content": {_json(choice.text)}}}'
        logprobs = None if choice.logprobs is None else {"content": _chat_logprobs(choice)}
    else:
        message = f'"text": {_json(choice.text)}'
        logprobs = None if choice.logprobs is None else _completion_logprobs(choice)
    logprobs_json = "null" if logprobs is None else _json(logprobs)
    ended = "null" if choice.finish_reason is None else f'"{choice.finish_reason}"'
    token_ids = f', "token_ids": {_json(choice.token_ids)}' if row.returns_token_ids else ""
    return f'{{"index": {choice.index}, {message}, "logprobs": {logprobs_json}, "finish_reason": {ended}{token_ids}}}'


def _completion_logprobs(choice: CompletionOutput) -> dict[str, list[Any]]:
    """Four lists with an entry a token. text_offset counts the characters of the tokens before."""
    tokens, chosen, tops, offsets = [], [], [], []
    offset = 0
    for token_id, entry in zip(choice.token_ids, choice.logprobs or (), strict=True):
        name = _name(token_id, entry[token_id])
        tokens.append(name)
        chosen.append(_number(entry[token_id].logprob))
        tops.append(_top_by_name(token_id, entry))
        offsets.append(offset)
        offset += len(entry[token_id].decoded_token or "")
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}


def _top_by_name(chosen: int, entry: dict[int, Logprob]) -> dict[str, float]:
    """Log-probabilities by token text, best first. Where tokens share a text the others go by their id."""
    taken = {_name(chosen, entry[chosen])}
    found: dict[str, float] = {}
    for token_id, logprob in _ranked(entry):
        name = _name(token_id, logprob)
        if token_id != chosen and name in taken:
            name = f"token_id:{token_id}"
        taken.add(name)
        found[name] = _number(logprob.logprob)
    return found


def _chat_logprobs(choice: CompletionOutput) -> list[dict[str, Any]]:
    found = []
    for token_id, entry in zip(choice.token_ids, choice.logprobs or (), strict=True):
        alternatives = [_chat_token(other, logprob) for other, logprob in _ranked(entry)]
        found.append(_chat_token(token_id, entry[token_id]) | {"top_logprobs": alternatives})
    return found


def _chat_token(token_id: int, logprob: Logprob) -> dict[str, Any]:
    """`bytes` is null where the token's text alone does not tell its bytes (part of a character, no tokenizer)."""
    text = logprob.decoded_token
    token_bytes = None if text is None or "\ufffd" in text else list(text.encode())
    return {"token": _name(token_id, logprob), "logprob": _number(logprob.logprob), "bytes": token_bytes}


def _by_token_id(entry: dict[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {
            "logprob": _number(logprob.logprob),
            "rank": logprob.rank,
            "decoded_token": logprob.decoded_token,
        }
        for token_id, logprob in _ranked(entry)
    }


def _ranked(entry: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda item: (-item[1].logprob, item[0]))


def _name(token_id: int, logprob: Logprob) -> str:
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def _number(value: float) -> float:
    """The float rule: nine significant digits, which tell any two float32 apart."""
    return float(f"{value:.9g}") if math.isfinite(value) else _NO_PROBABILITY
