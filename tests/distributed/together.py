"""Processes of `ferrum-jax`, and two of them that meet."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support import ROOT


def started(*words: str, program: Sequence[str] = ("ferrum_jax",), num_devices: int = 1, cwd: Path = ROOT):
    """A process that prints to pipes. num_devices: of the CPU."""
    devices = f"--xla_force_host_platform_device_count={num_devices}"
    return subprocess.Popen(
        [sys.executable, "-m", *program, *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def two(start: Callable[..., subprocess.Popen]) -> Iterator[list[subprocess.Popen]]:
    """Both of two processes that meet, until the test ends. start: of one, with its number and flags."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    together = ["--coordinator", coordinator, "--num-processes", "2", "--process-id"]
    both = [start(number, *together, str(number)) for number in range(2)]
    try:
        yield both
    finally:
        for process in both:
            with process:  # closes its pipes
                process.kill()
