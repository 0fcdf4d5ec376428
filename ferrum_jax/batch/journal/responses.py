"""Output of a batch job: one line for each line of input, in the OpenAI batch output form.

A line is a function of the row, its tokens and the job: ids are digests, `created` is the job's recorded
start, and floats follow one rule, so an interrupted job writes the same lines as one that was not. What
depends on the run (cached tokens, times) is not in a line. Beside an answer's body stands the line's record
(`line_record`). A row that failed has `response: null` and an `error` with code and message. If the input was refused,
the error has its line number, for lack of a custom_id.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrum_jax.batch.input.formats import (
    CLASSIFIES,
    EMBEDS,
    GENERATES,
    REWARDS,
    SCORE_URL,
    SCORES,
    TRANSCRIBES,
    BadRow,
    Row,
)
from ferrum_jax.batch.journal.line_record import images_digest, json_of, line_of, recorded_response, tokens_digest
from ferrum_jax.core.outputs import ClassOutput, EmbeddingOutput, RequestOutput, RewardOutput, ScoreOutput
from ferrum_jax.inputs.prompt import joined_text, take_apart
from ferrum_jax.openai.answers import (
    TextForm,
    classes_answer,
    ranking,
    read_usage,
    rewards_answer,
    text_answer,
    vectors_answer,
)
from ferrum_jax.openai.logprob_forms import number
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
    return _answer(row, text_answer(form, outputs, head), **digests)


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


def embedding_line(row: Row, outputs: Sequence[EmbeddingOutput], job: JobLabel) -> bytes:
    """The line of a row that asked for vectors, with its newline. outputs: of its texts.

    Raises ValueError where it asks for more dimensions than they have.
    """
    vectors = [output.cut(row.how.form.dimensions) for output in outputs]
    return _answer(row, vectors_answer(vectors, _num_tokens(outputs), job.fields, as_base64=row.how.form.as_base64))


def score_line(row: Row, outputs: Sequence[ScoreOutput], job: JobLabel) -> bytes:
    """The line of a row that asked for scores or a ranking, with its newline. outputs: of its pairs."""
    scores = [number(output.score) for output in outputs]
    if row.url == SCORE_URL:
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
        answer: dict[str, Any] = {"object": "list", "data": data}
    else:
        documents = [prompt["document"] for prompt in row.prompts] if row.how.form.shows_documents else None
        answer = {"results": ranking(scores, row.how.form.top_n, documents)}
    return _answer(row, {**answer, **job.fields, "usage": read_usage(_num_tokens(outputs))})


def transcribed_line(row: Row, outputs: Sequence[RequestOutput], job: JobLabel) -> bytes:
    """The line of a sound that was written down, with its newline. A form that is a text stands in the field text.

    outputs: of its windows.
    """
    found = row.how.heard.transcription([output.outputs[0] for output in outputs])
    body = as_object(found, row.how.response_format, row.how.how.temperature)
    answer = {"text": body} if isinstance(body, str) else body
    return _answer(row, answer, tokens=tokens_digest([found.token_ids]))


def class_line(row: Row, outputs: Sequence[ClassOutput], job: JobLabel) -> bytes:
    """The line of a row that asked for classes, with its newline. outputs: of its texts."""
    found = [(output.label, output.probs) for output in outputs]
    return _answer(row, classes_answer(found, _num_tokens(outputs), job.fields))


def reward_line(row: Row, outputs: Sequence[RewardOutput], job: JobLabel) -> bytes:
    """The line of a row that asked for rewards, with its newline. outputs: of its texts."""
    return _answer(row, rewards_answer([output.reward for output in outputs], _num_tokens(outputs), job.fields))


_LINES: Mapping[int, Callable[[Row, Sequence[Any], JobLabel], bytes]] = {
    GENERATES: completed_line,
    EMBEDS: embedding_line,
    SCORES: score_line,
    TRANSCRIBES: transcribed_line,
    CLASSIFIES: class_line,
    REWARDS: reward_line,
}


def _num_tokens(outputs: Sequence[ClassOutput | EmbeddingOutput | RewardOutput | ScoreOutput]) -> int:
    return sum([len(output.prompt_token_ids) for output in outputs])


def failed_line(bad: BadRow) -> bytes:
    """The line of a row that could not be run, with its newline."""
    error = {"code": bad.code, "message": bad.message} | ({} if bad.line is None else {"line": bad.line})
    return line_of(bad.id, bad.name, "null", json_of(error))


def _answer(row: Row, body: Mapping[str, Any], **digests: str) -> bytes:
    """digests: of what was generated."""
    seeds = row.seeds[0] if len(set(row.seeds)) == 1 else list(row.seeds)
    said = {**({"seed": seeds} if row.seeds else {}), **digests}
    return line_of(row.id, row.custom_id, recorded_response(row.id, row.custom_id, body, said), "null")
