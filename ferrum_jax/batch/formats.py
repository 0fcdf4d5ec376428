"""Input of a batch job: one JSONL line becomes one `Row`, or one `BadRow` that says what is wrong with it.

Two forms are read. The OpenAI batch form is `{custom_id, method: "POST", url, body}`; the short form is the
same body with `custom_id` beside its fields, and with `prompt_token_ids` as another way to give a prompt.
A row that asks for a vector has the url of embeddings, or `input` in the short form.
Identity: a row's digest covers its whole content, custom_id included, so equal lines have equal ids in every
process, and a changed line has another. Nothing depends on the line's number, save in messages.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

from ferrum_jax.batch.lines import LineError, canonical, custom_id_of, load_line
from ferrum_jax.batch.parameters import (
    LABELS,
    flag,
    messages_of,
    packed_ids,
    prompt_of,
    refuse_unknown_for_embedding,
    sampling_values,
    token_ids_of,
    with_salt,
)
from ferrum_jax.prompt import Prompt
from ferrum_jax.request import SamplingParams

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
EMBEDDINGS_URL = "/v1/embeddings"
_CONTENT_OF = {COMPLETIONS_URL: "prompt", CHAT_URL: "messages", EMBEDDINGS_URL: "input"}
_URL_OF = {
    "prompt": COMPLETIONS_URL,
    "messages": CHAT_URL,
    "prompt_token_ids": COMPLETIONS_URL,
    "input": EMBEDDINGS_URL,
}
_CONTENTS = {"prompt": prompt_of, "messages": messages_of, "prompt_token_ids": token_ids_of, "input": prompt_of}

_NO_SAMPLING = SamplingParams(max_tokens=1)  # of a row that asks for a vector


class Row(NamedTuple):
    """One request of a job. `id` is 32 hex digits that digest the whole line's content."""

    id: str
    custom_id: str
    prompt: Prompt
    asked: SamplingParams  # without the seed; one object for rows that ask for the same
    seed: int | None  # None where a vector is asked for
    url: str  # what is asked for: a completion, a chat's answer or an embedding
    returns_token_ids: bool

    @property
    def params(self) -> SamplingParams:
        return self.asked if self.seed is None else self.asked.with_seed(self.seed)

    @property
    def is_chat(self) -> bool:
        return self.url == CHAT_URL

    @property
    def is_embedding(self) -> bool:
        return self.url == EMBEDDINGS_URL


class BadRow(NamedTuple):
    """A line that cannot be run. custom_id is None where the line has none that is its own."""

    id: str
    custom_id: str | None
    code: str
    message: str


def parse_line(raw: bytes, line_number: int, digest: str | None = None, *, seed: int = 0) -> Row | BadRow:
    """The row of one line that is not blank. line_number counts from 1. Never raises for what a line holds.

    A row without a seed gets one from `seed` (the job's) and its own digest, so that neither its
    neighbours nor a restart change what is drawn. digest: of a line that was a good row before.
    """
    try:
        line = load_line(raw)
        custom_id = custom_id_of(line)
        packed = packed_ids(line.get("prompt_token_ids"))
        if digest is None:
            digest = _digest(canonical(line, packed))
    except LineError as error:
        message = f"line {line_number}: {error}"
        return BadRow(id=line_digest(raw, line_number), custom_id=None, code=error.code, message=message)
    try:
        key, given, rest = _openai_form(line) if "body" in line or "url" in line else _short_form(line)
        url = _URL_OF[key]
        asked = _asked(url, rest)
        content: Any = packed if packed is not None and key == "prompt_token_ids" else _CONTENTS[key](key, given)
        own_seed = None if url == EMBEDDINGS_URL else rest.get("seed")
        if own_seed is not None:
            asked.params.with_seed(own_seed)  # refuses what is no seed
        elif url != EMBEDDINGS_URL:
            own_seed = _row_seed(seed, digest)
        prompt = content if asked.cache_salt is None else with_salt(content, asked.cache_salt)
    except ValueError as error:
        message = f"line {line_number}: {error}"
        return BadRow(id=digest, custom_id=custom_id, code="invalid_request", message=message)
    wants_ids = asked.returns_token_ids
    return Row(
        id=digest,
        custom_id=custom_id,
        prompt=prompt,
        asked=asked.params,
        seed=own_seed,
        url=url,
        returns_token_ids=url == COMPLETIONS_URL and isinstance(content, array) if wants_ids is None else wants_ids,
    )


def duplicate_row(raw: bytes, line_number: int, custom_id: str, first_line_number: int) -> BadRow:
    """The error for a line whose custom_id an earlier line has; its own custom_id is None, so ids stay unique."""
    message = (
        f"line {line_number}: custom_id {custom_id!r} is already that of line {first_line_number}; "
        "give every row a custom_id of its own"
    )
    digest = line_digest(raw, line_number)
    return BadRow(id=digest, custom_id=None, code="duplicate_custom_id", message=message)


def line_digest(raw: bytes, line_number: int) -> str:
    """The id of a line that has no custom_id of its own: 32 hex digits from its number and bytes."""
    return _digest(b"line %d\n" % line_number + raw.strip())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _row_seed(seed: int, digest: str) -> int:
    content = f"{seed} {digest}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What a row asks for, apart from its content and its seed."""

    params: SamplingParams
    returns_token_ids: bool | None  # None leaves it to the content
    cache_salt: Any


def _asked(url: str, rest: Mapping[str, Any]) -> _Asked:
    """What these fields ask for; the same object for equal plain fields, since most rows of a job ask for the same."""
    fields = {key: value for key, value in rest.items() if key != "seed" and key not in LABELS}
    try:
        return _known(url, tuple(fields.items()), tuple(map(type, fields.values())))
    except TypeError:  # a list or an object, which cannot be looked up
        return _understood(url, fields)


@functools.lru_cache(maxsize=1024)
def _known(url: str, fields: tuple[tuple[str, Any], ...], _types: tuple[type, ...]) -> _Asked:
    """_types: 1, 1.0 and true are equal, and not all of them are allowed."""
    return _understood(url, dict(fields))


def _understood(url: str, fields: Mapping[str, Any]) -> _Asked:
    if url == EMBEDDINGS_URL:
        refuse_unknown_for_embedding(fields)
        return _Asked(params=_NO_SAMPLING, returns_token_ids=False, cache_salt=fields.get("cache_salt"))
    return _Asked(
        params=SamplingParams.from_dict(sampling_values(fields, is_chat=url == CHAT_URL)),
        returns_token_ids=flag(fields, "return_token_ids"),
        cache_salt=fields.get("cache_salt"),
    )


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
        raise ValueError(f"unknown fields {unknown} beside body; put parameters into body")
    if line.get("method") != "POST":
        raise ValueError(f"method is {line.get('method')!r}; it must be 'POST'")
    url = line.get("url")
    if url not in _CONTENT_OF:
        raise ValueError(f"url is {url!r}; it must be {COMPLETIONS_URL!r}, {CHAT_URL!r} or {EMBEDDINGS_URL!r}")
    body = line.get("body")
    if not isinstance(body, dict):
        raise ValueError(f"body is {body!r}; it must be an object with the request's fields")
    needed = _CONTENT_OF[url]
    if body.get(needed) is None:
        raise ValueError(f"body has no {needed}, which {url} needs")
    rest = dict(body)
    return needed, rest.pop(needed), rest
