"""The pools: every device array that is donated to a step and comes back from it.

`kv` is one array per layer, [P, C, 2K, H], K and V of a head adjacent. `slots` is one int32 record per row
slot: sampling parameters, then the row's token ids. Id 0 of each is null. Nobody may hold a view of a
pool across a step: donation would silently turn into a copy of the whole pool.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ferrum_jax.spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pools:
    """All pools of an engine; on the device, or their shapes for compiling."""

    kv: tuple[Any, ...]  # per layer [P, C, 2K, H]
    slots: Any  # [S, W + max_model_len] int32


def block_bytes(spec: ModelSpec, *, block_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one block in all layers together."""
    heads = 2 * spec.num_key_value_heads
    return spec.num_hidden_layers * block_size * heads * spec.head_dim * jnp.dtype(dtype).itemsize


def pool_shapes(
    spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: jnp.dtype, num_slots: int, record_words: int
) -> Pools:
    """The shapes of all pools: num_blocks counts the null block, num_slots the null slot."""
    shape = (num_blocks, block_size, 2 * spec.num_key_value_heads, spec.head_dim)
    return Pools(
        kv=tuple(jax.ShapeDtypeStruct(shape, dtype) for _ in range(spec.num_hidden_layers)),
        slots=jax.ShapeDtypeStruct((num_slots, record_words), jnp.int32),
    )


def make_pools(shapes: Pools, *, fill: float = 0.0) -> Pools:
    """Fresh pools. Tests fill the KV with NaN, to prove that nothing reads a block it does not own."""
    kv = tuple(jnp.full(s.shape, fill, s.dtype) for s in shapes.kv)
    return Pools(kv=kv, slots=jnp.zeros(shapes.slots.shape, jnp.int32))
