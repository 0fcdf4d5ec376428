"""Clip slots: the keys and values that layers of a text model read of a sound, and the program that fills them.

Each layer of the "cross" group has a pool of blocks like any other's. Slot s has the same blocks of each, one behind
the other: all positions of one window. Slot 0 is null, and block 0, so those of slot s begin at 1 + (s - 1) B.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ferrum_jax.inputs.prompt import EncodableImage
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.models.families import registry
from ferrum_jax.models.sharding import formats, local_bytes, trace_update, whole
from ferrum_jax.models.sharding.shards import TENSOR
from ferrum_jax.models.spec import ModelSpec, SoundSpec
from ferrum_jax.runtime.media_encoders.packing import call_name
from ferrum_jax.runtime.pools.pools import Pools, blocks_on_mesh, layer_pool_shape
from pallas_kernels.kv_pool import KVPool
from pallas_kernels.kv_write import kv_write


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipSlots:
    """Shapes of an engine's clip slots. weights: of the encoder, by their names in the model. pools: by layer."""

    sound: SoundSpec
    graph: nnx.GraphDef
    weights: Mapping[str, jax.ShapeDtypeStruct]
    pools: Mapping[int, KVPool]
    num_clips: int
    block_size: int
    implementation: str  # of attention, which says the form of the pools

    @property
    def bytes(self) -> int:
        """Bytes of the pools on one device."""
        return sum(local_bytes(array) for array in jax.tree.leaves(dict(self.pools)))

    @property
    def in_words(self) -> tuple[str, str]:
        """The memory's purpose, in words."""
        return "sounds", f"keys and values of {self.num_clips} windows"

    @property
    def read_bytes(self) -> float:
        """Bytes on one device that a token reads of its clip."""
        return self.bytes / (1 + self.num_clips * self.blocks_per_clip) * self.sound.num_positions / self.block_size

    @property
    def num_runs(self) -> int:
        """Ids of the book of clips: a slot each."""
        return self.num_clips

    @property
    def num_tokens(self) -> int:
        return self.num_clips * self.sound.num_positions

    @property
    def max_patches(self) -> int:
        """Frames of a call: one window, whatever the clip."""
        return self.sound.window_frames

    @property
    def max_patches_of_each(self) -> tuple[int, ...]:
        return (self.max_patches,)

    @property
    def parts(self) -> tuple[str, ...]:
        """The name of the call."""
        return (call_name(self.sound, self.max_patches),)

    @property
    def largest_parts(self) -> tuple[str, ...]:
        return self.parts

    @property
    def blocks_per_clip(self) -> int:
        return ceil_div(self.sound.num_positions, self.block_size)

    def pick(self, names: Sequence[str], weights: Sequence[jax.Array]) -> tuple[tuple[jax.Array, ...], ...]:
        """The encoder's weights among those of the model."""
        return (tuple(array for name, array in zip(names, weights, strict=True) if name in self.weights),)

    def places(self, pools: Pools) -> tuple[int, ...]:
        """Where its arrays are among `Pools.flat_caches`."""
        found, first = [], 0
        for layer, pool in enumerate(pools.kv):
            count = len(jax.tree.leaves(pool))
            found += range(first, first + count) if layer in self.pools else ()
            first += count
        return tuple(found)

    def calls(self, clips: Sequence[tuple[EncodableImage, Sequence[int]]]) -> list[tuple[str, int, tuple[Any, ...]]]:
        """(part, place of its encoder, arguments) of the calls that encode clips into their slots."""
        return [(self.parts[0], 0, (clip.patches, np.array(slots, np.int32))) for clip, slots in clips]


def clip_slots(
    spec: ModelSpec,
    local: ModelSpec,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    dtype: jnp.dtype,
    mesh: Mesh,
    *,
    num_clips: int,
    **form: Any,
) -> ClipSlots | None:
    """The slots of a model whose layers attend to a clip; None of another. local: the spec of one device.

    targets: all weights, as they lie on the mesh. form: of the pools, as `layer_pool_shape` takes it.
    """
    if spec.sound is None or not spec.sound.is_read_across:
        return None
    graph, names = registry.abstract_tower(spec.sound, dtype)
    num_blocks = 1 + num_clips * ceil_div(spec.sound.num_positions, form["block_size"])

    def pool(layer: int) -> KVPool:
        return blocks_on_mesh(layer_pool_shape(local.attention_of(layer), num_blocks=num_blocks, **form), mesh)

    return ClipSlots(
        sound=spec.sound,
        graph=graph,
        weights={name: targets[name] for name in targets if name in names},
        pools={layer: pool(layer) for layer in spec.cross_layers},
        num_clips=num_clips,
        block_size=form["block_size"],
        implementation=form["implementation"],
    )


def trace_encode_clip(slots: ClipSlots, mesh: Mesh) -> jax.stages.Traced:
    """(weights, arrays of the pools, which are donated, frames, slot) -> these arrays with the clip's keys and values.

    Each device encodes the clip, and keeps the heads that it has.
    """
    sound, prefix = slots.sound, registry.prefix_of(slots.sound)
    names = [name.removeprefix(prefix) for name in slots.weights]
    shapes = tuple(slots.pools.values())
    tree = jax.tree.structure(shapes)

    def encode(
        weights: tuple[jax.Array, ...],
        arrays: tuple[jax.Array, ...],
        frames: jax.Array,  # [frames, mels] float32
        slot: jax.Array,  # [1] int32
    ) -> tuple[jax.Array, ...]:
        tower = registry.bind(slots.graph, dict(zip(names, weights, strict=True)))
        states = tower(frames)
        position = jnp.arange(sound.num_positions, dtype=jnp.int32)
        blocks = 1 + (slot[0] - 1) * slots.blocks_per_clip + position // slots.block_size
        pools = []
        for reader, pool in enumerate(jax.tree.unflatten(tree, arrays)):
            k, v = (_own_heads(x, pool, mesh) for x in tower.keys_and_values(states, reader))
            offsets = position % slots.block_size
            pools.append(kv_write(pool, k, v, blocks, offsets, implementation=slots.implementation))
        return tuple(jax.tree.leaves(tuple(pools)))

    arguments = (
        tuple(slots.weights.values()),
        tuple(jax.tree.leaves(shapes)),
        jax.ShapeDtypeStruct((sound.window_frames, sound.num_mels), jnp.float32, sharding=whole(mesh)),
        jax.ShapeDtypeStruct((1,), jnp.int32, sharding=whole(mesh)),
    )
    return trace_update(encode, arguments, mesh, at=1, placed=formats(arguments[1]))


def _own_heads(x: jax.Array, pool: KVPool, mesh: Mesh) -> jax.Array:  # [positions, out] -> [positions, K, H]
    """The heads that this device keeps."""
    heads = x.reshape(len(x), -1, pool.head_dim)
    own = pool.num_kv_heads
    if heads.shape[1] == own:
        return heads
    first = jax.lax.axis_index(TENSOR) * own
    return jax.lax.dynamic_slice_in_dim(heads, first, own, axis=1)
