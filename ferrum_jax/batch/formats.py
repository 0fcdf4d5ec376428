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
import json
from collections.abc import Mapping
from typing import Any

from ferrum_jax.batch.parameters import (
    embedding_input,
    flag,
    messages_of,
    prompt_of,
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


_NO_SAMPLING = SamplingParams(max_tokens=1)  # of a row that asks for a vector


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One request of a job. `id` is 32 hex digits that digest the whole line's content."""

    id: str
    custom_id: str
    prompt: Prompt
    params: SamplingParams
    url: str  # what is asked for: a completion, a chat's answer or an embedding
    returns_token_ids: bool

    @property
    def is_chat(self) -> bool:
        return self.url == CHAT_URL

    @property
    def is_embedding(self) -> bool:
        return self.url == EMBEDDINGS_URL


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A line that cannot be run. custom_id is None where the line has none that is its own."""

    id: str
    custom_id: str | None
    code: str
    message: str


class _LineError(ValueError):
    """A line without a usable custom_id; carries the error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_line(raw: bytes, line_number: int, *, seed: int = 0, digest: str | None = None) -> Row | BadRow:
    """The row of one line that is not blank. line_number counts from 1. Never raises for what a line holds.

    A row without a seed gets one from `seed` (the job's) and its own digest, so that neither its
    neighbours nor a restart change what is drawn. digest: of the line's content, where it is known already.
    """
    try:
        line = _load(raw)
        custom_id = _custom_id(line)
        digest = digest or _digest(_canonical(line))
    except _LineError as error:
        message = f"line {line_number}: {error}"
        return BadRow(id=line_digest(raw, line_number), custom_id=None, code=error.code, message=message)
    try:
        body, url = _body(line)
        if url == EMBEDDINGS_URL:
            params, content = _NO_SAMPLING, embedding_input(body)
        else:
            values = sampling_values(body, is_chat=url == CHAT_URL)
            own_seed = values.pop("seed", None)
            params = _params(values).with_seed(_row_seed(seed, digest) if own_seed is None else own_seed)
            content = messages_of(body["messages"]) if url == CHAT_URL else prompt_of("prompt", body["prompt"])
        is_tokens = url == COMPLETIONS_URL and isinstance(content, list)
        returns_token_ids = flag(body, "return_token_ids", default=is_tokens)
        prompt = with_salt(content, body.get("cache_salt"))
    except ValueError as error:
        message = f"line {line_number}: {error}"
        return BadRow(id=digest, custom_id=custom_id, code="invalid_request", message=message)
    return Row(
        id=digest,
        custom_id=custom_id,
        prompt=prompt,
        params=params,
        url=url,
        returns_token_ids=returns_token_ids,
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


def _params(values: Mapping[str, Any]) -> SamplingParams:
    """The parameters of these values; the same object for equal plain values, since most rows ask for the same."""
    if any(isinstance(value, tuple | dict) for value in values.values()):
        return SamplingParams.from_dict(values)
    return _plain_params(tuple((name, type(value), value) for name, value in sorted(values.items())))


@functools.lru_cache(maxsize=1024)
def _plain_params(items: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    return SamplingParams.from_dict({name: value for name, _, value in items})


def _load(raw: bytes) -> dict[str, Any]:
    """The line's object."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _LineError("invalid_utf8", f"not UTF-8 at byte {error.start + 1}; write the file as UTF-8") from error
    try:
        line = _DECODER.decode(text)
    except RecursionError as error:
        raise _LineError("invalid_json", "nested too deeply") from error
    except ValueError as error:
        raise _LineError("invalid_json", f"not valid JSON: {error}") from error
    if not isinstance(line, dict):
        raise _LineError("invalid_json", f"is a {type(line).__name__}; each line must be a JSON object")
    return line


def _canonical(line: Mapping[str, Any]) -> bytes:
    """The line's bytes, equal for equal content whatever its spacing and key order."""
    try:
        return _ENCODER.encode(line).encode()
    except UnicodeEncodeError as error:
        raise _LineError("invalid_json", "holds half of a surrogate pair; write both halves") from error
    except RecursionError as error:
        raise _LineError("invalid_json", "nested too deeply") from error
    except ValueError as error:
        raise _LineError("invalid_json", f"not valid JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"keys given twice: {sorted({key for key in keys if keys.count(key) > 1})}")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)
_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, allow_nan=False)


def _custom_id(line: Mapping[str, Any]) -> str:
    if "custom_id" not in line:
        raise _LineError("missing_custom_id", "has no custom_id; give every row one, it names the answer")
    custom_id = line["custom_id"]
    if not isinstance(custom_id, str) or not custom_id:
        message = f"custom_id is {custom_id!r}; it must be a string that is not empty"
        raise _LineError("missing_custom_id", message)
    return custom_id


def _body(line: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The request's fields with `prompt`, `messages` or `input`, and the url that they are for."""
    if "body" in line or "url" in line:
        return _openai_body(line)
    body = {key: value for key, value in line.items() if key != "custom_id"}
    given = [key for key in ("prompt", "messages", "prompt_token_ids", "input") if body.get(key) is not None]
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "has no prompt"
        raise ValueError(f"{what}; give exactly one of prompt, messages, prompt_token_ids and input")
    if "prompt_token_ids" in body:
        token_ids = body.pop("prompt_token_ids")
        if token_ids is not None:
            body["prompt"] = token_ids_of("prompt_token_ids", token_ids)
    url = {"messages": CHAT_URL, "input": EMBEDDINGS_URL}.get(given[0], COMPLETIONS_URL)
    for content in {"prompt", "messages", "input"} - {_CONTENT_OF[url]}:  # a null beside the one that is given
        body.pop(content, None)
    return body, url


def _openai_body(line: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
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
    return dict(body), url
