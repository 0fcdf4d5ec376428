"""Whether TPUs that are not here have the memory that their targets state."""

import tests.aot.step_program  # isort: skip  # noqa: F401  sets the environment

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from ferrum_jax.runtime.pools.budget import RESERVED_BYTES
from pallas_kernels.target import Target


def fits(device, num_bytes: int) -> bool:
    """Whether a program of a device may have so many bytes as its argument, which is donated."""
    sharding = SingleDeviceSharding(device)
    argument = jax.ShapeDtypeStruct((num_bytes // 4,), jnp.float32, sharding=sharding)
    try:
        jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=sharding).lower(argument).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    return True


def main(names: list[str]) -> dict[str, list[bool]]:
    """Which of two sizes the compiler of each topology takes."""
    found = {}
    for name in names:
        device = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
        memory = Target.of_device(device).memory_bytes
        found[name] = [fits(device, memory - RESERVED_BYTES), fits(device, memory + RESERVED_BYTES)]
    return found
