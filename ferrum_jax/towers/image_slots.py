"""Image slots: the pool of embeddings of images or sounds on the device, and the programs that encode them into it.

The pool is [slots, (1 + deepstack) D], whole on every device, as the tower is: each device encodes every image. Slot 0
is null. An encoder is compiled for a few numbers of patches; several images go into one call, one after the other.
A clip is as an image whose patches are its frames.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ferrum_jax.config import EngineConfig
from ferrum_jax.ints import ceil_div, round_up
from ferrum_jax.layers.segment_attention import QUERY_TILE
from ferrum_jax.models import registry
from ferrum_jax.prompt import IMAGE_RUN as RUN
from ferrum_jax.prompt import EncodableImage
from ferrum_jax.sharding import local_bytes, partitions, whole
from ferrum_jax.spec import ModelSpec, SoundSpec, VisionSpec
from ferrum_jax.towers.packing import given, num_embeddings, packed, places_shape

_GROWTH = 4  # from one number of patches to the next


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSlots:
    """Shapes of an engine's image slots. weights: of the tower, by their names in the model.

    sizes: patches of an encoder's call, the smallest first. one_by_one: a call encodes one image, so that its bits do
    not depend on others.
    """

    tower: VisionSpec | SoundSpec
    graph: nnx.GraphDef
    weights: Mapping[str, jax.ShapeDtypeStruct]
    pool: jax.ShapeDtypeStruct
    sizes: tuple[int, ...]
    one_by_one: bool

    @property
    def bytes(self) -> int:
        """Bytes of the pool on one device."""
        return local_bytes(self.pool)

    @property
    def in_words(self) -> tuple[str, str]:
        """What the memory is for."""
        nouns = "images" if isinstance(self.tower, VisionSpec) else "sounds"
        return nouns, f"embeddings of {nouns}"

    @property
    def read_bytes(self) -> float:
        """Bytes that each token reads: none, for only those of images read an embedding."""
        return 0.0

    @property
    def num_runs(self) -> int:
        """Without the null one."""
        return self.pool.shape[0] // RUN - 1

    @property
    def num_tokens(self) -> int:
        return self.num_runs * RUN

    def pick(self, names: Sequence[str], weights: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The tower's weights among those of the model."""
        return tuple(array for name, array in zip(names, weights, strict=True) if name in self.weights)

    def calls(self, images: Sequence[tuple[EncodableImage, Sequence[int]]]) -> list[tuple[int, tuple[Any, ...]]]:
        """(patches, arguments) of the calls that encode images into their runs."""
        groups: list[list[tuple[EncodableImage, Sequence[int]]]] = []
        room = 0
        for image, runs in images:
            count = math.prod(image.grid)
            if count > room or self.one_by_one:
                groups.append([])
                room = self.sizes[-1]
            groups[-1].append((image, runs))
            room -= count
        return [self._packed(group) for group in groups]

    def _packed(self, images: Sequence[tuple[EncodableImage, Sequence[int]]]) -> tuple[int, tuple[Any, ...]]:
        """The smallest call that holds these images."""
        total = sum(math.prod(image.grid) for image, _ in images)
        size = next(size for size in self.sizes if size >= total)
        pixels, places, where = packed(self.tower, size, [image for image, _ in images])
        slots = np.full(
            self.embeddings_of_call(size), self.pool.shape[0], np.int32
        )  # beyond the pool: padding is dropped
        for (image, runs), own in zip(images, where, strict=True):
            filled = (np.array(runs)[:, None] * RUN + np.arange(RUN)).reshape(-1)
            slots[own] = filled[: num_embeddings(self.tower, image)]
        return size, (pixels, places, slots)

    def embeddings_of_call(self, size: int) -> int:
        """How many embeddings a call of so many patches makes."""
        patches, tokens = self.tower.chunk
        return size // patches * tokens


def image_slots(
    config: EngineConfig, spec: ModelSpec, targets: Mapping[str, jax.ShapeDtypeStruct], dtype: jnp.dtype, mesh: Mesh
) -> ImageSlots | None:
    """The slots of a model with a tower; None of one without. targets: all weights, as they lie on the mesh."""
    if not spec.embeds_media:
        return None
    (tower,) = spec.towers
    graph, names = registry.abstract_tower(tower, dtype)
    num_slots = (ceil_div(config.max_image_tokens, RUN) + 1) * RUN
    pool = jax.ShapeDtypeStruct((num_slots, tower.embedding_size), dtype, sharding=whole(mesh))
    return ImageSlots(
        tower=tower,
        graph=graph,
        weights={name: targets[name] for name in targets if name in names},
        pool=pool,
        sizes=_sizes(config, tower),
        one_by_one=config.invariant,
    )


def _sizes(config: EngineConfig, tower: VisionSpec | SoundSpec) -> tuple[int, ...]:
    """Where all images have as many patches, a call has one: that fills a device."""
    if tower.patches_of_all is not None:
        return (tower.patches_of_all,)
    return encoder_sizes(config.max_image_patches, tower.chunk[0], invariant=config.invariant)


def encoder_sizes(max_patches: int, per_token: int, *, invariant: bool) -> tuple[int, ...]:
    """Numbers of patches that encoders are compiled for; the largest alone where bits must not depend on them."""
    largest = round_up(round_up(max_patches, QUERY_TILE) if max_patches > QUERY_TILE else max_patches, per_token)
    sizes, size = [], round_up(QUERY_TILE, per_token)
    while size < largest and not invariant:
        sizes.append(size)
        size *= _GROWTH
    return (*sizes, largest)


def trace_fresh_images(slots: ImageSlots) -> jax.stages.Traced:
    """() -> the pool, zeros."""
    return jax.jit(lambda: jnp.zeros(slots.pool.shape, slots.pool.dtype), out_shardings=slots.pool.sharding).trace()


def trace_encode(slots: ImageSlots, num_patches: int, mesh: Mesh) -> jax.stages.Traced:
    """(weights, pool, which is donated, pixels, places, slots) -> the pool with the images' embeddings."""
    names = [name.removeprefix(registry.prefix_of(slots.tower)) for name in slots.weights]

    def encode(
        weights: tuple[jax.Array, ...],
        pool: jax.Array,
        pixels: jax.Array,  # [patches, values] float32
        places: jax.Array,  # as `places_shape` says, int32
        ids: jax.Array,  # [embeddings] int32
    ) -> jax.Array:
        tower = registry.bind(slots.graph, dict(zip(names, weights, strict=True)))
        found = tower(*given(slots.tower, pixels, places))
        return pool.at[ids].set(found.astype(pool.dtype), mode="drop")

    def struct(shape: tuple[int, ...], kind: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=whole(mesh))

    arguments = (
        tuple(slots.weights.values()),
        slots.pool,
        struct((num_patches, slots.tower.patch_values), jnp.float32),
        struct(places_shape(slots.tower, num_patches), jnp.int32),
        struct((slots.embeddings_of_call(num_patches),), jnp.int32),
    )
    if mesh.size > 1:
        specs = partitions(arguments)
        encode = jax.shard_map(encode, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
    return jax.jit(encode, donate_argnums=(1,), out_shardings=slots.pool.sharding).trace(*arguments)
