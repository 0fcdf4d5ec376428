"""Several hosts as one engine: `join`, at the top of a program that all of them run."""

import atexit
import contextlib
import os
from collections.abc import Callable
from typing import Any

from ferrum_jax.engine.lockstep import StepFailed
from ferrum_jax.engine.shared import SharedEngine
from ferrum_jax.runtime.distributed.messages import Broken, Call
from ferrum_jax.runtime.distributed.processes import Processes, connect
from ferrum_jax.runtime.distributed.shared_secret import given_secret

_EXIT_REFUSED = 2


def join(
    coordinator: str = "auto",
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    coordinator_secret_file: str | os.PathLike[str] | None = None,
    coordinator_secret: str | None = None,
) -> None:
    """Makes this process one of several that run every `LLM` together, over the devices of all of them.

    On process 0 it returns and the program goes on; meshes are of all devices then. On the others it serves process 0
    and ends the program when process 0 ends, so what stands after it is run once. Models must have the same path on
    every host. Call it before anything asks for devices.

    coordinator: "auto" where jax finds its processes by itself (a TPU slice, Slurm), else HOST:PORT of process 0, with
    num_processes and process_id. coordinator_secret_file: holds a secret of at least 16 bytes, the same on all hosts;
    coordinator_secret is the secret itself. One of them is needed unless process 0 has a loopback address.
    Raises ValueError where the processes cannot be found or a secret is missing or wrong.
    """
    if coordinator != "auto" and (num_processes is None or process_id is None):
        raise ValueError(f"coordinator is {coordinator!r}; num_processes and process_id must be given with it")
    secret = given_secret(coordinator_secret_file, coordinator_secret)
    processes = connect(coordinator, num_processes, process_id, secret)
    if processes is None:
        return
    if processes.leads:
        atexit.register(processes.end, 0)
        return
    from ferrum_jax.llm import LLM

    serve(processes, LLM)


def serve(processes: Processes, make: Callable[..., Any]) -> None:
    """Follows process 0. make: the `LLM` of the arguments that it sends. Raises SystemExit at its end."""
    try:
        _serve(processes, make)
    finally:
        processes.end(0)


def _serve(processes: Processes, make: Callable[..., Any]) -> None:
    llm: Any = None
    while True:
        message = processes.receive()
        if isinstance(message, list):
            follow(llm.calls, message)
            continue
        if isinstance(message, Broken):  # process 0 broke alone, says why, and ends all
            continue
        try:
            llm = make(**message)
        except (ValueError, OSError) as error:
            processes.fail(str(error), _EXIT_REFUSED)


def end(code: int) -> None:
    """On process 0, lets the others end with this exit code too."""
    from ferrum_jax.runtime.distributed.processes import current

    processes = current()
    if processes is not None:
        processes.end(code)


def follow(calls: SharedEngine, made: list[Call]) -> None:
    """Makes the calls that process 0 has made."""
    for name, arguments in made:
        if name == "add":
            with contextlib.suppress(ValueError):  # a request that is refused, there as here
                calls.engine.add(*arguments)
        elif arguments:  # abort, queue_ready
            getattr(calls.engine, name)(*arguments)
        else:
            with contextlib.suppress(StepFailed):  # process 0 handles it; here as there the engine is dropped
                calls.whole(getattr(calls.engine, name))
