"""The speeds of a device: a copy, matrix products, a dispatch and an all-reduce, each compared to its data sheet."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ferrum_jax.cli.device_check.timing import measure
from ferrum_jax.io.child import Send
from pallas_kernels.target import Target

_COPY_BYTES, _TINY_COPY_BYTES = 2**30, 2**24
_REDUCE_BYTES, _TINY_REDUCE_BYTES = 2**26, 2**20  # of a device
_SIDE, _TINY_SIDE = 8192, 256
_PRODUCTS = 4  # one after the other in a program, so that starting the program is a small part of the time
DTYPES = {"bfloat16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}
_RESULTS = {"bfloat16": jnp.bfloat16, "int8": jnp.int32}  # of a product, else float32
# XLA compiles and tries dozens of tiles for a product of its own before it runs one. The vendor's library needs no such
# trial, but XLA gives it float8 only as bfloat16.
_LIBRARY = {"xla_gpu_enable_triton_gemm": False}
_OF_LIBRARY = ("bfloat16", "int8")


def measure_rates(_: None, send: Send) -> None:
    """Sends {"what", "unit", "value", "sheet", "share", "problem"} for each rate, in the order of the module's line.

    sheet and share are None where no data sheet is known, as of the CPU.
    """
    devices = jax.devices()
    device = devices[0]
    target = target_of(device)
    on_chip = device.platform != "cpu"
    size = _COPY_BYTES if on_chip else _TINY_COPY_BYTES
    copy, there = make_copy(size)
    per_s = 2 * size / measure(lambda: copy(there)).median_s
    send(_line("copy", "GB/s", per_s / 1e9, target and target.bandwidth_bytes_per_s / 1e9))
    on_gpu = device.platform == "gpu"
    for name in _OF_LIBRARY if on_gpu else DTYPES:
        send(_product_line(name, _SIDE if on_chip else _TINY_SIDE, target, _LIBRARY if on_gpu else None))
    send(_line("dispatch", "us a call", _dispatch_s() * 1e6, None))
    if len(devices) > 1:
        per_s = _all_reduce_bytes_per_s(devices, _REDUCE_BYTES if on_chip else _TINY_REDUCE_BYTES)
        send(_line(f"all-reduce over {len(devices)}", "GB/s", per_s / 1e9, None))


def target_of(device: Any) -> Target | None:
    """An accelerator's data; None for a CPU, and for a device that does not even say how much memory it has."""
    try:
        return None if device.platform == "cpu" else Target.of_device(device)
    except ValueError:
        return None


def make_copy(num_bytes: int) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """A function that reads and writes an array of `num_bytes` bytes, and the array."""
    return jax.jit(lambda x: x + 1), jnp.zeros(num_bytes // 4, jnp.float32)


def products(dtype: str, compiler_options: dict[str, Any] | None = None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """x, w [S, S] -> x w w .. as one program of _PRODUCTS products."""

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        result = _RESULTS.get(dtype, jnp.float32)
        for _ in range(_PRODUCTS):
            x = jnp.dot(x, w, preferred_element_type=result).astype(x.dtype)
        return x

    return jax.jit(run, compiler_options=compiler_options)


def _product_line(
    name: str, side: int, target: Target | None, compiler_options: dict[str, Any] | None
) -> dict[str, Any]:
    dtype = DTYPES[name]
    sheet = (
        target
        and {
            "bfloat16": target.flops_per_s,
            "int8": target.int8_ops_per_s,
            "fp8": target.fp8_flops_per_s,
        }[name]
    )
    what = f"matmul in {name}"
    try:
        x = (jax.random.normal(jax.random.key(0), (side, side)) * side**-0.5).astype(dtype)
        run = products(dtype, compiler_options)
        seconds = measure(functools.partial(run, x, x), samples=5).median_s
    except Exception as error:  # a compiler may not know the dtype
        return {**_line(what, "Tflop/s", 0.0, None), "value": None, "problem": str(error).partition("\n")[0][:200]}
    return _line(what, "Tflop/s", _PRODUCTS * 2 * side**3 / seconds / 1e12, sheet and sheet / 1e12)


def _dispatch_s() -> float:
    """Seconds that the host takes to start a small program."""
    add, one = jax.jit(lambda x: x + 1), jnp.zeros(8)
    return measure(lambda: add(one)).median_s


def _all_reduce_bytes_per_s(devices: Any, num_bytes: int) -> float:
    """Bytes that each device sends a second; an all-reduce sends 2 (n - 1) / n times its own bytes."""
    n, mesh = len(devices), Mesh(np.array(devices), ("x",))
    spec = PartitionSpec("x")
    reduce = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()))
    there = jax.device_put(jnp.zeros((n, num_bytes // 4), jnp.float32), NamedSharding(mesh, spec))
    return 2 * (n - 1) / n * num_bytes / measure(lambda: reduce(there)).median_s


def _line(what: str, unit: str, value: float, sheet: float | None) -> dict[str, Any]:
    sheet = None if sheet is None or math.isinf(sheet) else sheet
    share = None if sheet is None else value / sheet
    problem = None
    if share is not None and share > 1:
        problem = f"{share:.0%} of what the data sheet allows: the time or the sheet is wrong"
    return {"what": what, "unit": unit, "value": value, "sheet": sheet, "share": share, "problem": problem}
