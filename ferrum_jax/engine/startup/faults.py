"""Faults on purpose, for the tests of what finds them: a chip that lies, that stops, or that is not to be had.

Nothing but an explicit argument asks for one.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

FAULTS = {
    "off_head": "a kernel whose result is off in one head",
    "compile": "a kernel that does not compile",
    "hang": "a kernel that never ends",
    "abort": "a runtime that aborts its process",
    "taken": "a device that another process holds",
    "old_libtpu": "a libtpu that is older than the kernels",
}
_OFF = 0.5
_MOSAIC = "INTERNAL: Mosaic failed to compile TPU kernel: failed to legalize operation 'tpu.matmul'"
_TAKEN = (
    "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 4242. Not attempting "
    "to load libtpu.so in this process."
)
_OLD = "INVALID_ARGUMENT: Unsupported Mosaic version: expected <= 5 but got 8"


def open_devices(fault: str | None) -> Sequence[Any]:
    """jax's devices. Raises RuntimeError as jax does of one that is taken."""
    if fault == "taken":
        raise RuntimeError(_TAKEN)
    return jax.devices()


def spoilt(fault: str | None, call: Callable[[], jax.Array]) -> Callable[[], jax.Array]:
    """A kernel's call with the fault in its result, [.., heads, ..] from axis 1 on."""
    texts = {"compile": f"{_MOSAIC}\n" + "  at an operation\n" * 70, "old_libtpu": _OLD}

    def broken() -> jax.Array:
        if fault in texts:
            raise RuntimeError(texts[fault])
        if fault == "abort":
            os.abort()
        time.sleep(3600)  # "hang"
        raise AssertionError("nobody waits for so long")

    if fault == "off_head":
        return lambda: call().at[:, 0].add(_OFF)
    return call if fault in (None, "taken") else broken
