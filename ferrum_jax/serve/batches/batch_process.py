"""The process of `ferrum-jax serve` that answers batches. No jax is here, and no signal ends it.

It reads and writes files of rows apart from HTTP and from the engine, so neither waits for it.
"""

import dataclasses
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

from ferrum_jax.io.paths import is_url
from ferrum_jax.serve.batches.batch_folder import BatchFolder
from ferrum_jax.serve.batches.clerk import Clerk, ClerkTimes
from ferrum_jax.serve.batches.input_lines import InputRules
from ferrum_jax.serve.batches.link_llm import EngineGone, LinkLLM
from ferrum_jax.serve.http.served_prompts import ServedPrompts, read_prompts
from ferrum_jax.serve.http.settings import ServerSettings

_NEAR, _FAR = ClerkTimes(), ClerkTimes(poll_s=5.0, flush_s=5.0, expiry_s=60.0)  # a bucket is paid for by the request
_NICE = 10  # live requests have the processor first


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """What the process is started with. link: a file descriptor that it inherits."""

    settings: ServerSettings
    link: int


class BatchDesk:
    """A clerk and its engine, for a server of these settings."""

    def __init__(self, settings: ServerSettings, connection: socket.socket) -> None:
        assert settings.batches is not None, "a server without a folder for them has no batches"
        self._settings = settings
        self._llm = LinkLLM(connection, on_end=self.end)
        folder = BatchFolder(settings.batches, most_stored_bytes=settings.max_stored_bytes)
        times = _FAR if is_url(settings.batches) else _NEAR
        self._clerk = Clerk(folder, self._llm_for, self._rules_of, times)

    def run(self, read: Callable[[Mapping[str, Any]], ServedPrompts]) -> None:
        """Works from when the engine is ready until the server ends. read: as `read_prompts`."""
        try:
            self._llm.wait()
        except EngineGone:
            return
        self._llm.open(*read(self._llm.facts))
        self._clerk.run()

    def end(self) -> None:
        """Has it end, in order. From any thread."""
        self._clerk.end()

    def _llm_for(self, owner: str) -> LinkLLM:
        self._llm.salt = f"batches of {owner}" if owner else ""
        return self._llm

    def _rules_of(self, endpoint: str) -> InputRules:
        settings = self._settings
        return InputRules(
            endpoint=endpoint,
            names=settings.names,
            listed=settings.listed,
            max_rows=settings.max_batch_rows,
            max_line_bytes=settings.max_body_bytes,
            limits=settings.limits,
        )


def main(order: BatchOrder) -> None:
    """The process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.raiseExceptions = False  # a disk that is full for logs ends no batch
    os.nice(_NICE)
    BatchDesk(order.settings, socket.socket(fileno=order.link)).run(read_prompts)
    os._exit(0)
