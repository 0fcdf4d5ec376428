"""/v1/batches: a file of requests in, a file of answers out; off unless the server has a folder for them."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.inputs.prompt import is_unicode
from ferrum_jax.io import system
from ferrum_jax.io.error_text import named, quoted
from ferrum_jax.openai.body_fields import given
from ferrum_jax.openai.body_rules import require_known
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.serve.batches.batch_folder import BatchFolder, FolderFull, page_of
from ferrum_jax.serve.batches.input_lines import ENDPOINTS
from ferrum_jax.serve.batches.stored import AskedBatch, BatchState, batch_form
from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.http.http_errors import HttpError
from ferrum_jax.serve.http.settings import ServerSettings

_MOST_LISTED, _LISTED = 100, 20
_WINDOW = re.compile(r"([1-9]\d{0,3})(m|h|d)", re.ASCII)
_UNITS_S = {"m": 60, "h": 3600, "d": 86400}
_MOST_WINDOW_S = 30 * 86400
_MOST_PAIRS, _MOST_NAME, _MOST_VALUE = 16, 64, 512  # of metadata, as OpenAI has them


def folder_of(settings: ServerSettings) -> BatchFolder | None:
    """Where the server's files and batches are; None of a server that keeps none."""
    if settings.batches is None:
        return None
    return BatchFolder(settings.batches, most_stored_bytes=settings.max_stored_bytes)


def require_folder(request: Request) -> BatchFolder:
    """The server's folder. Raises HttpError where it has none."""
    folder = request.app.state.batches
    if folder is None:
        message = "files and batches are not kept here; the server is to be started with --batches FOLDER"
        raise HttpError(404, message, code="batches_off")
    return folder


async def create(request: Request) -> Response:
    """Begins a batch over an uploaded file."""
    exchange, folder = Exchange(request), require_folder(request)
    body = await exchange.body()
    refuse_expiry(body)
    require_known(body, "batch")
    endpoint, window = _required(body, "endpoint"), _required(body, "completion_window")
    if endpoint not in ENDPOINTS:
        raise FieldError(f"endpoint is {quoted(endpoint)}; batches are of {', '.join(ENDPOINTS)}", "endpoint")
    seconds, metadata = _seconds(window), _metadata(body.get("metadata"))
    file_id, owner = _required(body, "input_file_id"), exchange.key.owner
    file = await asyncio.to_thread(folder.file, file_id)
    if file is None or file.owner != owner:
        raise HttpError(404, f"there is no file {quoted(file_id)}", param="input_file_id", code="file_not_found")
    if file.purpose != "batch":
        raise FieldError(
            f"{file_id} has the purpose {file.purpose}; upload one with the purpose batch", "input_file_id"
        )
    now = int(system.now())
    asked = {"owner": owner, "input_file": file_id, "endpoint": endpoint, "window": window, "metadata": metadata}
    try:
        found = await asyncio.to_thread(folder.add_batch, **asked, created=now, expires=now + seconds)
    except FolderFull as error:
        raise HttpError(429, str(error), code="too_many_batches") from error
    return exchange.json(batch_form(found, BatchState(), None))


async def batches(request: Request) -> Response:
    """The batches of who asks, the newest first."""
    exchange, folder = Exchange(request), require_folder(request)
    asked = query_of(request, "after", "limit")
    limit = limit_of(asked, _MOST_LISTED, _LISTED)

    def listed() -> dict[str, Any] | None:
        own = [each for each in folder.batches() if each.owner == exchange.key.owner]
        while True:
            by_id = {each.id: each for each in reversed(own)}
            page = page_of([{"id": each} for each in by_id], asked.get("after"), limit)
            states = {each["id"]: folder.state(each["id"]) for each in page["data"]} if page else {}
            data = [_form(folder, by_id[each], state) for each, state in states.items() if state is not None]
            if len(data) == len(states):
                return page and {**page, "data": data}
            own = [each for each in own if states.get(each.id, each) is not None]  # the others cannot be read

    return exchange.json(require_page(await asyncio.to_thread(listed), asked))


async def batch(request: Request) -> Response:
    """A batch and how far it is."""
    exchange, folder = Exchange(request), require_folder(request)
    found = await _own(exchange, folder)
    return exchange.json(await asyncio.to_thread(_form, folder, *found))


async def delete(request: Request) -> Response:
    """Deletes a batch that has ended; its files stay."""
    exchange, folder = Exchange(request), require_folder(request)
    found, state = await _own(exchange, folder)
    if not state.is_final:
        message = f"{found.id} is {state.status}; cancel it, or delete it when it has ended"
        raise HttpError(409, message, code="batch_in_use")
    await asyncio.to_thread(folder.remove_batch, found.id)
    return exchange.json({"id": found.id, "object": "batch", "deleted": True})


async def cancel(request: Request) -> Response:
    """Has a batch end; what was answered is kept in its output."""
    exchange, folder = Exchange(request), require_folder(request)
    found, state = await _own(exchange, folder)
    if state.is_final:
        message = f"{found.id} is {state.status}, so there is nothing to cancel"
        raise HttpError(409, message, code="batch_has_ended")
    await asyncio.to_thread(folder.cancel, found.id, int(system.now()))
    return exchange.json(await asyncio.to_thread(_form, folder, found, state))


async def _own(exchange: Exchange, folder: BatchFolder) -> tuple[AskedBatch, BatchState]:
    """The batch of the path. Raises HttpError for one that is another's as for one that is not there."""
    batch_id = exchange.request.path_params["batch_id"]
    found = await asyncio.to_thread(folder.batch, batch_id)
    state = None if found is None else await asyncio.to_thread(folder.state, found.id)
    if found is None or found.owner != exchange.key.owner or state is None:
        raise HttpError(404, f"there is no batch {quoted(batch_id)}", code="batch_not_found")
    return found, state


def _form(folder: BatchFolder, asked: AskedBatch, state: BatchState) -> dict[str, Any]:
    return batch_form(asked, state, folder.cancelled_at(asked.id))


def _required(body: Mapping[str, Any], name: str) -> str:
    value = given(body, name)
    if value is None:
        raise FieldError(f"{name} is missing; the body must have it", name)
    return value


def _seconds(window: str) -> int:
    """The seconds of a completion window. Raises FieldError for another form."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= _MOST_WINDOW_S:
        raise FieldError(
            f"completion_window is {quoted(window)}; it must be a number of minutes, hours or days, as 30m, 24h or 7d, "
            "and at most 30d",
            "completion_window",
        )
    return seconds


def _metadata(value: object) -> Mapping[str, str] | None:
    if value is None:
        return None
    is_right = isinstance(value, dict) and len(value) <= _MOST_PAIRS
    for name, text in value.items() if is_right else ():  # type: ignore[attr-defined]
        is_right = is_right and len(name) <= _MOST_NAME and isinstance(text, str) and len(text) <= _MOST_VALUE
        is_right = is_right and is_unicode(f"{name}{text}")
    if not is_right:
        raise FieldError(
            f"metadata is {quoted(value)}; it must be an object of at most {_MOST_PAIRS} texts, with names of at most "
            f"{_MOST_NAME} characters and values of at most {_MOST_VALUE}, without half of a surrogate pair",
            "metadata",
        )
    return value  # type: ignore[return-value]


def refuse_expiry(fields: Mapping[str, Any]) -> None:
    """Raises FieldError for a time after which a file is to be deleted."""
    for name in fields:
        if name.partition("[")[0] in ("expires_after", "output_expires_after"):
            raise FieldError(f"{name} is not supported: files are kept until they are deleted; leave it out", name)


# -- lists, of files too -----------------------------------------------------------------------------------


def query_of(request: Request, *known: str) -> dict[str, str]:
    """The query's parameters. Raises FieldError for others."""
    found = dict(request.query_params)
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise FieldError(f"{named(unknown[:1])} is not known; known are {', '.join(known)}", unknown[0])
    return found


def limit_of(asked: Mapping[str, str], most: int, default: int) -> int:
    """How many records a list has at most. Raises FieldError."""
    text = asked.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise FieldError(f"limit is {quoted(text)}; it must be a whole number from 1 to {most:,}", "limit")
    return int(text)


def require_page(page: dict[str, Any] | None, asked: Mapping[str, str]) -> dict[str, Any]:
    """The page. Raises FieldError where its beginning is not there."""
    if page is None:
        raise FieldError(f"after is {quoted(asked['after'])}, which is none of the list's ids", "after")
    return page
