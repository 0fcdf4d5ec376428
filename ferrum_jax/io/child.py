"""A child process with a deadline: what may hang, abort or take the device with it ends there and not here.

    Ended = run_child("package.module:function", order, silence_s=60)      function(order, send) in a fresh interpreter

What the function sends, any JSON values, is kept as it comes: of a child that hangs, what it had done until then is
there. A child that says nothing for `silence_s` is ended with all that it started, once it has said where it stands.
Its silence is counted from when it begins the function: a busy machine may take long to import what that needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import pickle
import select
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ferrum_jax.io import fresh

_SHARES_MEMORY = "XLA_PYTHON_CLIENT_PREALLOCATE=false"  # several processes share a GPU, so none may take it whole
_START_S = 600.0  # in which even a busy machine has imported a module
_LEAVE_S = 10.0  # for a child that has sent its last word
_STAND_S = 2.0  # for one that is silent to say where it stands
_MOST_TEXT = 20_000  # characters of what it wrote to the terminal, from the end

Send = Callable[[Any], None]


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
    """Calls function(order, send) in a fresh interpreter and waits for its end.

    function: "module:name". order: whatever can be pickled. silence_s: how long it may take from one value to the next.
    """
    reading, writing = os.pipe()
    sent: list[Any] = []
    with tempfile.TemporaryFile() as terminal:
        asked = writing, function, pickle.dumps(order)  # read once its end with this process is seen to
        how: dict[str, Any] = {"stdout": terminal, "stderr": terminal, "pass_fds": (writing,)}
        process = fresh.start("ferrum_jax.io.child:main", asked, environment=[_SHARES_MEMORY], **how)
        os.close(writing)
        try:
            last = _receive(reading, silence_s, sent, on_sent)
            if last == "silent":
                process.send_signal(signal.SIGUSR1)
            code = _leave(process, _LEAVE_S if last != "silent" else _STAND_S)
        finally:
            os.close(reading)
            _end(process)
        terminal.seek(0)
        said = terminal.read().decode("utf-8", "replace")[-_MOST_TEXT:]
    if isinstance(last, dict):
        return Ended(sent=tuple(sent), problem=last["problem"], text=last["traceback"] + said)
    return Ended(sent=tuple(sent), problem=_why(last, code, silence_s), text=said)


def _receive(reading: int, silence_s: float, sent: list[Any], on_sent: Callable[[Any], None]) -> Any:
    """Takes lines until the last. Returns None at the function's end, "silent", "gone", or the error it ended with."""
    rest, until = b"", time.monotonic() + max(_START_S, silence_s)
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return "silent"
        content = os.read(reading, 1 << 16)
        if not content:
            return "gone"
        *lines, rest = (rest + content).split(b"\n")
        for line in lines:
            found = json.loads(line)
            if "ended" in found:
                return found["ended"]
            if "sent" in found:
                sent.append(found["sent"])
                on_sent(found["sent"])
        until = time.monotonic() + silence_s


def _why(last: str | None, code: int | None, silence_s: float) -> str | None:
    if last is None:
        return None
    if last == "silent":
        return f"it said nothing for {silence_s:g} s and was ended"
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


def _leave(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the child and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(asked: tuple[int, str, bytes]) -> None:
    """The child. asked: the number of a pipe, the function, and the order."""
    faulthandler.register(signal.SIGUSR1)
    writing, function, order = asked
    threading.Thread(target=_end_with_parent, args=(writing,), daemon=True).start()
    module, name = function.split(":")

    def write(value: Any) -> None:
        content = json.dumps(value).encode() + b"\n"
        while content:
            content = content[os.write(writing, content) :]

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
