"""Output of a batch job: one line for each line of input, in the OpenAI batch output form.

A line is a function of the row, its tokens and the job: ids are digests, `created` is the job's recorded
start, and floats follow one rule, so an interrupted job writes the same lines as one that was not. What
depends on the run (cached tokens, times) is not in a line. Beside an answer's body stands the line's record
(`line_record`). A row that failed has `response: null` and an `error` with code and message. If the input was refused,
the error has its line number, for lack of a custom_id.
"""

import dataclasses
import functools
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ferrum_jax.batch.input.formats import BadRow, Row
from ferrum_jax.batch.journal.line_record import (
    REQUEST,
    images_digest,
    json_of,
    line_of,
    recorded_response,
    tokens_digest,
)
from ferrum_jax.core.outputs import RequestOutput
from ferrum_jax.inputs.prompt import joined_text, take_apart
from ferrum_jax.openai.answers import TextForm, text_answer
from ferrum_jax.openai.asked import CLASSIFIES, EMBEDS, GENERATES, REWARDS, SCORES, TRANSCRIBES
from ferrum_jax.openai.readings import ReadingOutput, reading_answer
from ferrum_jax.tasks.transcription.forms import as_object


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobLabel:
    """Fields of all lines of a job. created: its first start, in seconds since 1970. fingerprint: of its identity."""

    model: str
    created: int
    fingerprint: str

    @functools.cached_property
    def fields(self) -> Mapping[str, Any]:
        """The fields as they stand in every line."""
        return self._named(self.model)

    def fields_of(self, row: Row) -> Mapping[str, Any]:
        """The fields of a row's line, which carries the adapter's name where it has one."""
        return self.fields if row.adapter is None else self._named(row.adapter)

    def _named(self, name: str) -> Mapping[str, Any]:
        return {"created": self.created, "model": name, "system_fingerprint": self.fingerprint}


def completed_line(row: Row, outputs: Sequence[RequestOutput], job: JobLabel) -> bytes:
    """The line of a row that ran, with its newline. outputs: one per prompt; choices are numbered prompt by prompt."""
    form = TextForm(
        id=row.id,
        is_chat=row.is_chat,
        options=row.how.form,
        before=_continued(row),
        echo=row.how.echo,
        generates=row.how.generates,
        returns_token_ids=row.returns_token_ids,
    )
    head = {"id": f"{form.kind}-{row.id}", "object": form.object, **job.fields_of(row)}
    choices = [choice.token_ids for output in outputs for choice in output.outputs]
    images = [digest for output in outputs for digest in output.outputs[0].image_digests]
    digests = {"tokens": tokens_digest(choices)} | ({"images": images_digest(images)} if images else {})
    return _answer(row, text_answer(form, outputs, head), _requested(row, outputs) | digests)


def texts_of(line: bytes) -> list[str]:
    """The texts that a line's answer holds: of its choices, where it has some."""
    choices = json.loads(line)["response"]["body"].get("choices", ())
    found = [choice.get("text") or choice.get("message", {}).get("content") for choice in choices]
    return [text for text in found if isinstance(text, str)]


def _continued(row: Row) -> str:
    """The beginning of a chat's answer: with echo, the last message if it is the assistant's; otherwise nothing."""
    last: Any = take_apart(row.prompt).content[-1] if row.is_chat and row.how.echo else {}
    return (joined_text(last["content"]) or "") if last.get("role") == "assistant" else ""


def answered_line(row: Row, outputs: Sequence[Any], job: JobLabel) -> bytes:
    """The line of a row whose prompts were all answered. Raises ValueError for vectors shorter than it asks for."""
    return _LINES[row.kind](row, outputs, job)


def reading_line(row: Row, outputs: Sequence[ReadingOutput], job: JobLabel) -> bytes:
    """The line of a row whose texts were read, with its newline. Raises ValueError as `reading_answer`."""
    documents = [prompt["document"] for prompt in row.prompts] if row.kind == SCORES else ()
    return _answer(row, reading_answer(row.how, outputs, job.fields, documents), _requested(row, ()))


def transcribed_line(row: Row, outputs: Sequence[RequestOutput], job: JobLabel) -> bytes:
    """The line of a sound that was written down, with its newline. A form that is a text stands in the field text.

    outputs: of its windows.
    """
    found = row.how.heard.transcription([output.outputs[0] for output in outputs])
    body = as_object(found, row.how.response_format, row.how.how.temperature)
    answer = {"text": body} if isinstance(body, str) else body
    return _answer(row, answer, _requested(row, outputs) | {"tokens": tokens_digest([found.token_ids])})


_LINES: Mapping[int, Callable[[Row, Sequence[Any], JobLabel], bytes]] = {
    GENERATES: completed_line,
    TRANSCRIBES: transcribed_line,
    **dict.fromkeys((EMBEDS, SCORES, CLASSIFIES, REWARDS), reading_line),
}


def failed_line(bad: BadRow) -> bytes:
    """The line of a row that could not be run, with its newline."""
    error = {"code": bad.code, "message": bad.message} | ({} if bad.line is None else {"line": bad.line})
    return line_of(bad.id, bad.name, "null", json_of(error))


def reused_line(row: Row, body: Mapping[str, Any], digests: Mapping[str, str], job: JobLabel) -> bytes:
    """The line that the row would have if it ran here and had this answer. body, digests: of another job's line."""
    own = {**job.fields_of(row), "id": f"{body.get('id', '').rpartition('-')[0]}-{row.id}"}
    return _answer(row, {**body, **{name: value for name, value in own.items() if name in body}}, digests)


def request_digest(row: Row, read: Iterable[tuple[Sequence[int], Iterable[str]]]) -> str:
    """32 hex digits of what decides an answer beside the model. read: token ids and digests of media of each prompt."""
    drawn = row.seeds if row.asked.temperature else ()
    state = hashlib.blake2b(f"{row.asks} {row.adapter} {drawn}".encode(), digest_size=16)
    for token_ids, media in read:
        state.update(len(token_ids).to_bytes(8, "little") + array("q", token_ids).tobytes())
        state.update(" ".join(media).encode())
    return state.hexdigest()


def _requested(row: Row, outputs: Sequence[RequestOutput]) -> dict[str, str]:
    """The digest of the request, by the name that it has in a line; nothing of a row that was parsed only once."""
    read = ((output.prompt_token_ids, output.outputs[0].image_digests) for output in outputs)
    return {REQUEST: request_digest(row, read)} if row.asks else {}


def _answer(row: Row, body: Mapping[str, Any], digests: Mapping[str, str]) -> bytes:
    """digests: of the request, and of what was generated."""
    seeds = row.seeds[0] if len(set(row.seeds)) == 1 else list(row.seeds)
    said = {**({"seed": seeds} if row.seeds else {}), **digests}
    return line_of(row.id, row.custom_id, recorded_response(row.id, row.custom_id, body, said), "null")
