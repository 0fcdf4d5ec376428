"""Input of a batch job: one JSONL line becomes one `Row`, or one `BadRow` that says what is wrong with it.

Two forms are read. The OpenAI batch form is `{custom_id, method: "POST", url, body}`; the short form is the
same body with `custom_id` beside its fields, and with `prompt_token_ids` as another way to give a prompt.
A row that asks for a vector has the url of embeddings, or `input` in the short form; rows of scores and rankings are
told by `text_1` and `query` (`reading_rows.py`). A list of texts, or of lists of
token ids, counts as several prompts, whose choices stand in one answer.
Identity: a row's digest covers its whole content, custom_id included, so equal lines have equal ids in every
process, and a changed line has another id. Only messages depend on the line's number.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.batch.input.lines import LineError, canonical, custom_id_of, load_line, refuse_unreadable
from ferrum_jax.batch.input.reading_rows import (
    EMBEDDINGS_URL,
    READING_URLS,
    RERANK_URL,
    SCORE_URL,
    ReadingForm,
    form_of,
    pairs_of,
)
from ferrum_jax.openai.answer_options import PLAIN, AnswerOptions, answer_options
from ferrum_jax.openai.parameters import (
    LABELS,
    adapter_of,
    flag,
    model_of,
    packed_ids,
    prompt_options,
    prompts_of,
    sampling_values,
    with_defaults,
    with_options,
)
from ferrum_jax.prompt import Content, Prompt, with_adapter
from ferrum_jax.quoting import bounded, quoted

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
_CONTENT_OF = {
    COMPLETIONS_URL: "prompt",
    CHAT_URL: "messages",
    EMBEDDINGS_URL: "input",
    SCORE_URL: "text_1",
    RERANK_URL: "query",
}
_URL_OF = {
    "prompt": COMPLETIONS_URL,
    "messages": CHAT_URL,
    "prompt_token_ids": COMPLETIONS_URL,
    "input": EMBEDDINGS_URL,
    "text_1": SCORE_URL,
    "query": RERANK_URL,
}
GENERATES, EMBEDS, SCORES = range(3)  # what an engine is asked for

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
_WHOLE = ReadingForm()
_NO_SAMPLING = SamplingParams(max_tokens=1)  # for a row that reads texts


class Row(NamedTuple):
    """One request of a job. `id` is 32 hex digits that digest the whole line's content."""

    id: str
    custom_id: str
    prompts: tuple[
        Any, ...
    ]  # Prompts, or pairs of texts; usually one; the answer lists all choices of the first, then those of the next
    asked: SamplingParams  # without the seed; one object for rows that ask for the same
    seeds: tuple[int, ...]  # one for each prompt; none if nothing is generated
    url: str  # what is asked for: a completion, a chat's answer, an embedding, a score or a ranking
    returns_token_ids: bool
    model: str | None = None  # that the row asks for; None accepts the job's
    echo: bool = False  # the answer begins with the prompt, or in a chat with the message that it continues
    generates: bool = True  # False for an echo alone, which leaves out the one token that is drawn
    adapter: str | None = None  # that its prompts name
    form: ReadingForm = _WHOLE  # of the answer of a row that reads texts
    answer: AnswerOptions = PLAIN  # how that of a row that generates is written

    @property
    def prompt(self) -> Prompt:
        """The prompt of a row that has one."""
        (prompt,) = self.prompts
        return prompt

    @property
    def params(self) -> SamplingParams:
        """The parameters of the first prompt."""
        return self.params_of(0)

    def params_of(self, place: int) -> SamplingParams:
        """The parameters of a prompt, by its place."""
        return self.asked.with_seed(self.seeds[place]) if self.seeds else self.asked

    def with_adapter(self, name: str) -> Row:
        """The row for the adapter of this name."""
        return self._replace(prompts=tuple(with_adapter(prompt, name) for prompt in self.prompts), adapter=name)

    @property
    def is_chat(self) -> bool:
        return self.url == CHAT_URL

    @property
    def kind(self) -> int:
        """GENERATES, EMBEDS or SCORES."""
        return GENERATES if self.url not in READING_URLS else EMBEDS if self.url == EMBEDDINGS_URL else SCORES


class _BadFields(NamedTuple):
    id: str
    custom_id: str | None
    code: str
    message: str
    line: int | None = None


class BadRow(_BadFields):
    """A line that cannot be run. custom_id: what the line says, None where it says none.

    message: of a bounded length, whatever the line holds. line: its number, from 1; None for a row that failed while it
    ran.
    """

    __slots__ = ()

    def __new__(cls, id: str, custom_id: str | None, code: str, message: str, line: int | None = None) -> BadRow:
        return super().__new__(cls, id, custom_id, code, bounded(message), line)

    @property
    def name(self) -> str | None:
        """The custom_id of its output line: its own, or else "line-N"."""
        return f"line-{self.line}" if self.custom_id is None and self.line is not None else self.custom_id


def parse_line(
    raw: bytes,
    line_number: int,
    digest: str | None = None,
    *,
    seed: int = 0,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
) -> Row | BadRow:
    """The row of one line that is not blank. line_number counts from 1. Never raises for what a line holds.

    A row without a seed gets one from `seed` (the job's) and its own digest, so that neither its
    neighbours nor a restart change what is drawn. digest: of the line, if it was parsed before. defaults: the job's
    sampling fields, as a body has them, for rows that do not give them.
    """
    custom_id = None
    try:
        line = load_line(raw)
        custom_id = custom_id_of(line)
        packed = packed_ids(line.get("prompt_token_ids"))
        if digest is None:
            digest = _digest(canonical(line, packed))
    except LineError as error:
        message = f"line {line_number}: {error}"
        said = error.said if custom_id is None else custom_id if _is_text(custom_id) else None
        digest = line_digest(raw, line_number)
        return BadRow(id=digest, custom_id=said, code=error.code, message=message, line=line_number)
    try:
        refuse_unreadable(line)
        key, given, rest = _openai_form(line) if "body" in line or "url" in line else _short_form(line)
        url = _URL_OF[key]
        asked = _asked(url, with_defaults(rest, defaults) if defaults and url not in READING_URLS else rest)
        contents = (packed,) if packed is not None and key == "prompt_token_ids" else _contents(key, given, rest)
        seeds = () if url in READING_URLS else _seeds(seed, digest, rest.get("seed"), len(contents))
        if seeds:
            asked.params.with_seed(seeds[0])  # raises for what is not a seed
        prompts = tuple(with_options(content, asked.options) for content in contents) if asked.options else contents
        model, adapter = model_of(rest), adapter_of(rest)
    except ValueError as error:
        message = f"line {line_number}: {error}"
        return BadRow(id=digest, custom_id=custom_id, code="invalid_request", message=message, line=line_number)
    wants_ids = asked.returns_token_ids
    row = Row(
        id=digest,
        custom_id=custom_id,
        prompts=prompts,
        asked=asked.params,
        seeds=seeds,
        url=url,
        returns_token_ids=_returns_ids(url, contents, asked.params) if wants_ids is None else wants_ids,
        echo=asked.echo,
        generates=asked.generates,
        model=model,
        form=asked.form,
        answer=asked.answer,
    )
    return row if adapter is None else row.with_adapter(adapter)


def duplicate_row(raw: bytes, line_number: int, custom_id: str, first_line_number: int) -> BadRow:
    """The error for a line whose custom_id an earlier line has. Both output lines carry that custom_id; the error's
    line has no response and names this line of input."""
    message = (
        f"line {line_number}: custom_id {quoted(custom_id)} is already that of line {first_line_number}; "
        "give every row a custom_id of its own"
    )
    digest = line_digest(raw, line_number)
    return BadRow(id=digest, custom_id=custom_id, code="duplicate_custom_id", message=message, line=line_number)


def foreign_row(raw: bytes, line_number: int, row: Row, names: Sequence[str], adapters: Sequence[str]) -> BadRow:
    """The error for a row that asks for what the job has not. names: those of its model. adapters: those it has.

    Its id differs from the row's, so that an earlier answer by the other model is not taken for this row's.
    """
    if row.model in adapters and row.adapter is None:
        why = f"model is {quoted(row.model)}, an adapter, and vectors are made without one; give {quoted(names[0])}"
    elif row.model in adapters and row.adapter != row.model:
        why = (
            f"model is {quoted(row.model)} and adapter is {quoted(row.adapter)}, another one; give the row one of them"
        )
    elif row.adapter is not None and row.adapter not in adapters:
        there = f"this job has {', '.join(map(repr, adapters))}" if adapters else "this job has none"
        why = f"adapter is {quoted(row.adapter)}, and {there}; give the job --adapter {row.adapter}=DIR"
    else:
        why = (
            f"model is {quoted(row.model)}, and this job runs {quoted(names[0])}; give the row one of "
            f"{', '.join(map(repr, (*names, *adapters)))}, or the job --served-model-name {row.model}"
        )
    return BadRow(
        id=line_digest(raw, line_number),
        custom_id=row.custom_id,
        code="model_not_found",
        message=f"line {line_number}: {why}",
        line=line_number,
    )


def own_name(row: Row | BadRow) -> str | None:
    """The custom_id that no other row may have; None for a line that is not read as a row."""
    is_read = isinstance(row, Row) or row.code == "invalid_request"
    return row.custom_id if is_read else None


def _is_text(text: str) -> bool:
    """Whether the text can be written as UTF-8, which half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def line_digest(raw: bytes, line_number: int) -> str:
    """The id of a line that has no custom_id of its own: 32 hex digits from its number and bytes."""
    return _digest(b"line %d\n" % line_number + raw.strip())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _seeds(seed: int, digest: str, own: Any, count: int) -> tuple[int, ...]:
    """The seed of each prompt of a row: its own for all, or one for each from the job's and the row's digest."""
    if own is not None:
        return (own,) * count
    return tuple(_row_seed(f"{seed} {digest} {i}" if i else f"{seed} {digest}") for i in range(count))


def _row_seed(content: str) -> int:
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What a row asks for, apart from its content and its seed."""

    params: SamplingParams
    returns_token_ids: bool | None  # None leaves it to the content
    options: Mapping[str, Any]  # of the prompt
    echo: bool = False
    generates: bool = True
    form: ReadingForm = _WHOLE
    answer: AnswerOptions = PLAIN


def _contents(key: str, given: object, rest: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row asks about. given: the value of its field `key`."""
    url = _URL_OF[key]
    return pairs_of(url, {**rest, key: given}) if url in (SCORE_URL, RERANK_URL) else prompts_of(key, given)


def _asked(url: str, rest: Mapping[str, Any]) -> _Asked:
    """What these fields ask for; the same object for equal plain fields, since most rows of a job ask for the same."""
    fields = {key: value for key, value in rest.items() if key != "seed" and key not in LABELS}
    try:
        return _known(url, tuple(fields.items()), tuple(map(type, fields.values())))
    except TypeError:  # a list or an object, which cannot be looked up
        return _understood(url, fields)


@functools.lru_cache(maxsize=1024)
def _known(url: str, fields: tuple[tuple[str, Any], ...], _types: tuple[type, ...]) -> _Asked:
    """What these fields ask for. _types: part of the key, because 1, 1.0 and true are equal but not all allowed."""
    return _understood(url, dict(fields))


def _understood(url: str, fields: Mapping[str, Any]) -> _Asked:
    if url in READING_URLS:
        options = prompt_options(fields, is_chat=False) if url == EMBEDDINGS_URL else {}
        form = form_of(url, fields)
        return _Asked(params=_NO_SAMPLING, returns_token_ids=False, options=options, form=form)
    params = SamplingParams.from_dict(sampling_values(fields, is_chat=url == CHAT_URL))
    echo = flag(fields, "echo") is True
    return _Asked(
        params=params,
        returns_token_ids=flag(fields, "return_token_ids"),
        options=prompt_options(fields, is_chat=url == CHAT_URL),
        echo=echo,
        generates=not (params.echo and fields.get("max_tokens") == 0),
        answer=answer_options(fields, params.logprobs),
    )


def _returns_ids(url: str, contents: tuple[Content, ...], params: SamplingParams) -> bool:
    """Whether token ids are returned by default: to a row that gives token ids, or that wants no text."""
    return (url == COMPLETIONS_URL and isinstance(contents[0], array)) or not params.detokenize


def _short_form(line: Mapping[str, Any]) -> tuple[str, object, dict[str, Any]]:
    """The field with the content, the content, and the other fields."""
    rest = dict(line)
    del rest["custom_id"]
    given = [(key, value) for key in _URL_OF if (value := rest.pop(key, None)) is not None]
    if len(given) != 1:
        what = f"has {' and '.join(key for key, _ in given)}" if given else "has no prompt"
        raise ValueError(f"{what}; give exactly one of {', '.join(_URL_OF)}")
    return *given[0], rest


def _openai_form(line: Mapping[str, Any]) -> tuple[str, object, dict[str, Any]]:
    """The field with the content, the content, and the other fields of the body."""
    unknown = sorted(set(line) - {"custom_id", "method", "url", "body"})
    if unknown:
        raise ValueError(f"unknown fields {quoted(unknown)} beside body; put parameters into body")
    if line.get("method") != "POST":
        raise ValueError(f"method is {quoted(line.get('method'))}; it must be 'POST'")
    url = line.get("url")
    if not isinstance(url, str) or url not in _CONTENT_OF:
        raise ValueError(f"url is {quoted(url)}; it must be one of {', '.join(map(repr, _CONTENT_OF))}")
    body = line.get("body")
    if not isinstance(body, dict):
        raise ValueError(f"body is {quoted(body)}; it must be an object with the request's fields")
    needed = _CONTENT_OF[url]
    if body.get(needed) is None:
        raise ValueError(f"body has no {needed}, which {url} needs")
    rest = dict(body)
    return needed, rest.pop(needed), rest
