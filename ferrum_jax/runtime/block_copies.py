"""BlockCopies: the executables that bring what is in the pools to the host and back, by id.

Pools are numbered as in `plan.Copy`: blocks of each cache group, then the states of recurrent layers, then the hidden
states of cached prompts. Executables are made when first needed or by `warm_up`, kept in the store like those of
steps. A call copies a batch of ids of one pool; batches have few sizes, so that few ids cost little and many take
few calls. Ids are those of a data shard; executables see the pools of all shards, one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.models.sharding import describe, formats, whole
from ferrum_jax.models.sharding.shards import DATA
from ferrum_jax.runtime.compile.compile import Program
from ferrum_jax.runtime.compile.executable_store import ExecutableCache
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.pools.blocks import gather_blocks, scatter_blocks
from ferrum_jax.runtime.pools.host_blocks import trace_from_buffers, trace_to_buffers
from ferrum_jax.runtime.pools.pools import Pools
from ferrum_jax.runtime.transfers import NamedTransfers

BATCHES = (4, 32)  # ids of a call
_PROMPT_BATCHES = (32, 32)  # a hidden state is small, padding costs less than an executable more
TIER_BATCHES = (1, 4)  # of one of these kinds, whose programs grow with it


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Batch:
    """A part of a list of ids, and the size of the call that copies it."""

    part: slice
    size: int


def batches(count: int, sizes: tuple[int, int]) -> Iterator[_Batch]:
    """How `count` ids are copied: in large calls, unless more than half of one would be padding."""
    small, large = sizes
    start = 0
    while start < count:
        size = large if 2 * (count - start) > large else small
        end = min(start + size, count)
        yield _Batch(part=slice(start, end), size=size)
        start = end


class BlockCopies:
    """Copies between the pools of one layout and the host.

    What an id stands for outside of the pools is a tree of arrays [n, ...]: of blocks a tuple of `LayerBlocks`, of
    states a tuple of each layer's, of prompts [n, D].
    """

    def __init__(self, layout: Layout, executable_cache: ExecutableCache | None) -> None:
        spec = layout.options.spec
        self._pools = layout.pools
        self._has_tier = layout.ledger.num_host_blocks > 0
        self._groups = [group.layers for group in spec.kv_groups]
        self._layers = (*self._groups, spec.state_layers)
        self.mesh = layout.mesh
        self.head_copies = [group.head_copies for group in layout.ledger.groups]
        self._executable_cache = executable_cache
        self.transfers = NamedTransfers()
        self._made: dict[tuple[str, int, int], Callable[..., Any]] = {}

    @property
    def of_blocks(self) -> range:
        """The numbers of the pools that have blocks."""
        return range(len(self._groups))

    @property
    def of_states(self) -> int:
        return len(self._groups)

    @property
    def of_prompts(self) -> int:
        return len(self._groups) + 1

    def shapes(self, index: int) -> Any:
        """The form of what one id of pool `index` stands for."""
        return self._outside(index, 1)

    def pool_shapes(self, index: int) -> Any:
        """The shapes of the arrays of pool `index`."""
        return self.pick(self._pools, index)

    def names(self, index: int) -> list[str]:
        """A name for each array of that tree: its layer and, where a layer has several, which of them it is."""
        if index == self.of_prompts:
            return ["hidden"]
        paths, _ = jax.tree_util.tree_flatten_with_path(self.shapes(index))
        layers = self._layers[index]
        return ["/".join([str(layers[path[0].idx]), *(_name(entry) for entry in path[1:])]) for path, _ in paths]

    def programs(self) -> dict[tuple[str, int, int], Program]:
        """Every executable by what it does, pool and size; those of a host tier where the layout has one."""
        keys = [*self._keys(tier=False), *(self._keys(tier=True) if self._has_tier else ())]
        return {key: self._program(*key) for key in keys}

    def _keys(self, *, tier: bool) -> Iterator[tuple[str, int, int]]:
        states = [self.of_states] if self._layers[self.of_states] else []
        pools = self.of_blocks if tier else [*self.of_blocks, *states, self.of_prompts]
        for index in pools:
            sizes = TIER_BATCHES if tier else self._sizes(index)
            yield from itertools.product(
                ("spill", "load") if tier else ("gather", "scatter"), [index], sorted({*sizes})
            )

    def _sizes(self, index: int) -> tuple[int, int]:
        return _PROMPT_BATCHES if index == self.of_prompts else BATCHES

    def warm_up(self, *, tier: bool) -> None:
        """Make every executable that copies to and from host memory now, or every other one."""
        for key in self._keys(tier=tier):
            self.get(*key)

    def read(self, pools: Pools, shard: int, index: int, ids: Sequence[int]) -> Iterator[tuple[slice, Any]]:
        """(which of the ids, what they stand for) in batches of NumPy arrays, with padding behind. Waits for each."""
        for part, found in self.send(pools, shard, index, ids):
            yield part, jax.tree.map(self.transfers.fetch, found)

    def send(self, pools: Pools, shard: int, index: int, ids: Sequence[int]) -> Iterator[tuple[slice, Any]]:
        """The batches of `read` on their way to the host."""
        first = self._first(shard, index)
        for batch in batches(len(ids), self._sizes(index)):
            places = _padded(ids[batch.part], batch.size, first)
            found = self.get("gather", index, batch.size)(self.pick(pools, index), places)
            self.transfers.send(jax.tree.leaves(found))
            yield batch.part, found

    def write(
        self, pools: Pools, shard: int, index: int, ids: Sequence[int], data: Callable[[slice, int], Any]
    ) -> Pools:
        """The pools with data at `ids`; pool `index` is donated. data(which of the ids, size): a batch."""
        first = self._first(shard, index)
        for batch in batches(len(ids), self._sizes(index)):
            new = data(batch.part, batch.size)
            places = _padded(ids[batch.part], batch.size, first)
            scatter = self.get("scatter", index, batch.size)
            pools = self.put(pools, index, scatter(self.pick(pools, index), places, new))
        return pools

    def _first(self, shard: int, index: int) -> int:
        """Where a shard's ids begin in the arrays of pool `index`."""
        arrays = jax.tree.leaves(self.pool_shapes(index))
        return shard * (arrays[0].shape[0] // self.mesh.shape[DATA]) if arrays else 0

    def pick(self, pools: Pools, index: int) -> Any:
        """The arrays of pool `index`."""
        if index == self.of_prompts:
            return pools.prompts
        layers = pools.kv if index in self.of_blocks else pools.states
        return tuple(layers[layer] for layer in self._layers[index])

    def put(self, pools: Pools, index: int, new: Any) -> Pools:
        """The pools with other arrays in pool `index`."""
        if index == self.of_prompts:
            return dataclasses.replace(pools, prompts=new)
        changed = dict(zip(self._layers[index], new, strict=True))
        what = "kv" if index in self.of_blocks else "states"
        layers = enumerate(getattr(pools, what))
        return dataclasses.replace(pools, **{what: tuple(changed.get(layer, pool) for layer, pool in layers)})

    def _gathered(self, index: int, pool: Any, ids: jax.Array) -> Any:
        if index in self.of_blocks:
            return gather_blocks(pool, ids, head_copies=self.head_copies[index])
        return jax.tree.map(lambda array: array[ids], pool)

    def _scattered(self, index: int, pool: Any, ids: jax.Array, data: Any) -> Any:
        if index in self.of_blocks:
            return scatter_blocks(pool, ids, data, head_copies=self.head_copies[index])
        return jax.tree.map(lambda array, new: array.at[ids].set(new), pool, data)

    def _outside(self, index: int, count: int) -> Any:
        ids = jax.ShapeDtypeStruct((count,), jnp.int32)
        return jax.eval_shape(lambda pool, ids: self._gathered(index, pool, ids), self.pool_shapes(index), ids)

    def get(self, kind: str, index: int, size: int) -> Callable[..., Any]:
        """The executable of this kind for `size` ids of pool `index`."""
        made = self._made.get((kind, index, size))
        if made is None:
            executable = self._program(kind, index, size).get(self._executable_cache).result()
            made = self._made[kind, index, size] = functools.partial(self.transfers.call, executable)
        return made

    def _program(self, kind: str, index: int, size: int) -> Program:
        pool, ids = self.pool_shapes(index), jax.ShapeDtypeStruct((size,), jnp.int32)

        def gather() -> jax.stages.Traced:
            jitted = jax.jit(lambda pool, ids: self._gathered(index, pool, ids), out_shardings=whole(self.mesh))
            return jitted.trace(pool, ids)

        def scatter() -> jax.stages.Traced:
            jitted = jax.jit(
                lambda pool, ids, data: self._scattered(index, pool, ids, data),
                donate_argnums=(0,),
                out_shardings=formats(pool),
            )
            return jitted.trace(pool, ids, self._outside(index, size))

        traces = {
            "gather": gather,
            "scatter": scatter,
            "spill": lambda: trace_to_buffers(pool, size, self.mesh),
            "load": lambda: trace_from_buffers(pool, size, self.mesh),
        }
        return Program(
            what=f"{kind} of {size} ids, pool {index}",
            shapes=f"{dict(self.mesh.shape)} {describe(pool)} {self.head_copies}",
            mesh=self.mesh,
            trace=traces[kind],
        )


def _name(entry: Any) -> str:
    """The key, attribute or place that a step into a tree goes by."""
    return str(getattr(entry, "name", getattr(entry, "key", getattr(entry, "idx", entry))))


def _padded(ids: Sequence[int], size: int, first: int) -> np.ndarray:
    """[size] int32: the ids of a shard that begins at `first`, then its null one."""
    padded = np.full(size, first, np.int32)
    padded[: len(ids)] += np.asarray(ids, np.int32)
    return padded
