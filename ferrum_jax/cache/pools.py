"""The pools: every device array that is donated to a step and comes back from it.

`kv` holds the arrays of one KVPool per layer, in the form that the implementation reads, as a flat tuple: arrays
alone cross into an executable. `slots` is one int32 record per row slot: sampling parameters, then the row's
token ids. Id 0 of each is null. Nobody may hold a view of a pool across a step: donation would silently turn into
a copy of the whole pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ferrum_jax.spec import ModelSpec
from pallas_kernels.kv_pool import KVPool, pool_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pools:
    """All pools of an engine; on the device, or their shapes for compiling."""

    kv: tuple[Any, ...]  # per layer values, and scales where values are int8; see KVPool
    slots: Any  # [S, W + max_model_len] int32


def split_layers(kv: Sequence[Any], spec: ModelSpec) -> list[KVPool]:
    """The pool of each layer, from the flat tuple."""
    L = spec.num_hidden_layers
    assert len(kv) in (L, 2 * L), f"{len(kv)} arrays for {L} layers"
    if len(kv) == L:
        return [KVPool(values=values, scales=None, head_dim=spec.head_dim) for values in kv]
    pairs = zip(kv[0::2], kv[1::2], strict=True)
    return [KVPool(values=values, scales=scales, head_dim=spec.head_dim) for values, scales in pairs]


def join_layers(pools: Sequence[KVPool]) -> tuple[Any, ...]:
    """The flat tuple of `split_layers`."""
    return tuple(jax.tree.leaves(list(pools)))


def block_bytes(spec: ModelSpec, *, block_size: int, kv_dtype: jnp.dtype, implementation: str) -> int:
    """Bytes of one block in all layers together, scales and padding included."""
    block = _layer_shapes(spec, num_blocks=1, block_size=block_size, kv_dtype=kv_dtype, implementation=implementation)
    return spec.num_hidden_layers * sum(a.size * a.dtype.itemsize for a in join_layers([block]))


def pool_shapes(
    spec: ModelSpec,
    *,
    num_blocks: int,
    block_size: int,
    kv_dtype: jnp.dtype,
    implementation: str,
    num_slots: int,
    record_words: int,
) -> Pools:
    """The shapes of all pools: num_blocks counts the null block, num_slots the null slot."""
    layer = _layer_shapes(
        spec, num_blocks=num_blocks, block_size=block_size, kv_dtype=kv_dtype, implementation=implementation
    )
    return Pools(
        kv=join_layers([layer] * spec.num_hidden_layers),
        slots=jax.ShapeDtypeStruct((num_slots, record_words), jnp.int32),
    )


def _layer_shapes(
    spec: ModelSpec, *, num_blocks: int, block_size: int, kv_dtype: jnp.dtype, implementation: str
) -> KVPool:
    return pool_shape(
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        dtype=kv_dtype,
        implementation=implementation,
    )


def make_pools(shapes: Pools, *, fill: float = 0.0) -> Pools:
    """Fresh pools. Tests fill the KV with NaN, to prove that nothing reads a block it does not own.

    int8 values are zero always: their scales are filled.
    """
    kv = tuple(jnp.full(s.shape, 0 if s.dtype == jnp.int8 else fill, s.dtype) for s in shapes.kv)
    return Pools(kv=kv, slots=jnp.zeros(shapes.slots.shape, jnp.int32))
