"""TrialProcess: each grammar is compiled and tried in a process of its own first, which it may end.

The compiler is native and recursive: a grammar may overflow its stack, which ends the process, or take minutes or all
memory. A child that holds the vocabulary forks a worker, and another where that one ended. What passes on its stack
passes on one twice as large here; masks need little of it (64 KiB of all that was tried).
"""

import math
import mmap
import multiprocessing
import os
import resource
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ferrum_jax.io import child

STACK_BYTES = 4 << 20  # 1,000 rules that lead to one another, 2,048 properties, 64 levels
_MEMORY_BYTES = 2 << 30  # of address space, beside what the child has
_MAX_TRIALS = 1000  # of a worker, whose memory grows
_CPU_S = 5  # ten times what the largest ordinary grammars take
_TOOK: dict[int, str] = {
    signal.SIGXCPU: f"more than {_CPU_S} s to compile",
    signal.SIGABRT: "too much memory or nesting to compile",
    signal.SIGSEGV: "too much nesting to compile",
}
_ONE_THREAD = ("OPENBLAS_NUM_THREADS=1", "OMP_NUM_THREADS=1")  # a process with threads should not fork

Trial = Callable[[Any, Any, str], str | None]  # of a vocabulary, what is asked and the text


class TrialProcess:
    """A child that tries grammars for this process; made anew where somebody ended it."""

    def __init__(self, vocabulary: Any) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._start()

    def fault(self, trial: Trial, asked: Any, text: str) -> str | None:
        """The result of `trial(vocabulary, asked, text)` in the process: a grammar's fault, or None. One at a time.

        A trial that ends its process is a fault too; one whose process was killed from outside is tried once more.
        """
        took = "its process with it"
        with self._lock:
            for _ in range(2):
                try:
                    self._link.send((trial, asked, text, _CPU_S))
                    said = self._link.recv()
                except (EOFError, OSError):
                    self._start()
                    continue
                if not isinstance(said, int):
                    return said
                if -said in _TOOK:
                    took = _TOOK[-said]
                    break
        return f"structured_outputs.{asked.kind} takes {took}; make it smaller, flatter, or with fewer repetitions"

    def _start(self) -> None:
        self._link, theirs = multiprocessing.Pipe()
        with theirs:
            order = theirs.fileno(), self._vocabulary
            how: dict[str, Any] = {**dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL), "pass_fds": order[:1]}
            process = child.start(f"{__name__}:serve", order, environment=_ONE_THREAD, **how)
        weakref.finalize(self, _end, process, self._link)


def _end(process: subprocess.Popen[bytes], link: Connection) -> None:
    link.close()
    child.end(process)


def serve(order: tuple[int, Any]) -> None:
    """The child: forks workers until the other end of the link is closed.

    order: a file descriptor of the link, which workers read and write, and the vocabulary. Where a worker ended amid a
    trial, the answer is its exit code.
    """
    link, vocabulary = Connection(order[0]), order[1]
    is_busy = mmap.mmap(-1, 1)  # shared with the workers
    code = -1
    while code:
        process = os.fork()
        if process == 0:
            threading.stack_size(STACK_BYTES)
            worker = threading.Thread(target=_work, args=(link, vocabulary, is_busy))
            worker.start()
            worker.join()
            os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code and is_busy[0]:
            link.send(code)


def _work(link: Connection, vocabulary: Any, is_busy: mmap.mmap) -> None:
    child.limit_process(memory_bytes=_MEMORY_BYTES)
    for _ in range(_MAX_TRIALS):
        is_busy[0] = 0
        try:
            trial, asked, text, cpu_s = link.recv()
        except EOFError:
            os._exit(0)
        is_busy[0] = 1
        end_s = math.ceil(time.process_time() + cpu_s)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (end_s if hard == resource.RLIM_INFINITY else min(end_s, hard), hard))
        link.send(trial(vocabulary, asked, text))
    is_busy[0] = 0
