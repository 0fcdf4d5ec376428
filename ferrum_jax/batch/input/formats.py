"""Input of a batch job: one JSONL line becomes one `Row`, or one `BadRow` that says what is wrong with it.

Two forms are read. The OpenAI batch form is `{custom_id, method: "POST", url, body}`; the short form is the
same body with `custom_id` beside its fields, and with `prompt_token_ids` as another way to give a prompt.
A short row is told by the field that says what it is about. What a body asks for is read as over HTTP
(`openai/bodies.py`). A list of texts, or of lists of token ids, counts as several prompts, whose choices stand in one
answer.
Identity: a row's digest covers its whole content, custom_id included, so equal lines have equal ids in every
process, and a changed line has another id; but fields of PACE, which change no answer, are no part of it. Only
messages depend on the line's number.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ferrum_jax.batch.input.lines import LineError, canonical, custom_id_of, load_line, refuse_unreadable
from ferrum_jax.inputs.prompt import Prompt, take_apart, with_adapter
from ferrum_jax.io.error_text import bounded, quoted
from ferrum_jax.openai.asked import GENERATES, Asked, AskedScores, AskedSound, AskedText
from ferrum_jax.openai.bodies import how_of, sides_of, with_options
from ferrum_jax.openai.body_fields import LABELS, ROW_BODIES, SOUNDS, TEXTS, given
from ferrum_jax.openai.body_rules import rules_of
from ferrum_jax.openai.contents import packed_ids, prompts_of
from ferrum_jax.openai.readings import contents_of
from ferrum_jax.openai.sampling_fields import with_defaults
from ferrum_jax.sampling_params import PACE, SamplingParams

SCORE_URL = "/v1/score"
CONTENTS = {  # field with what a row is about -> url
    "prompt": "/v1/completions",
    "messages": "/v1/chat/completions",
    "prompt_token_ids": "/v1/completions",  # of the short form alone
    "input": "/v1/embeddings",
    "text_1": SCORE_URL,
    "query": "/v1/rerank",
    "file": "/v1/audio/transcriptions",
}
_CONTENT_OF = {url: field for field, url in reversed(CONTENTS.items())} | {
    "/v1/audio/translations": "file",
    "/classify": "input",
    "/pooling": "input",
}
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
_PACE_TYPES = {"speculative": (bool, type(None)), "priority": (int, type(None))}
_OF_ROWS = LABELS | {"seed", "priority"}  # fields in which rows that ask alike may differ
_UNASKED = _OF_ROWS | PACE | {"adapter"}


class Row(NamedTuple):
    """One request of a job.

    id: 32 hex digits that digest the whole line's content. prompts: Prompts, or pairs of texts; usually one; the answer
    lists all choices of the first, then of the next. how: the request's parameters, one object for equal ones.
    A sound is named by its URL, or by a path below the root, until it is read; then its prompts are its windows.
    seeds: one for each prompt; none if nothing is generated. model: that the row asks for; None accepts the job's.
    adapter: the name in its prompts. priority: lower runs first. asks: digests its content and fields but for names and
    seed, in hexadecimal; "" of a row that is parsed for the first time.
    """

    id: str
    custom_id: str
    prompts: tuple[Any, ...]
    how: Any  # AskedText or another kind of Asked
    seeds: tuple[int, ...]
    url: str
    model: str | None = None
    adapter: str | None = None
    priority: int = 0
    asks: str = ""

    @property
    def prompt(self) -> Prompt:
        """The prompt of a row that has one."""
        (prompt,) = self.prompts
        return prompt

    @property
    def asked(self) -> SamplingParams:
        """The parameters, without the seed."""
        return self.how.params

    @property
    def params(self) -> SamplingParams:
        """The parameters of the first prompt."""
        return self.params_of(0)

    def params_of(self, place: int) -> SamplingParams:
        """The parameters of a prompt, by its place."""
        return self.asked.with_seed(self.seeds[place]) if self.seeds else self.asked

    def over(self, generation: Mapping[str, Any]) -> Row:
        """The row, for fields that it does not give with the model's own defaults."""
        if self.kind != GENERATES:
            return self
        return self._replace(how=dataclasses.replace(self.how, params=self.asked.over(generation)))

    def with_adapter(self, name: str) -> Row:
        """The row for the adapter of this name."""
        return self._replace(prompts=tuple(with_adapter(prompt, name) for prompt in self.prompts), adapter=name)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.how, AskedText) and self.how.is_chat

    @property
    def returns_token_ids(self) -> bool:
        """By default to a row of a completion that gives token ids, and to one that wants no text."""
        if not isinstance(self.how, AskedText):
            return False
        by_default = not self.asked.detokenize or isinstance(take_apart(self.prompts[0]).content, array)
        return by_default if self.how.returns_token_ids is None else self.how.returns_token_ids

    @property
    def kind(self) -> int:
        """GENERATES, EMBEDS, SCORES, TRANSCRIBES, CLASSIFIES or REWARDS."""
        return self.how.kind

    def with_windows(self, heard: Any) -> Row:
        """The row of a sound that was read, a HeardSound. Its windows have its seed."""
        prompts = tuple([each.prompt for each in heard.requests])
        how = dataclasses.replace(self.how, params=heard.requests[0].sampling, heard=heard)
        return self._replace(prompts=prompts, how=how, seeds=self.seeds * len(prompts))


class _BadFields(NamedTuple):
    id: str
    custom_id: str | None
    code: str
    message: str
    line: int | None = None


class BadRow(_BadFields):
    """A line that cannot be run. custom_id: the line's own, or None.

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
    custom_id, is_known = None, digest is not None
    try:
        line = load_line(raw)
        custom_id = custom_id_of(line)
        packed = packed_ids(line.get("prompt_token_ids"))
        if digest is None:
            digest = _digest(canonical(_that_answers(line), packed))
    except LineError as error:
        said = error.said if custom_id is None else custom_id if _is_text(custom_id) else None
        return _bad_line(line_digest(raw, line_number), said, line_number, error, code=error.code)
    try:
        refuse_unreadable(line)
        key, content, rest = _openai_form(line) if "body" in line or "url" in line else _short_form(line)
        url = line["url"] if "url" in line else CONTENTS[key]
        kind = ROW_BODIES[url]
        generates = kind in TEXTS
        fields = with_defaults(rest, defaults) if defaults and generates else rest
        how = _how(kind, fields)
        prompts = _prompts(key, content if packed is None else packed, rest, how)
        seeds = _seeds(seed, digest, rest.get("seed"), len(prompts)) if generates or kind in SOUNDS else ()
        if seeds:
            how.params.with_seed(seeds[0])  # raises for what is not a seed
        asked = {name: value for name, value in fields.items() if name not in _UNASKED}
        asks = _digest(canonical({**asked, key: content, "url": url}, packed)) if is_known else ""
        model, priority = given(rest, "model"), given(rest, "priority") or 0
        row = Row(digest, custom_id, prompts, how, seeds, url, model, None, priority, asks)
        adapter = given(rest, "adapter")
    except ValueError as error:
        return _bad_line(digest, custom_id, line_number, error, code="invalid_request")
    return row if adapter is None else row.with_adapter(adapter)


def duplicate_row(raw: bytes, line_number: int, custom_id: str, first_line_number: int) -> BadRow:
    """The error for a line whose custom_id an earlier line has. Both output lines carry that custom_id; the error's
    line has no response and names this line of input."""
    there = f"custom_id {quoted(custom_id)} is already that of line {first_line_number}"
    why = f"{there}; give every row a custom_id of its own"
    return _bad_line(line_digest(raw, line_number), custom_id, line_number, why, code="duplicate_custom_id")


def foreign_row(raw: bytes, line_number: int, row: Row, names: Sequence[str], adapters: Sequence[str]) -> BadRow:
    """The error for a row that asks for what the job has not. names: its model's. adapters: the loaded ones.

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
    return _bad_line(line_digest(raw, line_number), row.custom_id, line_number, why, code="model_not_found")


def _bad_line(digest: str, custom_id: str | None, line_number: int, why: object, *, code: str) -> BadRow:
    return BadRow(digest, custom_id, code, f"line {line_number}: {why}", line_number)


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


def _that_answers(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """The line without what changes no answer, in whichever form it is."""
    body = line.get("body")
    if not isinstance(body, dict):
        return _without_pace(line)
    return line if PACE.isdisjoint(body) else {**line, "body": _without_pace(body)}


def _without_pace(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    if PACE.isdisjoint(fields):
        return fields
    return {name: value for name, value in fields.items() if name not in PACE or type(value) not in _PACE_TYPES[name]}


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _seeds(seed: int, digest: str, own: Any, count: int) -> tuple[int, ...]:
    """The seed of each prompt of a row: its own for all, or one for each from the job's and the row's digest."""
    if own is not None:
        return (own,) * count
    return tuple(_row_seed(f"{seed} {digest} {i}" if i else f"{seed} {digest}") for i in range(count))


def _row_seed(content: str) -> int:
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little")


def _how(kind: str, rest: Mapping[str, Any]) -> Any:
    """How these fields ask; the same object for equal plain fields, since most rows of a job ask for the same."""
    fields = tuple([(key, value) for key, value in rest.items() if key not in _OF_ROWS])
    types = tuple([type(value) for _, value in fields])
    try:
        return _known(kind, fields, types)
    except TypeError:  # a list or an object, which cannot be looked up
        return _known.__wrapped__(kind, fields, types)


@functools.lru_cache(maxsize=1024)
def _known(kind: str, fields: tuple[tuple[str, Any], ...], _types: tuple[type, ...]) -> Any:
    """How these fields ask. _types: part of the key, because 1, 1.0 and true are equal but not all allowed."""
    body = dict(fields)
    rules_of(kind, "row").refuse(body)
    return how_of(kind, body)


def _prompts(key: str, given: Any, rest: Mapping[str, Any], how: Asked) -> tuple[Any, ...]:
    """A row's prompts, each with its media and salt. given: the value of the row's field `key`."""
    if isinstance(how, AskedSound):
        if not isinstance(given, str) or not given:
            raise ValueError(f"file is {quoted(given)}; it must be a URL, or a path below the root")
        return (given,)
    if isinstance(how, AskedScores):
        left, right = sides_of({**rest, key: given}, ranks=how.ranks)
        return tuple(contents_of(dataclasses.replace(how, left=left, right=right)))
    contents = (given,) if isinstance(given, array) else prompts_of(key, given)
    return tuple([with_options(content, how.options) for content in contents]) if how.options else contents


def _short_form(line: Mapping[str, Any]) -> tuple[str, object, dict[str, Any]]:
    """The field with the content, the content, and the other fields."""
    rest = dict(line)
    del rest["custom_id"]
    found = [(key, value) for key in CONTENTS if (value := rest.pop(key, None)) is not None]
    if len(found) != 1:
        what = f"has {' and '.join(key for key, _ in found)}" if found else "has no prompt"
        raise ValueError(f"{what}; give exactly one of {', '.join(CONTENTS)}")
    return *found[0], rest


def _openai_form(line: Mapping[str, Any]) -> tuple[str, object, dict[str, Any]]:
    """The field with the content, the content, and the other fields of the body."""
    unknown = sorted(set(line) - {"custom_id", "method", "url", "body"})
    if unknown:
        raise ValueError(f"unknown fields {quoted(unknown)} beside body; put parameters into body")
    if line.get("method") != "POST":
        raise ValueError(f"method is {quoted(line.get('method'))}; it must be 'POST'")
    url = line.get("url")
    if not isinstance(url, str) or url not in ROW_BODIES:
        raise ValueError(f"url is {quoted(url)}; it must be one of {', '.join(map(repr, ROW_BODIES))}")
    body = line.get("body")
    if not isinstance(body, dict):
        raise ValueError(f"body is {quoted(body)}; it must be an object with the request's fields")
    needed = _CONTENT_OF[url]
    if body.get(needed) is None:
        raise ValueError(f"body has no {needed}, which {url} needs")
    rest = dict(body)
    return needed, rest.pop(needed), rest
