"""Sharding: how every array of an engine lies on a mesh, by one table of logical axes.

A mesh has two axes. "dp": shards that each have rows, blocks and slots of their own. "tp": devices that share the
work of one shard: each has some heads of every attention layer, some columns of every MLP, and a stretch of the
vocabulary. Experts are spread over both axes, or over "tp" alone. The whole step runs under one `jax.shard_map`, so a
device's program sees its own parts as if they were the model, and the collectives are those that `Shards` puts there,
no others.

What does not divide: KV heads fewer than tp are repeated, the vocabulary is padded; all else is refused.
"""

from __future__ import annotations

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
from ferrum_jax.config import MeshShape
from ferrum_jax.ints import round_up
from ferrum_jax.spec import AttentionSpec, ModelSpec
from ferrum_jax.spec.checks import no_multiples
from ferrum_jax.spec.stored_weight import weight_of_leaf

DATA, TENSOR = "dp", "tp"
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

# Parameter -> its logical axes, the first pattern that fits.
PARAMETERS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("embed.weight", ("vocabulary", None)),
    ("head.weight", ("vocabulary", None)),
    ("head.bias", ("vocabulary",)),
    ("layers.*.attention.q.weight", ("heads", None)),
    ("layers.*.attention.q.bias", ("heads",)),
    ("layers.*.attention.[kv].weight", ("kv_heads", None)),
    ("layers.*.attention.[kv].bias", ("kv_heads",)),
    ("layers.*.attention.*_a.weight", (None, None)),
    ("layers.*.attention.*_a.bias", (None,)),
    ("layers.*.attention.*_b.weight", ("heads", None)),
    ("layers.*.attention.o.weight", (None, "heads")),
    ("layers.*.attention.o.bias", (None,)),
    ("layers.*.attention.qkvz.weight", ("heads", None)),
    ("layers.*.attention.ba.weight", ("heads", None)),
    ("layers.*.attention.*_heads.weight", ("heads", None)),
    ("layers.*.attention.conv", (None, None, None)),
    ("layers.*.a_log", ("heads",)),
    ("layers.*.dt_bias", ("heads",)),
    ("layers.*.skip", ("heads",)),
    ("layers.*.conv_heads", ("heads", None, None)),
    ("layers.*.conv_heads_bias", ("heads",)),
    ("layers.*.conv_whole", (None, None, None)),
    ("layers.*.conv_whole_bias", (None,)),
    ("layers.*.attention.*_whole.weight", (None, None)),
    ("layers.*.heads_norm.weight", ("heads",)),
    ("layers.*.mlp.shared_gate.weight", (None, None)),
    ("layers.*.mlp.shared.down.weight", (None, "hidden")),
    ("layers.*.attention.sinks", ("heads",)),
    ("layers.*.mlp.experts.*_bias", ("experts", None)),
    ("layers.*.mlp.experts.*", ("experts", None, None)),
    ("layers.*.mlp.router.weight", (None, None)),
    ("layers.*.mlp.router.bias", (None,)),
    ("layers.*.mlp.correction", (None,)),
    ("layers.*.mlp.*_norm.weight", (None,)),
    ("layers.*.mlp.*_scale", (None,)),
    ("layers.*.mlp.*_scales", (None,)),
    ("layers.*.own_input.*.weight", (None, None)),
    ("layers.*.scale", (None,)),
    ("layer_inputs.embed", (None, "hidden")),
    ("layer_inputs.projection.weight", ("hidden", None)),
    ("layers.*.mlp.down.weight", (None, "hidden")),
    ("layers.*.mlp.down.bias", (None,)),
    ("layers.*.mlp.*.weight", ("hidden", None)),
    ("layers.*.mlp.*.bias", ("hidden",)),
    ("layers.*.attention.q_heads_norm.weight", ("heads",)),
    ("layers.*.attention.k_heads_norm.weight", ("kv_heads",)),
    ("*norm.weight", (None,)),
    ("*norm.bias", (None,)),
    # of towers: each device has all of one
    ("vision.patch.weight", (None,) * 5),
    ("vision.convolution.weight", (None,) * 4),
    ("vision.positions", (None,) * 3),
    ("vision.std_*", (None,)),
    ("vision.layers.*_min", ()),
    ("vision.layers.*_max", ()),
    ("vision.*.weight", (None, None)),
    ("vision.*.bias", (None,)),
    # of encoders
    ("words.weight", ("vocabulary", None)),
    ("positions.weight", (None, None)),
    ("types.weight", (None, None)),
    ("layers.*.[qkv].weight", ("heads", None)),
    ("layers.*.[qkv].bias", ("heads",)),
    ("layers.*.o.weight", (None, "heads")),
    ("layers.*.gate.weight", ("hidden", None)),
    ("layers.*.up.weight", ("hidden", None)),
    ("layers.*.up.bias", ("hidden",)),
    ("layers.*.down.weight", (None, "hidden")),
    ("layers.*.o.bias", (None,)),
    ("layers.*.down.bias", (None,)),
    ("scorer.*.weight", (None, None)),
    ("scorer.*.bias", (None,)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """The devices along an axis of the mesh, as the program of one of them sees them; one device has no axis."""

    axis: str | None = None
    size: int = 1

    def index(self) -> jax.Array:
        """[] int32: which of them this device is."""
        return jax.numpy.int32(0) if self.axis is None else jax.lax.axis_index(self.axis)

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of every device's x, on all of them."""
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        """The largest of every device's x, on all of them."""
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def gather(self, x: jax.Array) -> jax.Array:  # [n, ...] -> [size * n, ...]
        """Every device's rows, one device's after the other's."""
        return x if self.axis is None else jax.lax.all_gather(x, self.axis, axis=0, tiled=True)

    def gather_columns(self, x: jax.Array) -> jax.Array:  # [n, m] -> [n, size * m]
        """Every device's columns, one device's after the other's."""
        return x if self.axis is None else jax.lax.all_gather(x, self.axis, axis=1, tiled=True)

    def sum_own(self, x: jax.Array) -> jax.Array:  # [size * n, ...] -> [n, ...]
        """This device's rows of the sum of every device's x."""
        return x if self.axis is None else jax.lax.psum_scatter(x, self.axis, scatter_dimension=0, tiled=True)

    def exchange(self, x: jax.Array) -> jax.Array:  # [size * n, m] -> [n, size * m]
        """From some columns of all rows to all columns of some rows."""
        return x if self.axis is None else jax.lax.all_to_all(x, self.axis, split_axis=0, concat_axis=1, tiled=True)

    def own(self, x: jax.Array) -> jax.Array:  # [size * n, ...] -> [n, ...]
        """This device's rows of what all of them have."""
        if self.axis is None:
            return x
        count = x.shape[0] // self.size
        return jax.lax.dynamic_slice_in_dim(x, self.index() * count, count)


WHOLE = Shards()


def shards_of(mesh: Mesh) -> Shards:
    """The devices that share the work of a step's layers."""
    return _along(mesh, TENSOR)


def expert_shards_of(mesh: Mesh, shape: MeshShape) -> Shards:
    """The data shards whose tokens go to the experts together; alone where each has all experts."""
    return _along(mesh, DATA) if shape.has_experts_once else WHOLE


def _along(mesh: Mesh, axis: str) -> Shards:
    size = mesh.shape[axis]
    return WHOLE if size == 1 else Shards(axis=axis, size=size)


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
    """What one device has of an array of the whole mesh."""
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


def describe(tree: Any) -> str:
    """Shape, dtype, partition and memory layout of each array of a tree: the same text wherever the devices are."""
    return repr(jax.tree.map(_describe, tree))


def _describe(array: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
    layout = getattr(array.format, "layout", None)
    return array.shape, array.dtype.name, str(getattr(array.sharding, "spec", "whole")), str(layout)


def local_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on one device."""
    assert array.sharding is not None
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


# -- a model on a mesh -------------------------------------------------------------------------------------


class HasHeads(Protocol):
    """What a decoder's attention and an encoder's spec both say."""

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
    raise ValueError(f"parameter {name} has no logical axes; add a line to PARAMETERS in ferrum_jax/sharding.py")


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
        own = attention_of(_layer_in(name))
        if (repeats := head_copies(own, tp)) > 1:
            run = shape[0] // own.num_key_value_heads
            return Expansion(rows=shape[0], size=shape[0] * repeats, run=run, repeats=repeats)
    return None


def _layer_in(name: str) -> int:
    """The layer that a parameter is of."""
    return int(name.split(".")[1])


def refusals(spec: ModelSpec, shape: MeshShape) -> list[str]:
    """Why a model cannot run on a mesh of this shape, each with the sizes that would work; empty where it can."""
    return _refusals(lambda mesh: _undivided(spec, mesh), spec.attention.num_attention_heads, shape)


def encoder_refusals(num_attention_heads: int, intermediate_size: int, shape: MeshShape) -> list[str]:
    """The same of an encoder."""

    def undivided(mesh: MeshShape) -> list[str]:
        return no_multiples(mesh.tp, num_attention_heads=num_attention_heads, intermediate_size=intermediate_size)

    return _refusals(undivided, num_attention_heads, shape)


def _refusals(undivided: Callable[[MeshShape], list[str]], num_heads: int, shape: MeshShape) -> list[str]:
    reasons = undivided(shape)
    if not reasons:
        return []
    once, on_each = (
        [MeshShape(dp=shape.dp, tp=tp, has_experts_once=is_once) for tp in range(1, num_heads + 1)]
        for is_once in (shape.has_experts_once, False)
    )
    fits = [str(mesh.tp) for mesh in once if not undivided(mesh)]
    fits = fits or [f"{mesh.tp} with ep={mesh.tp}" for mesh in on_each if not undivided(mesh)]
    return [f"mesh is {str(shape)!r}: {', '.join(reasons)}; tp may be {', '.join(fits)}"]


def _undivided(spec: ModelSpec, shape: MeshShape) -> list[str]:
    tp, experts = shape.tp, spec.experts
    reasons = _undivided_heads(spec, tp)
    for width in dict.fromkeys(spec.mlp_of(layer).intermediate_size for layer in spec.dense_layers):
        reasons += no_multiples(tp, intermediate_size=width)
    if spec.layer_inputs is not None:
        columns = spec.num_hidden_layers * spec.layer_inputs.size
        reasons += no_multiples(tp, **{"hidden_size_per_layer_input of all layers": columns})
    if experts is not None:
        reasons += no_multiples(tp, shared_expert_intermediate_size=experts.shared_intermediate_size)
    if spec.recurrence is not None:
        reasons += spec.recurrence.undivided(tp)
    reasons += _parted_groups(spec, tp)
    if experts is not None and experts.num_experts % shape.ep:
        axes = "tp" if shape.ep == tp else "dp * tp"
        reasons.append(f"num_experts, {experts.num_experts}, is not a multiple of {axes}, {shape.ep}")
    return reasons


def _undivided_heads(spec: ModelSpec, tp: int) -> list[str]:
    reasons: list[str] = []
    for own in dict.fromkeys(spec.attention_of(layer) for layer in spec.attention_layers):
        K = own.num_key_value_heads
        reasons += no_multiples(tp, num_attention_heads=own.num_attention_heads)
        if K % tp and tp % K:
            reasons.append(f"num_key_value_heads, {K}, and tp, {tp}, do not divide one another")
    return list(dict.fromkeys(reasons))


def _parted_groups(spec: ModelSpec, tp: int) -> list[str]:
    """Weights whose inputs are spread over "tp" and cannot be without parting a group; of those alike the first."""
    found: dict[tuple[int, int], str] = {}
    for name, form in spec.forms:
        if axes_of(name)[-1] in RULES:
            num_in = _num_inputs(spec, name)
            if num_in % tp == 0 and form.problem((num_in // tp,)):
                found.setdefault((num_in, form.unit), name)
    return [
        f"the {num_in} inputs of {name} in groups of {unit} cannot be spread over tp, {tp}"
        for (num_in, unit), name in found.items()
    ]


def _num_inputs(spec: ModelSpec, name: str) -> int:
    """Inputs of attention's output projection, or of the down projection of an MLP."""
    if ".mlp." in name:
        shared = spec.experts.shared_intermediate_size if spec.experts is not None else 0
        return shared if ".shared." in name else spec.mlp_of(_layer_in(name)).intermediate_size
    layer = _layer_in(name)
    attends = layer in spec.attention_layers
    if spec.recurrence is not None and layer in spec.state_layers and (".recurrence." in name or not attends):
        return spec.recurrence.output_size
    own = spec.attention_of(layer)
    return own.num_attention_heads * own.value_dim
