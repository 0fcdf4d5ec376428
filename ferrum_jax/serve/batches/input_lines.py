"""Lines of a batch's input, checked before a row runs: one that could never be a row of this batch ends it.

What else is wrong with a row, as in its body (`invalid_request`), ends that row, with a line of the errors file.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from ferrum_jax.batch.input.formats import BadRow, Row, parse_line
from ferrum_jax.batch.input.lines import load_line
from ferrum_jax.io.error_text import bounded, quoted
from ferrum_jax.openai.asked import GENERATES, BodyLimits
from ferrum_jax.openai.body_fields import ROW_BODIES

ENDPOINTS = tuple(ROW_BODIES)
_MOST_ERRORS = 20
_OF_ONE_ROW = "invalid_request"


class InputRules(NamedTuple):
    """What a batch's input may hold. names: of the model. listed: those that are told. limits: of each row."""

    endpoint: str
    names: Sequence[str]
    listed: Sequence[str]
    max_rows: int
    max_line_bytes: int
    limits: BodyLimits


class CheckedInput(NamedTuple):
    """num_rows: lines that are not blank. errors: the first of those that end the batch, as OpenAI has them."""

    num_rows: int
    errors: tuple[Mapping[str, Any], ...]


def checked_input(file: BinaryIO, rules: InputRules) -> CheckedInput:
    """Reads all lines, none of them longer than may be."""
    errors: list[Mapping[str, Any]] = []
    first_lines: dict[str, int] = {}
    num_rows = 0
    for number, raw in _lines(file, rules.max_line_bytes):
        if len(raw) > rules.max_line_bytes:
            errors.append(_error("line_too_long", f"it has more than {rules.max_line_bytes:,} bytes", number))
            break  # where the next one begins is not known
        num_rows += 1
        if num_rows > rules.max_rows:
            errors.append(_error("too_many_rows", f"a batch has at most {rules.max_rows:,} rows; make several", None))
            break
        if (found := _problem(raw, number, rules, first_lines)) is not None:
            errors.append(found)
            if len(errors) == _MOST_ERRORS:
                break
    if not num_rows and not errors:
        errors.append(_error("empty_file", "the file has no row; write one request a line", None))
    return CheckedInput(num_rows, tuple(errors))


def _lines(file: BinaryIO, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    number = 0
    while raw := file.readline(most_bytes + 1):
        number += 1
        if raw.strip():
            yield number, raw


def _problem(raw: bytes, number: int, rules: InputRules, first_lines: dict[str, int]) -> Mapping[str, Any] | None:
    """What is wrong with a line; None where it may run, or fails alone."""
    row = parse_line(raw, number)
    if isinstance(row, BadRow) and row.code != _OF_ONE_ROW:
        return _error(row.code, row.message, number)
    assert row.custom_id is not None, "a line without one has a code of its own"
    first = first_lines.setdefault(row.custom_id, number)
    if first != number:
        why = f"custom_id {quoted(row.custom_id)} is already that of line {first}; give every row its own"
        return _error("duplicate_custom_id", why, number, "custom_id")
    if isinstance(row, BadRow):
        return _misdirected(load_line(raw), number, rules.endpoint)
    if row.url != rules.endpoint:
        return _mismatched(row.url, number, rules.endpoint)
    if row.model not in (None, *rules.names) or row.adapter is not None:
        asked = row.adapter or row.model
        why = f"model is {quoted(asked)}, and this server's batches have {', '.join(map(repr, rules.listed))}"
        return _error("model_not_found", why, number, "body.model")
    return _too_many_choices(row, number, rules.limits)


def _misdirected(line: Mapping[str, Any], number: int, endpoint: str) -> Mapping[str, Any] | None:
    """What is wrong with the method or the url of a line that cannot run; None where it is something else."""
    if "body" not in line and "url" not in line:  # the short form has neither
        return None
    if line.get("method") != "POST":
        why = f"method is {quoted(line.get('method'))}; it must be 'POST'"
        return _error("invalid_method", why, number, "method")
    return None if line.get("url") == endpoint else _mismatched(line.get("url"), number, endpoint)


def _mismatched(url: object, number: int, endpoint: str) -> Mapping[str, Any]:
    why = f"url is {quoted(url)}, and the batch is of {endpoint}; give its rows that url"
    return _error("mismatched_url", why, number, "url")


def _too_many_choices(row: Row, number: int, limits: BodyLimits) -> Mapping[str, Any] | None:
    n, count = row.asked.n if row.kind == GENERATES else 1, len(row.prompts)
    if n <= limits.max_n and n * count <= limits.max_prompts:
        return None
    most = f"{limits.max_n} choices of a prompt, {limits.max_prompts} in all"
    why = f"n is {n} of {count} prompts; a row has at most {most}"
    return _error("too_many_choices", why, number, "body.n")


def _error(code: str, message: str, line: int | None, param: str | None = None) -> Mapping[str, Any]:
    return {"code": code, "message": bounded(message), "line": line, "param": param}
