"""Several hosts as one engine: `join`, at the top of a program that all of them run."""

from __future__ import annotations

import atexit
from typing import Any

from ferrum_jax.following import follow
from ferrum_jax.runtime.processes import Processes, connect

_EXIT_REFUSED = 2


def join(coordinator: str = "auto", num_processes: int | None = None, process_id: int | None = None) -> None:
    """Makes this process one of several that run every `LLM` together, over the devices of all of them.

    On process 0 it returns and the program goes on; meshes are of all devices then. On the others it serves process 0
    and ends the program when process 0 ends, so what stands after it is run once. Models must have the same path on
    every host. Call it before anything asks for devices.

    coordinator: "auto" where jax finds its processes by itself (a TPU slice, Slurm), else HOST:PORT of process 0, with
    num_processes and process_id. Raises ValueError where they cannot be found.
    """
    if coordinator != "auto" and (num_processes is None or process_id is None):
        raise ValueError(f"coordinator is {coordinator!r}; num_processes and process_id must be given with it")
    processes = connect(coordinator, num_processes, process_id)
    if processes is None:
        return
    if processes.leads:
        atexit.register(processes.end, 0)
        return
    try:
        _serve(processes)
    finally:
        processes.end(0)


def _serve(processes: Processes) -> None:
    """Follows process 0. Raises SystemExit at its end."""
    from ferrum_jax.llm import LLM

    llm: Any = None
    while True:
        message = processes.receive()
        if isinstance(message, list):
            follow(llm.calls, message)
            continue
        try:
            llm = LLM(**message)
        except (ValueError, OSError) as error:
            processes.fail(str(error), _EXIT_REFUSED)


def end(code: int) -> None:
    """Of process 0: the others end with this exit code too."""
    from ferrum_jax.runtime.processes import current

    processes = current()
    if processes is not None:
        processes.end(code)
