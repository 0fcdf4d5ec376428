"""GuardedProtocol: uvicorn's HTTP over httptools, with bounds for what it waits for without an application to ask.

A connection whose request line and headers are not there after HEADERS_S seconds, or have more than MOST_HEADER_BYTES,
is closed. Who answers a request finds `abort` in the scope's state: it closes the connection at once, whatever is
still to be written, which a reader that has stopped reading would otherwise hold open.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_S = 20.0
MOST_HEADER_BYTES = 1 << 16


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

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
