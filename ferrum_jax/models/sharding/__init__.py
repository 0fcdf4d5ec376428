"""Sharding: how every array of an engine lies on a mesh, by one table of logical axes.

A mesh has two axes. "dp": shards that each have rows, blocks and slots of their own. "tp": devices that share the
work of one shard: each has some heads of every attention layer, some columns of every MLP, and a stretch of the
vocabulary. Experts are spread over both axes, or over "tp" alone. The whole step runs under one `jax.shard_map`, so a
device's program sees its own parts as if they were the model, and the collectives are those that `Shards` puts there,
no others.

What does not divide: KV heads fewer than tp are repeated, the vocabulary is padded; all else is refused.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from checkpoints.rules import Expansion
from checkpoints.stored_weight import weight_of_leaf
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.io.ints import round_up
from ferrum_jax.models.sharding.parameters import PARAMETERS
from ferrum_jax.models.sharding.shards import DATA, TENSOR
from ferrum_jax.models.spec import AttentionSpec

_TPUS_OF_A_HOST = 8  # no machine has more

# Logical axis -> the mesh axes that split it. An axis that is not named here is whole on every device.
RULES: dict[str, str | tuple[str, ...]] = {
    "vocabulary": TENSOR,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "hidden": TENSOR,  # of an MLP
    "experts": (DATA, TENSOR),
    "experts_of_shard": TENSOR,  # where each data shard has all of them
    "blocks": DATA,
    "slots": DATA,
    "words": DATA,  # of the packed input
    "rows": DATA,
    "tokens": DATA,
}


def make_mesh(shape: MeshShape, devices: Sequence[Any]) -> Mesh:
    """The mesh of the first devices, live ones or of a topology description.

    Where the mesh takes a whole slice, neighbours along "tp" are neighbours in it. Raises ValueError where there
    are too few devices.
    """
    if shape.size > len(devices):
        raise ValueError(
            f"mesh is {str(shape)!r}, {shape.size} devices, and there are {len(devices)}; choose a smaller one"
            " (on the CPU: XLA_FLAGS=--xla_force_host_platform_device_count)"
        )
    sizes = (shape.dp, shape.tp)
    if devices[0].platform == "tpu" and shape.size == len(devices):
        grid = mesh_utils.create_device_mesh(sizes, list(devices), allow_split_physical_axes=True)
    else:
        grid = np.array(devices[: shape.size]).reshape(sizes)
    return Mesh(grid, (DATA, TENSOR))


def takes_all_hosts(shape: MeshShape, devices: Sequence[Any]) -> bool:
    """Whether a mesh of the first devices, live ones or of a topology description, leaves no host of a slice idle."""
    one_host = devices[0].platform != "tpu" or len(devices) <= _TPUS_OF_A_HOST
    return one_host or shape.size >= len(devices)


def crosses_processes(mesh: Mesh) -> bool:
    """Whether its data shards are of several processes."""
    return mesh.shape[DATA] > 1 and len({device.process_index for device in mesh.devices.flat}) > 1


def partition(*axes: str | None) -> PartitionSpec:
    """The PartitionSpec of logical axes."""
    return PartitionSpec(*(None if axis is None else RULES.get(axis) for axis in axes))


def on_mesh(mesh: Mesh, local: tuple[int, ...], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
    """The whole array, with its sharding, where every device has `local`."""
    spec = partition(*axes)
    shape = tuple(n * (1 if axis is None else mesh.shape[axis]) for n, axis in zip(local, spec, strict=True))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(mesh, spec))


def apart(mesh: Mesh, size: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """The flat array where every device has `size` elements of its own, one after the other."""
    return jax.ShapeDtypeStruct((mesh.size * size,), dtype, sharding=_sharding(mesh, PartitionSpec((DATA, TENSOR))))


def local_shape(mesh: Mesh, shape: tuple[int, ...], *axes: str | None) -> tuple[int, ...]:
    """The shape of one device's part of an array of the whole mesh."""
    return tuple(
        n // (1 if axis is None else mesh.shape[axis]) for n, axis in zip(shape, partition(*axes), strict=True)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateArray:
    """One array of a recurrent layer's state: its shape for one row of the whole model, and its logical axes."""

    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    axes: tuple[str | None, ...]


def _sharding(mesh: Mesh, spec: PartitionSpec) -> jax.sharding.Sharding:
    return SingleDeviceSharding(mesh.devices.item()) if mesh.size == 1 else NamedSharding(mesh, spec)


def row_major(array: jax.ShapeDtypeStruct, order: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """The array laid out in memory as kernels read it: the last axis innermost, then the one before it.

    order: its axes from the outermost to the innermost, where that is another.

    It matters on a TPU. There XLA has an order of its own for arrays whose last axes are small, and would copy a whole
    pool into the kernel's order and back in each layer of a step.
    """
    assert array.sharding is not None
    if all(device.platform != "tpu" for device in array.sharding.device_set):
        return array
    layout = Layout(major_to_minor=order or tuple(range(len(array.shape))))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=Format(layout, array.sharding))


def formats(tree: Any) -> Any:
    """The sharding and layout of each array of a tree of shapes, as results of a jitted function are given them."""
    return jax.tree.map(lambda array: array.format, tree)


def whole(mesh: Mesh) -> jax.sharding.Sharding:
    """The sharding of an array that every device has whole."""
    return _sharding(mesh, PartitionSpec())


def partitions(tree: Any) -> Any:
    """The PartitionSpec of each array of a tree that lies on a mesh of several devices."""
    return jax.tree.map(lambda array: array.sharding.spec, tree)


def trace_update(
    update: Callable[..., Any], arguments: tuple[Any, ...], mesh: Mesh, at: int = 0, placed: Any = None
) -> jax.stages.Traced:
    """The update of arguments[at], which is donated, to be lowered; on several devices each updates its own part."""
    if mesh.size > 1:
        specs = partitions(arguments)
        update = jax.shard_map(update, mesh=mesh, in_specs=specs, out_specs=specs[at], check_vma=False)
    return jax.jit(update, donate_argnums=(at,), out_shardings=placed).trace(*arguments)


def describe(tree: Any) -> str:
    """Shape, dtype, partition and memory layout of each array of a tree: the same text wherever the devices are."""
    return repr(jax.tree.map(_describe, tree))


def _describe(array: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
    layout = getattr(array.format, "layout", None)
    return array.shape, array.dtype.name, str(getattr(array.sharding, "spec", "whole")), str(layout)


def local_bytes(array: jax.ShapeDtypeStruct | jax.Array) -> int:
    """Bytes of an array on one device."""
    assert array.sharding is not None
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


# -- a model on a mesh -------------------------------------------------------------------------------------


class HasHeads(Protocol):
    """Counts of heads, of a decoder's attention or an encoder's spec."""

    @property
    def num_key_value_heads(self) -> int: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """A model's parameters on a mesh, and what one device holds.

    targets: every parameter with its shape and sharding. expansions: those that are longer than in the checkpoint.
    """

    targets: dict[str, jax.ShapeDtypeStruct]
    expansions: dict[str, Expansion]

    @property
    def weights_bytes(self) -> int:
        """Bytes of the parameters on one device."""
        return sum(map(local_bytes, self.targets.values()))

    @property
    def local_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every parameter as one device has it."""
        return {
            name: jax.ShapeDtypeStruct(target.sharding.shard_shape(target.shape), target.dtype)
            for name, target in self.targets.items()
        }


def shard_model(
    attention_of: Callable[[int], HasHeads],
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    mesh: Mesh,
    shape: MeshShape,
) -> ShardedModel:
    """The parameters of a model as they lie on a mesh of this shape. `refusals` must have nothing against it."""
    tp = shape.tp
    targets, expansions = {}, {}
    for name, parameter in parameters.items():
        axes = tuple(None if n == 1 else axis for axis, n in zip(axes_of(name), parameter.shape, strict=True))
        if axes[:1] == ("experts",) and not shape.has_experts_once:
            axes = ("experts_of_shard", *axes[1:])
        expansion = _expansion(attention_of, name, axes, parameter.shape, tp)
        if expansion is not None:
            expansions[name] = expansion
        sizes = parameter.shape if expansion is None else (expansion.size, *parameter.shape[1:])
        targets[name] = jax.ShapeDtypeStruct(sizes, parameter.dtype, sharding=_sharding(mesh, partition(*axes)))
    return ShardedModel(targets=targets, expansions=expansions)


def head_copies(attention: HasHeads, tp: int) -> int:
    """Devices of "tp" that have the same KV head."""
    return max(tp // attention.num_key_value_heads, 1)


def on_one_device(attention: AttentionSpec, tp: int) -> AttentionSpec:
    """The attention with the heads that one device has."""
    heads, kv_heads = attention.num_attention_heads // tp, max(attention.num_key_value_heads // tp, 1)
    return dataclasses.replace(attention, num_attention_heads=heads, num_key_value_heads=kv_heads)


@functools.cache
def axes_of(name: str) -> tuple[str | None, ...]:
    """The logical axes of a parameter, which may be a leaf of a form: codes and scales are cut as the weight is."""
    if (found := weight_of_leaf(name)) is not None:
        *lead, out, inputs = axes_of(found[0])
        return (
            (*lead, inputs)
            if found[1] == "order"
            else (*lead, None)
            if found[1] == "input_scale"
            else (*lead, out, inputs)
        )
    for pattern, axes in PARAMETERS:
        if fnmatch.fnmatchcase(name, pattern):
            return axes
    raise ValueError(f"parameter {name} has no logical axes; add a line to ferrum_jax/models/sharding/parameters.py")


def _expansion(
    attention_of: Callable[[int], HasHeads],
    name: str,
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    tp: int,
) -> Expansion | None:
    if axes[:1] == ("vocabulary",) and shape[0] % tp:
        return Expansion(rows=shape[0], size=round_up(shape[0], tp))
    if axes[:1] == ("kv_heads",):
        own = attention_of(layer_in(name))
        if (repeats := head_copies(own, tp)) > 1:
            run = shape[0] // own.num_key_value_heads
            return Expansion(rows=shape[0], size=shape[0] * repeats, run=run, repeats=repeats)
    return None


def layer_in(name: str) -> int:
    """The layer that a parameter is of."""
    return int(name.split(".")[1])
