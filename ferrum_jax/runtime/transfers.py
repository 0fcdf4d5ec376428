"""Transfers: the only ways by which arrays come to the devices and back while steps run, each allowed by its name.

So a thread that refuses hidden ones (`jax.transfer_guard("disallow")`) may run the steps of a model's engines.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

_OF_HOST = np.ndarray, np.generic


@dataclasses.dataclass(kw_only=True)
class NamedTransfers:
    """The ways, and how many arrays and bytes took them; fields are named as in `LLM.stats`."""

    arrays_to_devices: int = 0
    bytes_to_devices: int = 0
    arrays_to_host: int = 0
    bytes_to_host: int = 0
    waits_for_host_tier: int = 0

    def call(self, executable: Callable[..., Any], *arguments: Any) -> Any:
        """The results of an executable, with which NumPy arguments go to its devices. Does not wait."""
        for argument in arguments:
            if isinstance(argument, _OF_HOST):
                self.arrays_to_devices += 1
                self.bytes_to_devices += argument.nbytes
        with _named(jax.transfer_guard_host_to_device):
            return executable(*arguments)

    def zeros(self, shape: jax.ShapeDtypeStruct) -> jax.Array:
        """An array that lies as its shape says, from the host."""
        value = np.zeros(shape.shape, shape.dtype)
        self.arrays_to_devices += 1
        self.bytes_to_devices += value.nbytes
        with _named(jax.transfer_guard_host_to_device):
            return jax.make_array_from_callback(shape.shape, shape.sharding, value.__getitem__)

    def send(self, arrays: Iterable[jax.Array]) -> None:
        """Starts copies to the host, for which `fetch` waits."""
        with _named(jax.transfer_guard_device_to_host):
            for array in arrays:
                array.copy_to_host_async()

    def fetch(self, array: Any) -> np.ndarray:
        """A `jax.Array` that was sent. Waits for every device that has it: each may still read what its step got."""
        self.arrays_to_host += 1
        self.bytes_to_host += array.nbytes
        with _named(jax.transfer_guard_device_to_host):
            found = np.asarray(array)
            if not array.is_ready():  # on a device whose copy is not read
                array.block_until_ready()
            return found

    def wait(self, arrays: Iterable[jax.Array]) -> None:
        """Waits for copies to the host tier: few may be on their way."""
        self.waits_for_host_tier += 1
        with _named(jax.transfer_guard_device_to_host):
            jax.block_until_ready(arrays)


def _named(guard: Any) -> contextlib.AbstractContextManager[None]:
    """Allows a direction where the thread does not; elsewhere nothing, for to enter jax's guard costs 40 us."""
    return contextlib.nullcontext() if guard.value in (None, "allow") else guard("allow")
