"""Adapter slots: the arrays in which A and B of loaded adapters lie, and the write of one of them.

Every weight that adapters may add to has a `LowRankSlots`, experts an `ExpertSlots`. A and B lie on the mesh as the
weight does: A along its inputs, B along its outputs, slots and ranks whole on every device.
"""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints.adapters.lora import HEAD_PART, Adapter, LowRank
from checkpoints.placement import place, whole_targets
from checkpoints.stored_weight import weight_of
from ferrum_jax.config import EngineConfig
from ferrum_jax.io.ints import round_up
from ferrum_jax.models.sharding import ShardedModel, formats, local_bytes, trace_update, whole
from pallas_kernels.low_rank import RANK_TILE, ExpertSlots, LowRankSlots

# What `EngineConfig.adapter_targets` names: patterns of weights, the first group that fits.
_GROUPS = {
    "experts": ("layers.*.mlp.experts.gate", "layers.*.mlp.experts.up", "layers.*.mlp.experts.down"),
    "attention": ("layers.*.attention.*.weight",),
    "mlp": ("layers.*.mlp.*.weight",),
    "head": (HEAD_PART,),
}
_ABSORBED = "layers.*.attention.kv_b.weight"  # of latents: it is taken apart and multiplies no row
EMBEDDING = "embed.weight"
Pool = LowRankSlots | ExpertSlots


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged:
    """A and B of one adapter for one weight, on the devices as the weight lies, filled up to the largest rank."""

    a: Any  # [R, I], of experts [E, R, I]
    b: Any  # [O, R], of experts [E, O, R]
    scale: Any  # [] float32


jax.tree_util.register_dataclass(Staged, data_fields=("a", "b", "scale"), meta_fields=())


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSlots:
    """Shapes of an engine's slots. pools, staged: by the name of the weight, ShapeDtypeStructs on the mesh."""

    num_slots: int
    rank: int
    slots_per_tile: int
    pools: dict[str, Pool]
    staged: dict[str, Staged]
    model: ShardedModel

    @property
    def num_tiles(self) -> int:
        return -(-self.num_slots // self.slots_per_tile)

    @property
    def bytes(self) -> int:
        """On one device."""
        return sum(map(local_bytes, jax.tree.leaves(self.pools)))

    def problems(self, adapter: Adapter) -> list[str]:
        """Why an adapter that fits the model has no place in these slots."""
        missing = {name: group_of(name) for name in adapter.parts if name not in self.pools}
        found = []
        for group in sorted({*missing.values()}, key=str):
            first, *more = (name for name, own in missing.items() if own == group)
            others = f" and {len(more)} more" if more else ""
            why = "to which no slot can add; merge it with `ferrum-jax convert --adapter`"
            found.append(f"it adapts {first}{others}, {f'and adapter_targets does not name {group}' if group else why}")
        if adapter.head is not None:
            num_bytes = adapter.head.size * jax.tree.leaves(self.staged)[0].dtype.itemsize  # on all devices
            found.append(
                f"its whole head was trained (modules_to_save), {adapter.head.shape[0]} x {adapter.head.shape[1]}: "
                f"beside the base's it would take {num_bytes:,} bytes a slot, and these "
                f"slots, of rank {self.rank}, cannot hold it; merge it with `ferrum-jax convert --adapter`"
            )
        return found

    @property
    def head(self) -> LowRankSlots | None:
        """The slots of the head, which `sample` and `score` read; None without any."""
        found = self.pools.get(HEAD_PART)
        assert not isinstance(found, ExpertSlots), "a head is one weight"
        return found

    def of_layers(self, arrays: tuple[jax.Array, ...]) -> dict[str, Pool]:
        """Slot arrays by weight name, without the head's."""
        pools = jax.tree.unflatten(jax.tree.structure(self.pools), arrays)
        return {name: pool for name, pool in pools.items() if name != HEAD_PART}

    def of_head(self, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The head's slot arrays, picked from all slot arrays; () without any."""
        return tuple(jax.tree.leaves(jax.tree.unflatten(jax.tree.structure(self.pools), arrays).get(HEAD_PART)))

    def stage(self, adapter: Adapter) -> dict[str, Staged]:
        """The adapter on the devices, ready to be written to a slot; zeros where it adds nothing."""
        return {name: self._stage(name, adapter.parts.get(name)) for name in self.pools}

    def _stage(self, name: str, part: LowRank | None) -> Staged:
        like, expansion = self.staged[name], self.model.expansions.get(_source_of(name, self.model))
        stored = like.b.shape if expansion is None else expansion.stored_shape(like.b.shape)
        a, b = np.zeros(like.a.shape, like.a.dtype), np.zeros(stored, like.b.dtype)
        if part is not None:
            a[..., : part.rank, :] = part.a
            b[..., : part.rank] = part.b
        scale = np.float32(0 if part is None else part.scale)
        return Staged(
            a=place([a], like.a), b=place([b], like.b, expansion), scale=jax.device_put(scale, like.scale.sharding)
        )


def group_of(name: str) -> str | None:
    """The group of `EngineConfig.adapter_targets` that a weight belongs to."""
    if fnmatch.fnmatchcase(name, _ABSORBED):
        return None
    return next(
        (group for group, patterns in _GROUPS.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)), None
    )


def adapter_slots(config: EngineConfig, model: ShardedModel, dtype: jnp.dtype, mesh: Mesh) -> AdapterSlots | None:
    """The slots that a config asks for, or None. Raises ValueError for targets that cannot have any."""
    if not config.max_adapters:
        return None
    asked = [part.strip() for part in config.adapter_targets.split(",")]
    per_tile = 1 if config.invariant else max(1, RANK_TILE // config.max_adapter_rank)
    num_slots = round_up(config.max_adapters, per_tile)
    pools: dict[str, Pool] = {}
    staged: dict[str, Staged] = {}
    weights = whole_targets(model.targets)
    weights.setdefault(HEAD_PART, weights[EMBEDDING])
    for name, weight in weights.items():
        if len(weight.shape) < 2 or group_of(name) not in asked:
            continue
        source = _source_of(name, model)
        leaf = next(target for own, target in model.targets.items() if weight_of(own) == source)
        axes = _axes(leaf)
        staged[name] = _staged_shapes(weight.shape, axes, config.max_adapter_rank, dtype, mesh)
        pools[name] = _pool_shapes(weight.shape, axes, config.max_adapter_rank, num_slots, per_tile, dtype, mesh)
    lacking = [part for part in asked if not any(group_of(name) == part for name in pools)]
    if lacking:
        raise ValueError(
            f"adapter_targets is {config.adapter_targets!r}, and this model has no weights of {', '.join(lacking)}; "
            f"it may name {', '.join(dict.fromkeys(g for n in model.targets if (g := group_of(weight_of(n)))))}"
        )
    return AdapterSlots(
        num_slots=num_slots,
        rank=config.max_adapter_rank,
        slots_per_tile=per_tile,
        pools=pools,
        staged=staged,
        model=model,
    )


def _source_of(name: str, model: ShardedModel) -> str:
    """The base weight's name; for a tied head, the embedding's."""
    is_there = any(weight_of(own) == name for own in model.targets)
    return name if is_there else EMBEDDING


def _axes(target: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
    """The mesh axes that split each axis of a weight."""
    spec = tuple(target.sharding.spec) if isinstance(target.sharding, NamedSharding) else ()
    return (*spec, *(None,) * (len(target.shape) - len(spec)))


def _struct(mesh: Mesh, shape: Sequence[int], dtype: Any, *axes: Any) -> Any:
    sharding = whole(mesh) if mesh.size == 1 else NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def _staged_shapes(shape: Sequence[int], axes: Sequence[Any], rank: int, dtype: jnp.dtype, mesh: Mesh) -> Staged:
    *lead, out, inputs = shape
    *of_lead, of_out, of_in = axes
    return Staged(
        a=_struct(mesh, (*lead, rank, inputs), dtype, *of_lead, None, of_in),
        b=_struct(mesh, (*lead, out, rank), dtype, *of_lead, of_out, None),
        scale=_struct(mesh, (), jnp.float32),
    )


def _pool_shapes(
    shape: Sequence[int], axes: Sequence[Any], rank: int, num_slots: int, per_tile: int, dtype: jnp.dtype, mesh: Mesh
) -> Pool:
    *lead, out, inputs = shape
    *of_lead, of_out, of_in = axes
    if lead:
        return ExpertSlots(
            a=_struct(mesh, (num_slots, *lead, rank, inputs), dtype, None, *of_lead, None, of_in),
            b=_struct(mesh, (num_slots, *lead, rank, out), dtype, None, *of_lead, None, of_out),
            scales=_struct(mesh, (num_slots,), jnp.float32, None),
        )
    tiles = (num_slots // per_tile, per_tile * rank)
    return LowRankSlots(
        a=_struct(mesh, (*tiles, inputs), dtype, None, None, of_in),
        b=_struct(mesh, (*tiles, out), dtype, None, None, of_out),
        scales=_struct(mesh, tiles, jnp.float32, None, None),
        rank=rank,
    )


def trace_fresh_adapters(slots: AdapterSlots) -> jax.stages.Traced:
    """() -> the arrays of all slots, empty, each made where it lies."""
    shapes = slots.pools
    placed = jax.tree.map(lambda array: array.sharding, shapes)
    return jax.jit(
        lambda: tuple(jax.tree.leaves(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes))),
        out_shardings=tuple(jax.tree.leaves(placed)),
    ).trace()


def trace_write_adapter(slots: AdapterSlots, mesh: Mesh) -> jax.stages.Traced:
    """(arrays of all slots, which are donated, a slot's id, staged) -> the arrays with that slot written."""
    tree = jax.tree.structure(slots.pools)

    def write(arrays: tuple[jax.Array, ...], slot: jax.Array, staged: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        pools: Mapping[str, Pool] = jax.tree.unflatten(tree, arrays)
        given = jax.tree.unflatten(jax.tree.structure(slots.staged), staged)
        return tuple(jax.tree.leaves({name: _written(pool, slot - 1, given[name]) for name, pool in pools.items()}))

    pools = tuple(jax.tree.leaves(slots.pools))
    slot = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole(mesh))
    arguments = (pools, slot, tuple(jax.tree.leaves(slots.staged)))
    return trace_update(write, arguments, mesh, placed=formats(pools))


def _written(pool: Pool, index: jax.Array, staged: Staged) -> Pool:
    zero, b = jnp.int32(0), staged.b.swapaxes(-1, -2)

    def put(array: jax.Array, value: jax.Array, *at: jax.Array) -> jax.Array:
        filled = value.reshape((1,) * (array.ndim - value.ndim) + value.shape)
        return jax.lax.dynamic_update_slice(array, filled, (*at, *(zero,) * (array.ndim - len(at))))

    if isinstance(pool, ExpertSlots):
        return ExpertSlots(
            a=put(pool.a, staged.a, index), b=put(pool.b, b, index), scales=put(pool.scales, staged.scale, index)
        )
    at = index // pool.slots_per_tile, index % pool.slots_per_tile * pool.rank
    scales = jnp.full((1, pool.rank), staged.scale)
    return LowRankSlots(
        a=put(pool.a, staged.a, *at), b=put(pool.b, b, *at), scales=put(pool.scales, scales, *at), rank=pool.rank
    )
