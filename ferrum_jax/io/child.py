"""Child processes: a function called in a new interpreter, where nothing of this process is forked or open.

    process = start("package.module:function", order)                      function(order)
    Ended = run_child("package.module:function", order, silence_s=60)      function(order, send), until its end
    end(process)                                                           ends it with all that it started

What `run_child` calls may hang, abort or take the device with it, and ends there and not here. What the function sends,
any JSON values, is kept as it comes: of a child that hangs, what it had done until then is there. A child that says
nothing for `silence_s` is ended once it has said where it stands. Its silence is counted from when it begins the
function: a busy machine may take long to import what that needs.
"""

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import multiprocessing
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[2])  # of the packages
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from ferrum_jax.io.child import call; call()"
_PAGE = resource.getpagesize()
_SHARES_MEMORY = "XLA_PYTHON_CLIENT_PREALLOCATE=false"  # several processes share a GPU, so none may take it whole
_START_S = 600.0  # in which even a busy machine has imported a module
_LEAVE_S = 10.0  # for a child that has sent its last word
_STAND_S = 2.0  # for one that is silent to say where it stands
_MAX_TEXT = 20_000  # characters of what it wrote to the terminal, from the end

Send = Callable[[Any], None]


def start(
    function: str, order: object, *, environment: Sequence[str] = (), is_isolated: bool = False, **how: Any
) -> subprocess.Popen[bytes]:
    """A process that calls function(order). Ctrl-C is not for it, but for this one to handle.

    function: "package.module:name". order: whatever can be pickled; the process reads it from standard input.
    environment: more of it, in words as NAME=value; after "-i" all of it. is_isolated: no file of the user or of the
    site says what is loaded at its start. how: of subprocess.Popen.
    """
    paths = [_ROOT, *(os.path.abspath(path) for path in sys.path if path)]
    flags = ("-I", "-S") if is_isolated else ()
    words = [
        "/usr/bin/env",
        *environment,
        sys.executable,
        *flags,
        "-X",
        "faulthandler",
        "-c",
        _PROGRAM,
        function,
        *paths,
    ]
    with tempfile.TemporaryFile() as given:  # which may be large, and is written before the process can read
        pickle.dump(order, given)
        given.seek(0)
        process: subprocess.Popen[Any] = subprocess.Popen(words, stdin=given, start_new_session=True, **how)
    return process


def call() -> None:
    """In the process: argv has the function and the paths of modules; standard input the order."""
    module, name = sys.argv[1].split(":")
    getattr(importlib.import_module(module), name)(pickle.load(sys.stdin.buffer))


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def how_ended(code: int | None) -> str:
    """A clause that says how a process with this exit code ended."""
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


def limit_process(*limits: tuple[int, int], memory_bytes: int) -> None:
    """Lowers limits of this process for good. memory_bytes: of address space, beside what it has. It leaves no core."""
    own_bytes = 1 << 30
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        own_bytes = int(file.read().split()[0]) * _PAGE
    for limit, most in (*limits, (resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, own_bytes + memory_bytes)):
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):  # macOS has no bound on memory
            resource.setrlimit(limit, (most, most))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended. sent: what the function sent. problem: None, or in a clause why it did not come to its end.

    text: the error with its traceback, and what was written to the terminal; for a file, not for a sentence.
    """

    sent: tuple[Any, ...]
    problem: str | None
    text: str


def run_child(
    function: str, order: object, *, silence_s: float, on_sent: Callable[[Any], None] = lambda value: None
) -> Ended:
    """Calls function(order, send) in a new interpreter and waits for its end.

    function: "module:name". order: whatever can be pickled. silence_s: how long it may take from one value to the next.
    """
    reading, writing = multiprocessing.Pipe(duplex=False)
    sent: list[Any] = []
    with tempfile.TemporaryFile() as terminal:
        asked = writing.fileno(), function, pickle.dumps(order)  # read once its end with this process is seen to
        how: dict[str, Any] = {"stdout": terminal, "stderr": terminal, "pass_fds": (writing.fileno(),)}
        process = start("ferrum_jax.io.child:main", asked, environment=[_SHARES_MEMORY], **how)
        writing.close()
        try:
            last = _receive(reading, silence_s, sent, on_sent)
            if last == "silent":
                process.send_signal(signal.SIGUSR1)
            code = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_LEAVE_S if last != "silent" else _STAND_S)
        finally:
            reading.close()
            end(process)
        terminal.seek(0)
        said = terminal.read().decode("utf-8", "replace")[-_MAX_TEXT:]
    if isinstance(last, dict):
        return Ended(sent=tuple(sent), problem=last["problem"], text=last["traceback"] + said)
    silent = f"it said nothing for {silence_s:g} s and was ended"
    problem = None if last is None else silent if last == "silent" else how_ended(code)
    return Ended(sent=tuple(sent), problem=problem, text=said)


def _receive(link: Connection, silence_s: float, sent: list[Any], on_sent: Callable[[Any], None]) -> Any:
    """Takes values until the last. Returns None at the function's end, "silent", "gone", or the error it ended with."""
    until = time.monotonic() + max(_START_S, silence_s)
    while link.poll(max(0.0, until - time.monotonic())):
        try:
            found = json.loads(link.recv_bytes())
        except (EOFError, OSError):
            return "gone"
        if "ended" in found:
            return found["ended"]
        if "sent" in found:
            sent.append(found["sent"])
            on_sent(found["sent"])
        until = time.monotonic() + silence_s
    return "silent"


def main(asked: tuple[int, str, bytes]) -> None:
    """The child. asked: the number of a pipe, the function, and the order."""
    faulthandler.register(signal.SIGUSR1)
    writing, function, order = asked
    threading.Thread(target=_end_with_parent, args=(writing,), daemon=True).start()
    module, name = function.split(":")
    link = Connection(writing, readable=False)

    def write(value: Any) -> None:
        link.send_bytes(json.dumps(value).encode())

    try:
        call = getattr(importlib.import_module(module), name)
        write({"began": True})
        call(pickle.loads(order), lambda value: write({"sent": value}))
    except Exception as error:  # of any kind: it is the parent that judges
        problem = f"{type(error).__name__}: {first_line(str(error))}"
        write({"ended": {"problem": problem, "traceback": traceback.format_exc()}})
        os._exit(1)
    write({"ended": None})
    os._exit(0)  # a device's client may take long to close, and nobody waits for it


def _end_with_parent(writing: int) -> None:
    """Ends this process and what it started once nobody reads the pipe: a parent that is killed ends nothing itself.

    Else a child that hangs would hold the device until somebody finds it.
    """
    pipe = select.poll()
    pipe.register(writing, 0)  # an error is always reported
    pipe.poll()
    os.killpg(0, signal.SIGKILL)  # the group is this child's own


def first_line(text: str) -> str:
    """The first line that says something, for a sentence."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")[:300]
