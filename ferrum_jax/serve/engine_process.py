"""The engine's process of `ferrum-jax serve`: it holds the model, starts the HTTP process, and listens to signals.

    with HttpChild(order, listener) as child:      the child listens at once, and says that the model loads
        child.serve(llm, drain_s)                  until a signal, or until either of the two processes fails

Where batches are kept a third process answers them over a link of its own, and is begun anew when it ends.

The first SIGTERM or SIGINT drains: nothing new is taken, what runs may end within drain_s. A second one ends at once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ferrum_jax.engine.engine_thread import EngineThread
from ferrum_jax.io import child
from ferrum_jax.io.watched_threads import Told, start_thread, watch_all_threads
from ferrum_jax.llm import LLM
from ferrum_jax.serve.engine_side import EngineSide
from ferrum_jax.serve.link.outbox import Outbox
from ferrum_jax.serve.link.wire import received, send

EXIT_SERVED, EXIT_CUT, EXIT_FAILED, EXIT_BROKEN_OFF = 0, 75, 70, 130
_LOOK_S = 0.2
_LAST_S = 5.0  # that another process has to end once it is told to stop
_REST_S = 10.0  # from a start of the process of batches to the next


class LinkedProcess:
    """A process beside the engine's, and the link between them."""

    def __init__(self, function: str, make_order: Callable[[int], Any], *, pass_fds: Sequence[int] = ()) -> None:
        """function: that it calls. make_order: of the file descriptor of its end of the link."""
        self._link, other = socket.socketpair()
        fds = (other.fileno(), *pass_fds)
        self.process = child.start(function, make_order(other.fileno()), pass_fds=fds)
        other.close()
        self.outbox = Outbox()

    def carry(self, side: EngineSide) -> None:
        """Begins to carry messages between the process and a side of the engine, which has the outbox."""
        carry_messages(self._link, self.outbox, side)

    def tell(self, order: str) -> None:
        self.outbox.put([["end", order]])

    def end(self, within_s: float) -> None:
        """Tells it to stop, and ends it where it has not ended in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.tell("stop")
            self.process.wait(within_s)
        child.end(self.process)
        self._link.close()


def carry_messages(link: socket.socket, outbox: Outbox, side: EngineSide) -> None:
    """Has two threads carry messages until the link is closed: the other process has ended, which is seen elsewhere."""

    def write() -> None:
        while True:
            messages = outbox.take(None)
            try:
                send(link, messages)
            except OSError:
                return

    def read() -> None:
        for message in received(link):
            side.take(message)

    for work in (write, read):
        start_thread(work, side.fail, name=f"ferrum-link-{work.__name__}")


class BatchChild:
    """The process that answers batches, begun anew when it ends. No live request depends on it."""

    def __init__(self, make_order: Callable[[int], Any], llm: LLM, thread: EngineThread) -> None:
        """make_order: of the file descriptor of the link, a `BatchOrder`."""
        self._make_order, self._llm, self._thread = make_order, llm, thread
        self._begin()

    def _begin(self) -> None:
        self._begun_s = time.monotonic()
        self._child = LinkedProcess("ferrum_jax.serve.batches.batch_process:main", self._make_order)
        self._side = EngineSide(self._llm, self._thread, self._child.outbox, waits=True)
        self._child.carry(self._side)
        self._side.begin()

    def keep(self) -> int | None:
        """Begins it anew where it has ended, but not at once; the exit code then."""
        code = self._child.process.poll()
        if code is None or time.monotonic() - self._begun_s < _REST_S:
            return None
        self._side.close()
        self._child.end(0.0)
        self._begin()
        return code

    def tell(self, order: str) -> None:
        self._child.tell(order)

    def end(self) -> None:
        """Lets it keep what was answered."""
        self._child.end(_LAST_S)
        self._side.close()


class HttpChild:
    """The HTTP process and the link to it."""

    def __init__(self, make_order: Callable[[int, int], Any], listener: socket.socket) -> None:
        """make_order: of the file descriptors of link and listener, a `HttpOrder`."""
        fd = listener.fileno()
        function = "ferrum_jax.serve.app.http_process:main"
        self._child = LinkedProcess(function, lambda link: make_order(link, fd), pass_fds=(fd,))
        self._process = self._child.process
        listener.close()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._batches: BatchChild | None = None

    def __enter__(self) -> HttpChild:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.end(0.0 if error[0] else _LAST_S)

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
        batch_order: Callable[[int], Any] | None = None,
    ) -> int:
        """Answers until the end; the exit code. roots: as `EngineSide` has them. batch_order: as `BatchChild` takes it;
        None answers no batches."""
        thread = EngineThread(llm.calls)
        side = EngineSide(llm, thread, self._child.outbox, roots)
        self._child.carry(side)
        gc.collect()
        gc.freeze()  # what is there now stays: no step waits for a look at it
        side.begin()
        self._batches = None if batch_order is None else BatchChild(batch_order, llm, thread)
        try:
            with self._listening(side.fail):
                code = self._wait(thread, side, on_ready, drain_s)
        finally:
            if self._batches is not None:
                self._batches.end()
        side.close()
        thread.close(timeout_s=_LAST_S)
        return code

    # -- until when ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _listening(self, on_failure: Told) -> Iterator[None]:
        """Signals are heard meanwhile, and the end of any thread of the process, whoever started it."""
        watch_all_threads(on_failure)

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
            if self._batches is not None and until is None and (ended := self._batches.keep()) is not None:
                self._say(f"the process that answers batches had ended with exit code {ended}, and was begun anew")
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
        self._child.tell(order)
        if self._batches is not None:
            self._batches.tell(order)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads, or the disk is full
            print(f"ferrum-jax serve: {text}", file=sys.stderr, flush=True)


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
