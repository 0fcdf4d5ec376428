"""Recurrences by the TPU's kernel, compiled for a TPU that is not here: what each program contains."""

from scripts import tpu_static  # isort: skip  # before jax: it sets what libtpu reads

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.state_rows import StateRows
from pallas_kernels.state_space import state_space
from tests.aot.case_program import large_copies
from tests.aot.described import or_error

_POOL_BYTES = 2**30  # XLA puts smaller ones in vector memory


def describe(
    generation: str,
    *,
    groups: int,
    heads: int,
    state: tuple[int, int] = (128, 128),
    by_channel: bool | None = False,
    rows: int = 64,
    tokens: int | None = None,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """K groups and N heads of a device, whose states are `state`, in a pool that is donated.

    by_channel: of decays; None is Mamba2. tokens: of a mixed step; None is one of each row.
    """
    T, K, N, (size, lanes) = tokens or rows, groups, heads, state
    is_space = by_channel is None
    shape, kind, wide = jax.ShapeDtypeStruct, jnp.dtype(dtype), jnp.float32
    keys, values = (lanes, size) if is_space else (size, lanes)
    decays = shape((T, N, keys) if by_channel else (T, N), wide)
    given = [shape((T, K, keys), kind)] * 2 + [shape((T, N, values), kind), decays]
    given += [] if is_space else [shape((T, N), wide)]
    pool = shape((_POOL_BYTES // (4 * N * size * lanes) + 1, N, size, lanes), wide)
    ints = shape((rows,), jnp.int32)
    step = StateRows(slots=ints, starts=ints, counts=ints, offsets=ints, decode_only=tokens is None)
    fn = functools.partial(state_space if is_space else gated_delta, implementation="mosaic_tpu")
    arguments = [*given, pool, step]
    result = tpu_static.measure(fn, arguments, generation=generation, donate=(len(given),), counts=False)
    return {
        "kernels": {kernel.schedule.name: kernel.vmem_bytes for kernel in result.kernels},
        "aliased_bytes": result.compiled.memory_analysis().alias_size_in_bytes,
        "pool_bytes": 4 * pool.size,
        "pool_copies": large_copies(result.hlo, pool),
    }


def main(generation: str, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By name. cases: keywords of `describe`."""
    return {name: or_error(functools.partial(describe, **sizes), generation) for name, sizes in cases.items()}
