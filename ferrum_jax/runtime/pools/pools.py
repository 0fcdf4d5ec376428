"""The pools: every device array that is donated to a step and comes back from it.

`kv` is the KVPool of each layer that has blocks, in the form that the implementation reads; `states` of each recurrent
layer is a tree of arrays [states, ...]. A layer may have both or neither. `slots` is one int32 record per row slot:
sampling parameters, then the row's token ids. `prompts` keeps the final hidden state of the last token of each
cached prompt. `masks` says which tokens a row may draw; id 0 allows all, and each other is its row slot's. Id 0 of
each is null. `hidden` is no pool of ids: the final hidden states of the step's tokens, from its
forward to what samples. Nobody may hold a view of a pool across a step: donation would silently turn
into a copy of the whole pool.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ferrum_jax.io.ints import round_up
from ferrum_jax.models.sharding import StateArray, formats, local_shape, on_mesh, partitions, row_major
from ferrum_jax.models.spec import AttentionSpec, ModelSpec
from ferrum_jax.runtime.pools import untouched
from pallas_kernels.kv_pool import KVPool, make_pool, pool_shape, with_index_keys
from pallas_kernels.target import Target

FreshPools = tuple[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pools:
    """All pools of an engine; on the device, or their shapes for compiling."""

    kv: tuple[KVPool | None, ...]  # per layer; None of layers without blocks of their own
    states: tuple[Any, ...]  # per layer; () of layers that are not recurrent
    slots: Any  # [S, W + max_model_len] int32
    prompts: Any  # [Q, D], in the dtype of activations
    masks: Any  # [S, ceil(V / 32)] int32, bits of the tokens that a row may draw
    hidden: Any  # [most tokens of a step, D], likewise

    @property
    def caches(self) -> tuple[tuple[KVPool | None, ...], tuple[Any, ...]]:
        """The caches of layers: `kv` and `states`."""
        return self.kv, self.states

    def flat_caches(self) -> tuple[Any, ...]:
        """The arrays of `caches`, as they cross into an executable; its tree puts them together again."""
        return tuple(jax.tree.leaves(self.caches))


def kv_shapes(
    spec: ModelSpec, *, num_blocks: Sequence[int], block_size: int, kv_dtype: jnp.dtype, implementation: str
) -> dict[int, KVPool]:
    """The shapes of the pool of each layer that has blocks, by layer; num_blocks: per group, with the null block."""
    pools: dict[int, KVPool] = {}
    for group, count in zip(spec.kv_groups, num_blocks, strict=True):
        form = {"block_size": block_size, "kv_dtype": kv_dtype, "implementation": implementation}
        pools |= {layer: layer_pool_shape(spec.attention_of(layer), num_blocks=count, **form) for layer in group.layers}
    return pools


def layer_pool_shape(
    attention: AttentionSpec, *, num_blocks: int, block_size: int, kv_dtype: jnp.dtype, implementation: str
) -> KVPool:
    """The shapes of the pool of a layer with this attention."""
    kept = attention.kept._asdict()
    index_dim = kept.pop("index_dim")
    shape = pool_shape(
        num_blocks=num_blocks, block_size=block_size, **kept, dtype=kv_dtype, implementation=implementation
    )
    return with_index_keys(shape, index_dim)


def block_bytes(
    spec: ModelSpec, *, block_size: int, kv_dtype: jnp.dtype, implementation: str, target: Target
) -> list[int]:
    """Per cache group, bytes of one block in all of its layers as the target keeps it, scales and padding included."""
    ones = [1] * len(spec.kv_groups)
    block = kv_shapes(spec, num_blocks=ones, block_size=block_size, kv_dtype=kv_dtype, implementation=implementation)
    kept = {
        layer: sum(
            _kept_bytes([array.shape[axis] for axis in _order(pool, array)], array.dtype.itemsize, target)
            for array in jax.tree.leaves(pool)
        )
        for layer, pool in block.items()
    }
    return [sum(kept[layer] for layer in group.layers) for group in spec.kv_groups]


def _order(pool: KVPool, array: Any) -> tuple[int, ...]:
    """The axes of one of a pool's arrays from the outermost in memory to the innermost.

    Tokens of what has one head stand where others have heads, because a TPU would pad it to two.
    """
    is_one = array is pool.index_keys or (pool.is_latent and array.ndim == 4)
    return (0, 2, 1, 3) if is_one else tuple(range(array.ndim))


def _kept_bytes(shape: Sequence[int], itemsize: int, target: Target) -> int:
    """Bytes of an array that lies row by row.

    A TPU keeps its last two axes in tiles of 128 lanes and 8 rows; of 2 or 4 rows where there are no more, but of no
    fewer than fill a word of 32 bits.
    """
    *outer, rows, lanes = shape
    if target.platform == "tpu":
        fewest = max(rows, 4 // itemsize)
        rows = fewest if fewest in (1, 2, 4) else round_up(rows, 8)
        lanes = round_up(lanes, 128)
    return math.prod(outer) * rows * lanes * itemsize


def pools_on_mesh(local: Pools, mesh: Mesh) -> Pools:
    """The pools of a whole mesh where each device has `local`: heads over "tp", blocks and slots over "dp"."""
    return Pools(
        kv=tuple(layer and blocks_on_mesh(layer, mesh) for layer in local.kv),
        states=local.states,
        slots=on_mesh(mesh, local.slots.shape, local.slots.dtype, "slots", None),
        prompts=on_mesh(mesh, local.prompts.shape, local.prompts.dtype, "slots", None),
        masks=on_mesh(mesh, local.masks.shape, local.masks.dtype, "slots", None),
        hidden=on_mesh(mesh, local.hidden.shape, local.hidden.dtype, "tokens", None),
    )


def blocks_on_mesh(layer: KVPool, mesh: Mesh) -> KVPool:
    """The pool of a layer of a whole mesh where each device has `layer`."""
    axes = {4: ("blocks", None, "kv_heads", None), 3: ("blocks", "kv_heads", None)}  # values, scales
    return jax.tree.map(
        lambda a: row_major(on_mesh(mesh, a.shape, a.dtype, *axes[len(a.shape)]), _order(layer, a)), layer
    )


def with_states(pools: Pools, spec: ModelSpec, state: Any, num_states: int, mesh: Mesh) -> Pools:
    """The pools with those of recurrent layers.

    state: a tree of `StateArray`, of one row and layer. num_states: slots of a shard, the null one included.
    """
    states = jax.tree.map(lambda array: _states_on_mesh(array, num_states, mesh), state)
    of_layers = tuple(states if layer in spec.state_layers else () for layer in range(spec.num_layers))
    return dataclasses.replace(pools, states=of_layers)


def _states_on_mesh(array: StateArray, num_states: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
    local = (num_states, *local_shape(mesh, array.shape, *array.axes))
    return row_major(on_mesh(mesh, local, array.dtype, "slots", *array.axes))


def trace_fresh(shapes: Pools) -> jax.stages.Traced:
    """fill -> (arrays of caches, slots, prompts, masks, hidden), fresh, each made where it lies, ready to be lowered.

    fill: float32. Tests fill KV, states and prompts with NaN, to prove that nothing reads what it does not own.
    """
    others = (shapes.slots, shapes.prompts, shapes.masks, shapes.hidden)
    placed = (formats(shapes.flat_caches()), *(other.sharding for other in others))
    fresh = _untouched(shapes) if are_untouched(shapes) else functools.partial(_fresh, shapes)
    return jax.jit(fresh, out_shardings=placed).trace(jax.ShapeDtypeStruct((), jnp.float32))


def are_untouched(shapes: Pools) -> bool:
    """Whether fresh pools take no memory before they are written. Their executable cannot be kept as a file then."""
    return next(iter(shapes.slots.sharding.device_set)).platform == "cpu"


def _fresh(shapes: Pools, fill: jax.Array) -> FreshPools:
    kv = [layer and make_pool(layer, fill=fill) for layer in shapes.kv]
    states = jax.tree.map(lambda a: jnp.full(a.shape, fill, a.dtype), shapes.states)
    prompts, hidden = (jnp.full(like.shape, fill, like.dtype) for like in (shapes.prompts, shapes.hidden))
    slots, masks = jnp.zeros(shapes.slots.shape, jnp.int32), jnp.full(shapes.masks.shape, -1, jnp.int32)
    return tuple(jax.tree.leaves((kv, states))), slots, prompts, masks, hidden


def _untouched(shapes: Pools) -> Callable[[jax.Array], Any]:
    """Like `_fresh`, on the CPU; each device makes its own part."""
    arrays = (shapes.flat_caches(), shapes.slots, shapes.prompts, shapes.masks, shapes.hidden)
    local = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype), arrays)
    slots, prompts, masks, hidden = map(_one, (shapes.slots, shapes.prompts, shapes.masks, shapes.hidden))
    kv, states = jax.tree.map(_one, shapes.caches)
    ones = Pools(kv=kv, states=states, slots=slots, prompts=prompts, masks=masks, hidden=hidden)

    def fresh(fill: jax.Array) -> Any:
        return untouched.full(local, jax.tree.map(jnp.ravel, _fresh(ones, fill)))

    if len(shapes.slots.sharding.device_set) == 1:
        return fresh
    mesh, specs = shapes.slots.sharding.mesh, partitions(arrays)
    return jax.shard_map(fresh, mesh=mesh, in_specs=jax.sharding.PartitionSpec(), out_specs=specs, check_vma=False)


def _one(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1,) * len(array.shape), array.dtype)


def pools_of(shapes: Pools, arrays: FreshPools) -> Pools:
    """The pools whose arrays these are, in the order of `trace_fresh`."""
    caches, slots, prompts, masks, hidden = arrays
    kv, states = jax.tree.unflatten(jax.tree.structure(shapes.caches), caches)
    return Pools(kv=kv, states=states, slots=slots, prompts=prompts, masks=masks, hidden=hidden)
