"""/v1/files: what batches read and write. A file is on its way to disk as it comes, and never whole in memory."""

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, BinaryIO

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from ferrum_jax.io import system
from ferrum_jax.io.error_text import named, quoted
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.openai.form_body import FormReader
from ferrum_jax.serve.app.batch_routes import limit_of, query_of, refuse_expiry, require_folder, require_page
from ferrum_jax.serve.batches.batch_folder import BatchFolder, FolderFull, page_of
from ferrum_jax.serve.batches.stored import StoredFile
from ferrum_jax.serve.http.exchange import CLOSE, ClientLeft, Exchange
from ferrum_jax.serve.http.http_errors import HttpError

_FILES = frozenset({"file"})
_FORM_BYTES = 1 << 20  # of all that is no file in a form
_MOST_UPLOADS = 8  # of one key at once
_LEAST_BYTES_S = 64 << 10  # of a whole upload, beside the time that a body has
_MOST_FILENAME = 255
_MOST_LISTED = 10_000
_PART_BYTES = 1 << 20  # of content that is sent


async def upload(request: Request) -> Response:
    """Keeps a file of a form, for a batch."""
    exchange, folder = Exchange(request), require_folder(request)
    exchange.service.require_ready()
    with _counted(request, exchange.key.owner), system.TemporaryFile() as spool:
        try:
            fields, filename = await _received(exchange, spool)
        except TimeoutError as error:
            message = f"the file came too slowly; send at least {_LEAST_BYTES_S:,} bytes a second"
            raise HttpError(408, message, code="body_timeout", headers=CLOSE) from error
        except ClientDisconnect as error:
            raise ClientLeft from error
        _check(fields)
        keep = functools.partial(
            folder.add_file,
            spool,
            spool.tell(),
            owner=exchange.key.owner,
            filename=filename,
            purpose="batch",
            created=int(system.now()),
        )
        try:
            found = await asyncio.to_thread(keep)
        except FolderFull as error:
            raise HttpError(413, str(error), param="file", code="storage_full") from error
    return exchange.json(found.form)


@contextlib.contextmanager
def _counted(request: Request, owner: str) -> Iterator[None]:
    """One of a key's few uploads at a time. Raises HttpError for one more."""
    counts: Counter[str] = request.app.state.uploads
    if counts[owner] >= _MOST_UPLOADS:
        message = f"{counts[owner]} files are being uploaded, the most of one key at once; ask again in a moment"
        raise HttpError(429, message, code="too_many_uploads", headers={"Retry-After": "5"})
    counts[owner] += 1
    try:
        yield
    finally:
        counts[owner] -= 1


async def _received(exchange: Exchange, spool: BinaryIO) -> tuple[dict[str, Any], str]:
    """The form's fields, and its file's name. Raises HttpError for one that is too large or too slow."""
    request, settings = exchange.request, exchange.service.settings
    most, kind = settings.max_file_bytes, request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise HttpError(415, f"Content-Type is {quoted(kind)}; it must be multipart/form-data")
    reader = FormReader(kind, _FILES, spool)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > most + _FORM_BYTES):
        raise _too_large(most)
    parts, length, clock = request.stream(), 0, asyncio.get_running_loop().time
    begun = clock()
    while True:
        until = min(clock(), begun + length / _LEAST_BYTES_S) + settings.body_s
        async with asyncio.timeout_at(until):
            part = await anext(parts, None)
        if part is None:
            break
        length += len(part)
        if length > most + _FORM_BYTES:
            raise _too_large(most)
        await asyncio.to_thread(reader.feed, part)
    request.scope["state"]["has_body"] = True
    fields = reader.end()
    if spool.tell() > most:
        raise _too_large(most)
    return fields, _filename(reader.filenames.get("file", ""))


def _too_large(most: int) -> HttpError:
    return HttpError(
        413, f"the file has more than {most:,} bytes, the most of one", param="file", code="file_too_large"
    )


def _filename(text: str) -> str:
    """The name that the file is listed with; it is no path and never one."""
    return "".join(each if each.isprintable() else "?" for each in text[:_MOST_FILENAME]) or "file.jsonl"


def _check(fields: dict[str, Any]) -> None:
    """Raises FieldError for a form that is not one file and its purpose."""
    refuse_expiry(fields)
    unknown = sorted(set(fields) - {"file", "purpose"})
    if unknown:
        raise FieldError(f"{named(unknown[:1])} is not known; known are file, purpose", unknown[0])
    if "file" not in fields:
        raise FieldError("file is missing; the form must have it", "file")
    if fields.get("purpose") != "batch":
        raise FieldError(
            f"purpose is {quoted(fields.get('purpose'))}; it must be batch; files are kept for batches alone",
            "purpose",
        )


async def files(request: Request) -> Response:
    """The files of who asks, the newest first."""
    exchange, folder = Exchange(request), require_folder(request)
    asked = query_of(request, "after", "limit", "order", "purpose")
    limit, order, purpose = (
        limit_of(asked, _MOST_LISTED, _MOST_LISTED),
        asked.get("order", "desc"),
        asked.get("purpose"),
    )
    if order not in ("asc", "desc"):
        raise FieldError(f"order is {quoted(order)}; it must be asc or desc", "order")
    own = [each for each in await asyncio.to_thread(folder.files) if each.owner == exchange.key.owner]
    if order == "desc":
        own.reverse()
    forms = [each.form for each in own if purpose in (None, each.purpose)]
    return exchange.json(require_page(page_of(forms, asked.get("after"), limit), asked))


async def file(request: Request) -> Response:
    """What is known of a file."""
    exchange, folder = Exchange(request), require_folder(request)
    return exchange.json((await _own(exchange, folder)).form)


async def delete(request: Request) -> Response:
    """Deletes a file that no batch reads."""
    exchange, folder = Exchange(request), require_folder(request)
    found = await _own(exchange, folder)

    def deleted() -> None:
        for batch in folder.batches():
            state = folder.state(batch.id) if batch.input_file == found.id else None
            if state is not None and not state.is_final:
                message = f"{batch.id} reads {found.id}; cancel it, or delete the file when it has ended"
                raise HttpError(409, message, code="file_in_use")
        folder.remove_file(found.id)

    await asyncio.to_thread(deleted)
    return exchange.json({"id": found.id, "object": "file", "deleted": True})


async def content(request: Request) -> Response:
    """The bytes of a file."""
    exchange, folder = Exchange(request), require_folder(request)
    found = await _own(exchange, folder)
    headers = {"Content-Length": str(found.num_bytes), "X-Content-Type-Options": "nosniff"}
    return StreamingResponse(_parts(folder, found), media_type="application/octet-stream", headers=headers)


async def _parts(folder: BatchFolder, found: StoredFile) -> AsyncIterator[bytes]:
    for start in range(0, found.num_bytes, _PART_BYTES):
        length = min(_PART_BYTES, found.num_bytes - start)
        yield await asyncio.to_thread(folder.read, found.id, start, length)


async def _own(exchange: Exchange, folder: BatchFolder) -> StoredFile:
    """The file of the path. Raises HttpError for one that is another's as for one that is not there."""
    file_id = exchange.request.path_params["file_id"]
    found = await asyncio.to_thread(folder.file, file_id)
    if found is None or found.owner != exchange.key.owner:
        raise HttpError(404, f"there is no file {quoted(file_id)}", code="file_not_found")
    return found
