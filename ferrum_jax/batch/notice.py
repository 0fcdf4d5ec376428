"""Notice: tells a job that it is to stop, and why. Signals give it, or the cloud that takes the machine back.

The first notice lets the job end in order: it admits no more rows, journals those in progress and exits. A second
signal, or one that comes while nothing is in progress (the model loads), ends it at once.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ferrum_jax.io import system

EXIT_INTERRUPTED, EXIT_PREEMPTED = 130, 75  # by the user; by the system, to be started again (EX_TEMPFAIL)

ENDPOINTS = {"gce": "http://metadata.google.internal", "aws": "http://169.254.169.254"}  # metadata server of a cloud
_POLL_S, _TIMEOUT_S = 2.0, 2.0
_EXIT_CODES: dict[int, int] = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_PREEMPTED}
_MAX_EXIT_S, _LISTEN_S = 17.0, 0.25  # machines are given about 30 s; a service is killed some 20 s after its notice


class Notice:
    """Whether the job is to stop. The first notice counts.

    at_end: called with the job's engine when the job stops for the notice, once all rows are journaled.
    """

    def __init__(self, at_end: Callable[[Any], None] = lambda llm: None) -> None:
        self.at_end = at_end
        self._given = system.Event()
        self.reason = ""
        self.exit_code = 0
        self.is_urgent = False  # whether the process is soon killed
        self.is_orderly = False  # whether the job checks it; otherwise a signal interrupts

    def give(self, reason: str, exit_code: int, *, is_urgent: bool = True) -> None:
        if not self._given.is_set():
            self.reason, self.exit_code, self.is_urgent = reason, exit_code, is_urgent
            self._given.set()

    @property
    def is_given(self) -> bool:
        return self._given.is_set()

    @contextlib.contextmanager
    def orderly(self, is_checked: bool) -> Iterator[None]:
        """Inside, the job checks it; or it does not, and a signal interrupts at once."""
        before, self.is_orderly = self.is_orderly, is_checked
        try:
            yield
        finally:
            self.is_orderly = before

    def wait(self, timeout_s: float) -> bool:
        """Waits until it is given, at most `timeout_s`; whether it is."""
        return self._given.wait(timeout_s)


@contextlib.contextmanager
def notice_of_signals(notice: Notice) -> Iterator[None]:
    """SIGINT and SIGTERM give the notice; they raise KeyboardInterrupt where nothing checks it.

    Signals reach the main thread only, so in another thread this does nothing: its caller gives the notice.
    """
    if not system.in_main_thread():
        yield
        return

    def handle(number: int, _: FrameType | None) -> None:
        again = notice.is_given
        notice.give(signal.Signals(number).name, _EXIT_CODES[number])
        if again or not notice.is_orderly:
            raise KeyboardInterrupt

    before = {number: system.signal(number, handle) for number in _EXIT_CODES}
    try:
        yield
    finally:
        for number, handler in before.items():
            system.signal(number, handler)


@contextlib.contextmanager
def exit_in_time(notice: Notice, within_s: float = _MAX_EXIT_S) -> Iterator[None]:
    """Ends the process with the notice's exit code if it still runs `within_s` after the notice. For a main program.

    Python handles a signal only when a call returns to it, and a compile or a step may take minutes, so a thread
    watches for it. It may end the process at any moment, because the journal survives that. What is still being saved
    then is lost.
    """
    ears, mouth = socket.socketpair()
    mouth.setblocking(False)
    before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    ended = system.Event()
    thread = system.Thread(target=_end_late, args=(notice, ears, ended, within_s), name="exit", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        mouth.close()
        if not notice.is_urgent:  # otherwise the limit also holds for threads that the process joins at its end
            ended.set()
            thread.join()


def _end_late(notice: Notice, ears: socket.socket, ended: system.Event, within_s: float) -> None:
    """Waits for a notice or a signal, and ends the process if it is still running `within_s` later."""
    code = 0
    with ears:
        while not code:
            if ended.wait(_LISTEN_S):
                return
            heard = ears.recv(64) if select.select([ears], [], [], 0)[0] else b""
            code = notice.exit_code * notice.is_urgent or next(
                (_EXIT_CODES[number] for number in heard if number in _EXIT_CODES), 0
            )
    if not ended.wait(within_s):
        sys.stderr.write(f"ferrum-jax: still busy {within_s:.0f} s after the notice; finished rows are kept\n")
        os._exit(code)


@contextlib.contextmanager
def notice_of_cloud(notice: Notice, cloud: str | None) -> Iterator[None]:
    """Asks the cloud's metadata server every few seconds, and gives the notice when a preemption is announced.

    cloud: a key of ENDPOINTS, or None, which asks no server. Raises ValueError for another.
    """
    if cloud is None:
        yield
        return
    if cloud not in ENDPOINTS:
        raise ValueError(f"no preemption notice is known for {cloud!r}; known are {', '.join(sorted(ENDPOINTS))}")
    ask = {"gce": _google_says_so, "aws": _amazon_says_so}[cloud]
    ended = system.Event()

    def watch() -> None:
        while not _asked(ask, ENDPOINTS[cloud]):
            if ended.wait(_POLL_S):
                return
        notice.give(f"preemption notice of {cloud}", EXIT_PREEMPTED)

    thread = system.Thread(target=watch, name="preemption notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * _TIMEOUT_S)


def _asked(ask: Callable[[str], bool], server: str) -> bool:
    """Whether the server announces a preemption. A bad answer announces none: no job may end because of it."""
    import http.client  # slow to load, and few jobs ask

    try:
        return ask(server)
    except (OSError, ValueError, http.client.HTTPException):  # urllib's errors are OSErrors
        return False


def _google_says_so(server: str) -> bool:
    """Source: Compute Engine's documents, "Preemptible VM instances" and "View and query VM metadata"."""
    flavor = {"Metadata-Flavor": "Google"}
    with _open(f"{server}/computeMetadata/v1/instance/preempted", flavor) as answer:
        return answer.headers.get("Metadata-Flavor") == "Google" and answer.read(64).strip() == b"TRUE"


def _amazon_says_so(server: str) -> bool:
    """Source: EC2's documents, "Spot Instance interruption notices" and "Use the Instance Metadata Service".

    The page is missing (404) until the machine is to go. Most servers require a token, so one is asked for each time.
    In a container, one hop away, the token may not arrive; a server that requires none answers all the same.
    """
    life, token = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, {}
    with contextlib.suppress(OSError), _open(f"{server}/latest/api/token", life, method="PUT") as answer:
        token = {"X-aws-ec2-metadata-token": answer.read(1024).decode("ascii")}
    with _open(f"{server}/latest/meta-data/spot/instance-action", token) as answer:
        found = json.loads(answer.read(1024))
    return isinstance(found, dict) and "action" in found


def _open(url: str, headers: dict[str, str], method: str = "GET") -> Any:
    """The answer of a metadata server, which is on this machine's own network, so no proxy is used."""
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(urllib.request.Request(url, headers=headers, method=method), timeout=_TIMEOUT_S)
