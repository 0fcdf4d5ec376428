"""Image slots: the pool of embeddings of images or sounds on the device, and the programs that encode them into it.

The pool is [slots, (1 + deepstack) D], whole on every device, as the tower is: each device encodes every image. Slot 0
is null. An encoder is compiled for a few numbers of patches; several images go into one call, one after the other.
A clip is as an image whose patches are its frames; a model that sees and hears has an encoder of each.
"""

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
from ferrum_jax.inputs.prompt import IMAGE_RUN as RUN
from ferrum_jax.inputs.prompt import EncodableImage
from ferrum_jax.io.ints import ceil_div, round_up
from ferrum_jax.models.families import registry
from ferrum_jax.models.layers.segment_attention import QUERY_TILE
from ferrum_jax.models.sharding import local_bytes, trace_update, whole
from ferrum_jax.models.spec import ModelSpec, SoundSpec, VisionSpec
from ferrum_jax.runtime.media_encoders.packing import call_name, given, num_embeddings, packed, places_shape

_GROWTH = 4  # from one number of patches to the next


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotEncoder:
    """One tower. weights: by their names in the model. sizes: patches of a call, the smallest first."""

    tower: VisionSpec | SoundSpec
    graph: nnx.GraphDef
    weights: Mapping[str, jax.ShapeDtypeStruct]
    sizes: tuple[int, ...]

    @property
    def is_of_sounds(self) -> bool:
        return isinstance(self.tower, SoundSpec)

    @property
    def max_patches(self) -> int:
        """How many an image or clip may have that a call has room for."""
        return self.sizes[-1] - self.tower.patches_in_call(0)

    def embeddings_of_call(self, size: int) -> int:
        """How many embeddings a call of so many patches makes."""
        patches, tokens = self.tower.chunk
        return size // patches * tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSlots:
    """Shapes of an engine's image slots. encoders: for images and sounds, which fill the same pool.

    one_by_one says that a call encodes one image, so that its bits do not depend on others.
    """

    encoders: tuple[SlotEncoder, ...]
    pool: jax.ShapeDtypeStruct
    one_by_one: bool

    @property
    def weights(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The weights of all towers, by their names in the model."""
        return {name: weight for encoder in self.encoders for name, weight in encoder.weights.items()}

    @property
    def bytes(self) -> int:
        """Bytes of the pool on one device."""
        return local_bytes(self.pool)

    @property
    def in_words(self) -> tuple[str, str]:
        """The memory's purpose, in words."""
        nouns = " and ".join("sounds" if encoder.is_of_sounds else "images" for encoder in self.encoders)
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

    @property
    def max_patches(self) -> int:
        """How many the largest call has."""
        return max(encoder.sizes[-1] for encoder in self.encoders)

    @property
    def max_patches_of_each(self) -> tuple[int, ...]:
        """How many one image or clip of each encoder may have."""
        return tuple(encoder.max_patches for encoder in self.encoders)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the calls, in order of use."""
        return tuple(call_name(encoder.tower, size) for encoder in self.encoders for size in encoder.sizes)

    @property
    def largest_parts(self) -> tuple[str, ...]:
        """The largest call of each encoder."""
        return tuple(call_name(encoder.tower, encoder.sizes[-1]) for encoder in self.encoders)

    def pick(self, names: Sequence[str], weights: Sequence[jax.Array]) -> tuple[tuple[jax.Array, ...], ...]:
        """Each tower's weights among those of the model."""
        there = dict(zip(names, weights, strict=True))
        return tuple(tuple(there[name] for name in names if name in encoder.weights) for encoder in self.encoders)

    def calls(self, images: Sequence[tuple[EncodableImage, Sequence[int]]]) -> list[tuple[str, int, tuple[Any, ...]]]:
        """(part, place of its encoder, arguments) of the calls that encode images into their runs."""
        found: list[tuple[str, int, tuple[Any, ...]]] = []
        for place, encoder in enumerate(self.encoders):
            own = [(image, runs) for image, runs in images if (image.kind == "audio") == encoder.is_of_sounds]
            found += [(part, place, arguments) for part, arguments in self._calls_of(encoder, own)]
        return found

    def _calls_of(
        self, encoder: SlotEncoder, images: Sequence[tuple[EncodableImage, Sequence[int]]]
    ) -> list[tuple[str, tuple[Any, ...]]]:
        groups: list[list[tuple[EncodableImage, Sequence[int]]]] = []
        room = 0
        for image, runs in images:
            count = encoder.tower.patches_in_call(math.prod(image.grid))
            if count > room or self.one_by_one:
                groups.append([])
                room = encoder.sizes[-1]
            groups[-1].append((image, runs))
            room -= count
        return [self._packed(encoder, group) for group in groups]

    def _packed(
        self, encoder: SlotEncoder, images: Sequence[tuple[EncodableImage, Sequence[int]]]
    ) -> tuple[str, tuple[Any, ...]]:
        """The smallest call that holds these images."""
        tower = encoder.tower
        total = sum(tower.patches_in_call(math.prod(image.grid)) for image, _ in images)
        size = next(size for size in encoder.sizes if size >= total)
        pixels, places, where = packed(tower, size, [image for image, _ in images])
        beyond = self.pool.shape[0]  # where padding is dropped
        slots = np.full(encoder.embeddings_of_call(size), beyond, np.int32)
        for (image, runs), own in zip(images, where, strict=True):
            filled = (np.array(runs)[:, None] * RUN + np.arange(RUN)).reshape(-1)
            slots[own] = filled[: num_embeddings(tower, image)]
        return call_name(tower, size), (pixels, places, slots)


def image_slots(
    config: EngineConfig, spec: ModelSpec, targets: Mapping[str, jax.ShapeDtypeStruct], dtype: jnp.dtype, mesh: Mesh
) -> ImageSlots | None:
    """The slots of a model with towers, or None. targets: all weights, as they lie on the mesh."""
    if not spec.embeds_media:
        return None
    num_slots = (ceil_div(config.max_image_tokens, RUN) + 1) * RUN
    pool = jax.ShapeDtypeStruct((num_slots, spec.towers[0].embedding_size), dtype, sharding=whole(mesh))
    encoders = tuple(_encoder(config, tower, targets, dtype) for tower in spec.towers)
    return ImageSlots(encoders=encoders, pool=pool, one_by_one=config.invariant)


def _encoder(
    config: EngineConfig, tower: VisionSpec | SoundSpec, targets: Mapping[str, jax.ShapeDtypeStruct], dtype: jnp.dtype
) -> SlotEncoder:
    graph, names = registry.abstract_tower(tower, dtype)
    weights = {name: targets[name] for name in targets if name in names}
    return SlotEncoder(tower=tower, graph=graph, weights=weights, sizes=_sizes(config, tower))


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


def trace_encode(slots: ImageSlots, encoder: SlotEncoder, num_patches: int, mesh: Mesh) -> jax.stages.Traced:
    """(weights, pool, which is donated, pixels, places, slots) -> the pool with the images' embeddings."""
    tower = encoder.tower
    names = [name.removeprefix(registry.prefix_of(tower)) for name in encoder.weights]

    def encode(
        weights: tuple[jax.Array, ...],
        pool: jax.Array,
        pixels: jax.Array,  # [patches, values] float32
        places: jax.Array,  # as `places_shape` says, int32
        ids: jax.Array,  # [embeddings] int32
    ) -> jax.Array:
        bound = registry.bind(encoder.graph, dict(zip(names, weights, strict=True)))
        found = bound(*given(tower, pixels, places))
        return pool.at[ids].set(found.astype(pool.dtype), mode="drop")

    def struct(shape: tuple[int, ...], kind: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=whole(mesh))

    arguments = (
        tuple(encoder.weights.values()),
        slots.pool,
        struct((num_patches, tower.patch_values), jnp.float32),
        struct(places_shape(tower, num_patches), jnp.int32),
        struct((encoder.embeddings_of_call(num_patches),), jnp.int32),
    )
    return trace_update(encode, arguments, mesh, at=1, placed=slots.pool.sharding)
