"""Exchange: one HTTP request: its id, its key, its body, and whether who asked is still there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ferrum_jax.inputs.images.decoding import Look, do_not_look
from ferrum_jax.io.error_text import quoted
from ferrum_jax.openai.asked import BodyLimits
from ferrum_jax.openai.body_fields import REQUEST_ID, BodyField, is_like
from ferrum_jax.openai.form_body import read_form, typed
from ferrum_jax.openai.json_text import read_body
from ferrum_jax.serve.http.api_keys import OPEN, ApiKey
from ferrum_jax.serve.http.http_errors import HttpError
from ferrum_jax.serve.http.service import Service

Result = TypeVar("Result")
_LONG_BODY = 64 << 10  # bytes; less is read in a few milliseconds
_SILENCE_S = 1.0  # after which no more of a body is expected
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
CLOSE: Mapping[str, str] = MappingProxyType({"Connection": "close"})
_dumps = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


class ClientLeft(Exception):
    """Who asked has gone; nobody reads an answer."""


def id_of(scope: Mapping[str, Any]) -> str:
    """The request's id: the header X-Request-Id where it gives a usable one, else a fresh one; kept in the scope."""
    state = scope["state"]
    if "request_id" not in state:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        text = given.decode("latin-1")
        state["request_id"] = text if is_like(text, REQUEST_ID) else uuid.uuid4().hex
    return state["request_id"]


async def rest_of_body(request: Request, within_s: float) -> bool:
    """Drops what is still to come of a body that nobody reads; whether all of it came.

    A connection that is closed, or answered, while its client still writes is reset, and the client never sees why it
    was refused. Who waits to be asked for the body, or sends nothing for a moment, gets the answer at once.
    """
    if request.scope.get("state", {}).get("has_body"):
        return True
    if request.headers.get("expect") is not None:
        return False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    message = await request.receive()
                if not message.get("more_body"):
                    return True
    return False


class Exchange:
    """id: that answers and their headers carry. key: who asks."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.service: Service = request.app.state.service
        self.id = id_of(request.scope)
        self.key: ApiKey = request.scope["state"].get("key", OPEN)

    def take_id(self, request_id: str | None) -> None:
        """Takes the id that a body gives, in place of the header's; None keeps the header's."""
        if request_id is not None:
            self.id = self.request.scope["state"]["request_id"] = request_id

    async def body(self) -> dict[str, Any]:
        """The object of the body. Raises as `asked` does."""
        return await self.asked(lambda found, limits: found)

    async def asked(self, ask: Callable[[dict[str, Any], BodyLimits], Result]) -> Result:
        """What `ask` makes of the body's object. Raises HttpError for one that is too large or too slow, FieldError.

        A long body is read in a thread: others' tokens do not wait until millions of values are decoded and checked.
        """
        return await self._read("application/json", read_body, ask)

    async def asked_by_form(
        self, ask: Callable[[dict[str, Any], BodyLimits], Result], fields: dict[str, BodyField], files: frozenset[str]
    ) -> Result:
        """The same of a form, whose texts become the values that `fields` have. files: fields that are bytes."""
        content_type = self.request.headers.get("content-type", "")

        def read(content: bytes) -> dict[str, Any]:
            return typed(read_form(content, content_type, files), fields)

        return await self._read("multipart/form-data", read, ask)

    async def _read(
        self,
        kind: str,
        fields_of: Callable[[bytes], dict[str, Any]],
        ask: Callable[[dict[str, Any], BodyLimits], Result],
    ) -> Result:
        """What `ask` makes of a body of a kind. Raises as `asked` does."""
        self.service.require_ready()
        settings = self.service.settings
        try:
            async with asyncio.timeout(settings.body_s):
                content = await self._content(settings.max_body_bytes, kind)
        except TimeoutError as error:
            message = f"the body did not come within {settings.body_s:g} s"
            raise HttpError(408, message, code="body_timeout", headers=CLOSE) from error
        except ClientDisconnect as error:
            raise ClientLeft from error

        def read(look: Look) -> Result:
            found = fields_of(content)
            look()
            self.request.scope["state"]["fields"] = frozenset(found)  # which errors may name
            return ask(found, settings.limits)

        if len(content) < _LONG_BODY:
            return read(do_not_look)
        return await self.unless_left(self.service.bodies.call(read, key=self.key.name, cost=len(content)), None)

    async def _content(self, most: int, wanted: str) -> bytes:
        announced = self.request.headers.get("content-length", "")
        kind = self.request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != wanted:
            raise HttpError(415, f"Content-Type is {quoted(kind)}; it must be {wanted}")
        coding = self.request.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            raise HttpError(
                415, f"Content-Encoding is {quoted(coding)}; send the body as it is, and leave the header out"
            )
        found, length = [], 0
        if announced.isdecimal() and len(announced) < 19 and int(announced) > most:
            length = int(announced)
        else:
            async for part in self.request.stream():
                found.append(part)
                length += len(part)
                if length > most:
                    break
            else:
                self.request.scope["state"]["has_body"] = True
        if length > most:
            message = f"the body has more than {most:,} bytes, the most that this server takes"
            raise HttpError(413, message, code="body_too_large")
        return b"".join(found)

    def model(self, name: str | None, *, generates: bool = False) -> str:
        """The name that the answer carries. Raises HttpError for a model that is not here.

        generates: the name may be an adapter's, and then the answer carries that.
        """
        settings = self.service.settings
        names, adapters = settings.names, self.service.adapters if generates else ()
        if name is not None and name not in (*names, *adapters):
            message = (
                f"model is {quoted(name)}, and this server has {', '.join(map(repr, (*settings.listed, *adapters)))}"
            )
            raise HttpError(404, message, param="model", code="model_not_found")
        return names[0] if name is None or name not in adapters else name

    async def unless_left(self, answer: Awaitable[Result], timeout_s: float | None) -> Result:
        """The answer. Raises ClientLeft, and cancels it, if who asked leaves before; TimeoutError at its deadline."""
        task = asyncio.ensure_future(answer)
        watch = asyncio.create_task(self._left())
        deadline = self.service.settings.timeout_s if timeout_s is None else timeout_s
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED, timeout=deadline)
            if task.done():
                return task.result()
            if watch.done():
                self.service.metrics.left()
                raise ClientLeft
            raise TimeoutError
        finally:
            watch.cancel()
            if not task.done():
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await watch
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    async def _left(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    def json(self, answer: Any, headers: Mapping[str, str] = _NO_HEADERS) -> Response:
        """An answer in one piece."""
        try:
            content = _dumps(answer).encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            content = json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()
        return Response(content, media_type="application/json", headers=dict(headers))
