"""Copies between steps: a partial tail gets a block of its own before it is appended to, a row a state of its own.

They run in an executable of their own, before or after the step that they belong to, and a step without copies
pays nothing. Inside the step XLA copies whole pools around the loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ferrum_jax.models.sharding import formats, on_mesh, trace_update
from ferrum_jax.models.spec import CacheGroup
from ferrum_jax.runtime.pools.pools import Pools

MAX_COPIES = 64  # in one call
COPY_BLOB_SIZE = 1 + 3 * MAX_COPIES  # how many there are, then (group, source, target) of each


def make_copy(
    pools: Pools, groups: Sequence[CacheGroup]
) -> Callable[[tuple[jax.Array, ...], jax.Array], tuple[jax.Array, ...]]:
    """The function that copies blocks and states in the arrays of `pools.caches`, which are to be donated.

    A loop over the copies that exist, one after the other.
    """
    tree = jax.tree.structure(pools.caches)
    group_of = {(group.kind == "state", layer): index for index, group in enumerate(groups) for layer in group.layers}

    def copy_blocks(kv: tuple[jax.Array, ...], blob: jax.Array) -> tuple[jax.Array, ...]:
        copies = blob[1:].reshape(MAX_COPIES, 3)

        def one_copy(i: jax.Array, kv: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            moved = [
                _move(layer, copies[i], group_of[is_state, index])
                for is_state, layers in zip((False, True), jax.tree.unflatten(tree, kv), strict=True)
                for index, layer in enumerate(layers)
                if (is_state, index) in group_of
            ]
            return tuple(jax.tree.leaves(moved))

        return jax.lax.fori_loop(0, blob[0], one_copy, kv)

    return copy_blocks


def trace_copies(pools: Pools, groups: Sequence[CacheGroup], mesh: Mesh) -> jax.stages.Traced:
    """The copies on a mesh, ready to be lowered: every device copies its own heads of its own shard's blocks."""
    arguments = (pools.flat_caches(), on_mesh(mesh, (COPY_BLOB_SIZE,), jnp.int32, "words"))
    return trace_update(make_copy(pools, groups), arguments, mesh, placed=formats(arguments[0]))


def _move(pool: Any, copy: jax.Array, group: int) -> Any:
    """The pool of a layer of `group` after one copy; null to null where it is another group's."""
    ids = jnp.where(copy[0] == group, copy[1:], 0)

    def moved(array: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_slice_in_dim(array, ids[0], 1)
        return jax.lax.dynamic_update_slice_in_dim(array, block, ids[1], 0)

    return jax.tree.map(moved, pool)
