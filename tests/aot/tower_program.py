"""Towers of published models compiled for a device that is not here. Layers are alike, so one is compiled."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.families import registry
from ferrum_jax.models.families.qwen3_asr import TILE_CHUNKS as _TILE_CHUNKS
from ferrum_jax.models.layers.segment_attention import tile_of
from ferrum_jax.models.sharding import make_mesh, whole
from ferrum_jax.models.spec import SoundSpec
from ferrum_jax.runtime.compile.topology import target_devices
from ferrum_jax.runtime.layout import lay_out
from ferrum_jax.runtime.media_encoders.clip_slots import ClipSlots, trace_encode_clip
from ferrum_jax.runtime.media_encoders.image_slots import ImageSlots, SlotEncoder, image_slots, trace_encode
from scripts.published import PUBLISHED
from tests.aot.described import or_error
from tests.aot.program_text import large_constants, ops_of, wide_weights

_LAYERS = 1
_PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}
_LEAST_WEIGHT = 1 << 16  # elements of a matrix


def slots_of(model: str, target: str) -> tuple[ImageSlots | ClipSlots, Any]:
    """The slots of a model whose tower has one of its layers, in bfloat16, and the mesh of one device."""
    mesh, dtype = make_mesh(MeshShape(), target_devices(target)), jnp.bfloat16
    config = PUBLISHED[model][0]
    spec = registry.spec_of(config)
    if spec.sound is not None and spec.sound.is_read_across:
        layers = dict.fromkeys(("encoder_layers", "decoder_layers", "num_hidden_layers"), _LAYERS)
        clips = lay_out(registry.spec_of({**config, **layers}), EngineConfig(dtype="bfloat16"), mesh).images
        assert clips is not None, "layers that attend to clips have slots of them"
        return clips, mesh
    assert spec.embeds_media, f"{model} sees and hears nothing"
    vision, sound = spec.vision, spec.sound
    if vision is not None:
        vision = dataclasses.replace(vision, num_layers=_LAYERS, deepstack=vision.deepstack and (0,))
    if sound is not None:
        sound = dataclasses.replace(sound, num_layers=_LAYERS)
    spec = dataclasses.replace(spec, vision=vision, sound=sound)
    targets = {
        name: jax.ShapeDtypeStruct(struct.shape, dtype, sharding=whole(mesh))
        for tower in spec.towers
        for name, struct in registry.abstract_tower(tower, dtype)[1].items()
    }
    slots = image_slots(EngineConfig(), spec, targets, jnp.dtype(dtype), mesh)
    assert slots is not None, "a tower has slots"
    return slots, mesh


def describe(
    slots: ImageSlots | ClipSlots, encoder: SlotEncoder | ClipSlots, num_patches: int, mesh: Any, target: str
) -> dict[str, Any]:
    """What the program of a call of so many patches contains. encoder: of the slots; they themselves where of clips."""
    started = time.process_time()
    if isinstance(encoder, ClipSlots):
        traced, tower = trace_encode_clip(encoder, mesh), encoder.sound
    else:
        assert isinstance(slots, ImageSlots), "encoders are of these"
        traced, tower = trace_encode(slots, encoder, num_patches, mesh), encoder.tower
    lowered = traced.lower(lowering_platforms=(_PLATFORMS[target.partition(":")[0]],))
    compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    assert memory is not None, "the compiler says what its program takes"
    matrices = [w.shape for w in encoder.weights.values() if len(w.shape) == 2 and w.size >= _LEAST_WEIGHT]
    lengths = _lengths(encoder, num_patches)  # activations may look like weights
    weights = {shape for shape in matrices if not lengths.intersection(shape)}
    return {
        "tower": tower.tower,
        "head_dim": tower.head_dim,
        "compile_s": round(time.process_time() - started, 1),
        "temp_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "pool_bytes": slots.bytes,
        "wide_weights": wide_weights(text, weights),
        "constants": large_constants(ops_of(text)),
    }


def _lengths(encoder: SlotEncoder | ClipSlots, num_patches: int) -> set[int]:
    """Rows that activations of a call and of its tiles have."""
    if isinstance(encoder, ClipSlots):
        return {num_patches, encoder.sound.num_positions}
    if isinstance(encoder.tower, SoundSpec):
        positions = encoder.embeddings_of_call(num_patches)
        of_tower = encoder.tower.num_positions
        return {positions, tile_of(positions), of_tower, _TILE_CHUNKS * of_tower}
    per_token = encoder.tower.patches_per_token
    sizes = (num_patches, tile_of(num_patches, per_token))
    return {length for size in sizes for length in (size, size // per_token)}


def main(target: str, model: str) -> list[dict[str, Any]]:
    """The smallest and the largest call of each tower."""
    slots, mesh = slots_of(model, target)
    found: list[dict[str, Any]] = []
    for encoder in (slots,) if isinstance(slots, ClipSlots) else slots.encoders:
        sizes = (encoder.max_patches,) if isinstance(encoder, ClipSlots) else (encoder.sizes[0], encoder.sizes[-1])
        for num_patches in dict.fromkeys(sizes):
            found.append({"patches": num_patches} | or_error(describe, slots, encoder, num_patches, mesh, target))
    return found
