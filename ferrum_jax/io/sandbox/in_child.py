"""A function of bytes called in a child process, with bounds on its time, its memory and what it may answer.

    answer = in_child("package.module:name", content, order, bounds)      bytes of name(content, order)

For decoders written in C, which a hostile file may crash, hang or take over. Once it has imported its module the child
can open nothing any more, neither a file nor a socket, and no environment variable is passed on to it. Its content and
its answer are files without a name, so this process takes no more memory than the bounds say.
"""

import contextlib
import dataclasses
import importlib
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable
from typing import IO, Any

from ferrum_jax.io.child import end, how_ended, limit_process, start

_ENVIRONMENT = ("-i", "OPENBLAS_NUM_THREADS=1", "OMP_NUM_THREADS=1")  # each thread would count as memory
_STEP_S = 0.05  # between looks at whether anybody still waits
_START_S = 60.0  # in which even a busy machine has imported the module
_ANSWERED, _REFUSED, _NO_MEMORY, _FAILED = b"A", b"R", b"M", b"F"
_MAX_TEXT = 1 << 16  # bytes of a message


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChildBounds:
    """Limits of a child process. memory_bytes: beyond its memory at the start. answer_bytes: of its answer."""

    seconds: float
    memory_bytes: int
    answer_bytes: int


class NoAnswer(Exception):
    """A child ended without an answer. The text is a clause that says why."""


def in_child(
    function: str, content: bytes, order: Any, bounds: ChildBounds, *, look: Callable[[], None] = lambda: None
) -> bytes:
    """The bytes that function(content, order) returns in a child.

    function: "package.module:name"; its module imports all that the function uses. order: whatever can be pickled.
    look: called while the child runs; what it raises ends the child.
    Raises ValueError with the text of one that the function raises, and NoAnswer where the child gave none.
    """
    asked = function, content, order, bounds
    with tempfile.TemporaryFile() as answer:
        how: dict[str, Any] = {"stdout": answer, "stderr": subprocess.DEVNULL, "cwd": "/"}
        process = start(f"{__name__}:main", asked, environment=_ENVIRONMENT, is_isolated=True, **how)
        try:
            code = _wait(process, bounds.seconds + _START_S, look)
        finally:
            end(process)
        return _read(answer, code, bounds)


def _wait(process: subprocess.Popen[bytes], seconds: float, look: Callable[[], None]) -> int:
    for _ in range(int(seconds / _STEP_S) + 1):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_STEP_S)
        look()
    return -signal.SIGALRM  # it could not even be told


def _read(answer: IO[bytes], code: int, bounds: ChildBounds) -> bytes:
    answer.seek(0)
    kind = answer.read(1)
    if code == 0 and kind == _ANSWERED:
        return answer.read(bounds.answer_bytes)
    if code == 0 and kind in (_REFUSED, _FAILED):
        text = answer.read(_MAX_TEXT).decode("utf-8", "replace")
        raise ValueError(text) if kind == _REFUSED else NoAnswer(text)
    if code == -signal.SIGXFSZ:
        raise NoAnswer(f"its answer is more than {bounds.answer_bytes >> 20} MiB")
    if kind == _NO_MEMORY:
        raise NoAnswer(f"it took more than {bounds.memory_bytes >> 20} MiB of memory")
    if code in (-signal.SIGALRM, -signal.SIGXCPU):
        raise NoAnswer(f"it took more than {bounds.seconds:g} s")
    raise NoAnswer(how_ended(code))


def main(asked: tuple[str, bytes, Any, ChildBounds]) -> None:
    """The child."""
    function, content, order, bounds = asked
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    _confine(bounds)
    try:
        kind, answer = _ANSWERED, call(content, order)
    except MemoryError:
        kind, answer = _NO_MEMORY, b""
    except ValueError as error:
        kind, answer = _REFUSED, str(error).encode("utf-8", "replace")
    except Exception as error:  # of any kind: it is the parent that judges
        kind, answer = _FAILED, f"{type(error).__name__}: {error}".encode("utf-8", "replace")
    with open(1, "wb", closefd=False) as out:
        out.write(kind)
        out.write(answer)
    os._exit(0)


def _confine(bounds: ChildBounds) -> None:
    """Takes from this process what it needs no longer; nothing of it can be had back."""
    for ends in (signal.SIGALRM, signal.SIGXFSZ):
        signal.signal(ends, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, bounds.seconds)
    limit_process(
        (resource.RLIMIT_CPU, int(bounds.seconds) + 1),
        (resource.RLIMIT_NOFILE, 3),  # its own three: no file and no socket can be opened
        (resource.RLIMIT_FSIZE, bounds.answer_bytes + _MAX_TEXT),
        memory_bytes=bounds.memory_bytes,
    )
