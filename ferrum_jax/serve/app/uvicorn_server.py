"""A uvicorn server over an application, ended by its owner and by no signal."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_IDLE_S = 75  # longer than clients (5 s) and load balancers (60 s) keep a connection, so that none asks one that closes
_LAST_S = 2  # for answers that are being written when it ends
HEADERS_S = 20.0
MOST_HEADER_BYTES = 1 << 16


class UvicornServer(uvicorn.Server):
    """Ends once `should_exit` is set."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_server(
    app: Any, *, root_path: str = "", ssl_keyfile: str | None = None, ssl_certfile: str | None = None
) -> UvicornServer:
    """Without a log of its own, and without trust in headers that a proxy may have set."""
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        root_path=root_path,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_LAST_S,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
    )
    return UvicornServer(config)


class GuardedProtocol(HttpToolsProtocol):
    """HTTP over httptools, with bounds for what it waits for without an application to ask.

    A connection whose request line and headers are not there after HEADERS_S seconds, or have more than
    MOST_HEADER_BYTES, is closed. Who answers a request finds `abort` in the scope's state: it closes the connection at
    once, whatever is still to be written, which a reader that has stopped reading would otherwise hold open.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # type: ignore[override]
        super().connection_made(transport)  # type: ignore[arg-type]
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._waits:
            self._header_bytes += len(data)
        super().data_received(data)
        if not self._waits:
            self._stop_waiting()
        elif self._header_bytes > MOST_HEADER_BYTES:
            self.transport.abort()
        elif self._deadline is None:
            self._expect_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["abort"] = self.transport.abort  # pyright: ignore[reportTypedDictNotRequiredAccess]

    @property
    def _waits(self) -> bool:
        """Whether no request has all of its headers, or the last one is answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(HEADERS_S, self._give_up)

    def _stop_waiting(self) -> None:
        self._header_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self._waits and not self.transport.is_closing():
            self.transport.abort()
