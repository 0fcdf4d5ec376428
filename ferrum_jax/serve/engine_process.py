"""The engine's process of `ferrum-jax serve`: it holds the model, starts the HTTP process, and listens to signals.

    with HttpChild(order, listener) as child:      the child listens at once, and says that the model loads
        child.serve(llm, drain_s)                  until a signal, or until either of the two processes fails

The first SIGTERM or SIGINT drains: nothing new is taken, what runs may end within drain_s. A second one ends at once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ferrum_jax.llm import LLM
from ferrum_jax.processes import fresh
from ferrum_jax.serve.engine_side import EngineSide
from ferrum_jax.serve.engine_thread import EngineThread
from ferrum_jax.serve.link.outbox import Outbox
from ferrum_jax.serve.link.wire import Unframer, send

EXIT_SERVED, EXIT_CUT, EXIT_FAILED, EXIT_BROKEN_OFF = 0, 75, 70, 130
_LOOK_S = 0.2
_LAST_S = 5.0  # that the HTTP process has to end once it is told to stop


class HttpChild:
    """The HTTP process and the link to it."""

    def __init__(self, make_order: Callable[[int, int], Any], listener: socket.socket) -> None:
        """make_order: of the file descriptors of link and listener, a `HttpOrder`."""
        self._link, other = socket.socketpair()
        fds = (other.fileno(), listener.fileno())
        self._process = fresh.start("ferrum_jax.serve.app.http_process:main", make_order(*fds), pass_fds=fds)
        other.close()
        listener.close()
        self._outbox = Outbox()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def __enter__(self) -> HttpChild:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._tell("stop")
            self._process.wait(0.0 if error[0] else _LAST_S)
        self._process.kill()
        self._process.wait()
        self._link.close()

    def require_alive(self) -> None:
        """Raises RuntimeError if the child could not begin; it has said why."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the HTTP process ended with exit code {self._process.returncode}")

    def serve(
        self,
        llm: LLM,
        *,
        drain_s: float,
        on_ready: Callable[[], None] = lambda: None,
        roots: tuple[str | None, str | None] = (None, None),
    ) -> int:
        """Answers until the end; the exit code. roots: as `EngineSide` has them."""
        thread = EngineThread(llm)
        side = EngineSide(llm, thread, self._outbox, roots)
        for work in (self._write, lambda: self._read(side)):
            carry = functools.partial(_until_closed, work)
            threading.Thread(target=side.watched, args=(carry,), daemon=True).start()
        gc.collect()
        gc.freeze()  # what is there now stays: no step waits for a look at it
        side.begin()
        with self._listening():
            code = self._wait(thread, side, on_ready, drain_s)
        side.close()
        thread.close(timeout_s=_LAST_S)
        return code

    # -- until when ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        def handle(number: int, _: Any) -> None:
            self._signals.put(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # it ends by itself now, with a code of its own

    def _wait(self, thread: EngineThread, side: EngineSide, on_ready: Callable[[], None], drain_s: float) -> int:
        """Waits for a signal, or for a failure of either process."""
        until, is_told = None, False
        while True:
            number = self._next_signal()
            if side.opened.is_set() and not is_told:
                is_told = True
                on_ready()
            if self._process.poll() is not None:
                return EXIT_SERVED if until is not None else EXIT_FAILED
            if thread.failed is not None or side.failed is not None:
                return self._fail(str(thread.failed or side.failed))
            if number is not None and until is not None:
                return EXIT_BROKEN_OFF if number == signal.SIGINT else EXIT_CUT
            if number is not None:
                until = time.monotonic() + drain_s
                self._say(f"{signal.Signals(number).name}: no new requests; those that run have {drain_s:g} s to end")
                self._tell("drain")
            if until is not None and time.monotonic() > until:
                self._say("requests that still ran were cut")
                return EXIT_CUT

    def _next_signal(self) -> int | None:
        with contextlib.suppress(queue.Empty):
            return self._signals.get(timeout=_LOOK_S)
        return None

    def _fail(self, why: str) -> int:
        self._say(f"the engine is given up: {why}")
        self._tell("drain")  # those who wait are told
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_S)
        return EXIT_FAILED

    def _tell(self, order: str) -> None:
        self._outbox.put([["end", order]])

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads, or the disk is full
            print(f"ferrum-jax serve: {text}", file=sys.stderr, flush=True)

    # -- the link --------------------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            send(self._link, self._outbox.take(None))

    def _read(self, side: EngineSide) -> None:
        unframer = Unframer()
        while True:
            content = self._link.recv(1 << 18)
            if not content:
                return
            for message in unframer.feed(content):
                side.take(message)


def _until_closed(carry: Callable[[], None]) -> None:
    """Carries messages until the link is closed: the other process has ended, which is seen elsewhere."""
    with contextlib.suppress(OSError):
        carry()


def listening(host: str, port: int) -> socket.socket:
    """A socket that is bound. Raises OSError, naming the address, where it cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(2048)
    except OSError as error:
        found.close()
        raise OSError(
            f"{host}:{port} cannot be listened at: {os.strerror(error.errno or 0)}; give another --port"
        ) from error
    return found
