"""Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration: Qwen3's decoders, seeing by a vision tower.

Rotary positions turn by time, row and column. Tokens of an image have the tower's embeddings, and what deepstack adds
to the outputs of the first layers. They attend to the past alone, as text does.
Source: Bai et al. 2025 (Qwen3-VL); keys and defaults as in Hugging Face's configs.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrum_jax.models.families import qwen, tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader, axial_tower_readers
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.text_part import text_part_from, with_towers
from ferrum_jax.models.families.vision_tower import tower_rules
from ferrum_jax.models.spec import AttentionSpec, ModelSpec, VisionSpec

# Keys beside `text_config` that say how images stand in a prompt, or in which tensors; the processor reads them.
_OF_IMAGES = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "deepstack_visual_indexes",
)
_TOWER = "model.visual."
_SECTIONS = [24, 20, 20]
_DEEPSTACK = (8, 16, 24)
_EXPERTS = {"num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}


def _spec(text: Family, reader: ConfigReader) -> ModelSpec:
    with_sections = dataclasses.replace(text, read=functools.partial(_text, text))
    return with_tower(text_part_from(reader, _OF_IMAGES, with_sections), reader.config, _DEEPSTACK)


def _text(text: Family, reader: ConfigReader) -> ModelSpec:
    """The text model, whose rotary positions get sections."""
    config, sections = dict(reader.config), None
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), Mapping):
            rope = ConfigReader({name: config[key][name] for name in ("mrope_section",) if name in config[key]})
            sections = rope.get("mrope_section", sections or [])
            if config[key].get("mrope_interleaved", True) is not True:
                raise ValueError(f"mrope_interleaved is {shown(config[key]['mrope_interleaved'])}; it must be true")
            own = ("mrope_section", "mrope_interleaved")
            config[key] = {name: value for name, value in config[key].items() if name not in own}
    config.setdefault("rope_theta", 500000.0) if not config.get("rope_parameters") else None
    return with_sections(text.spec_from_config(config, reader.architecture), sections or _SECTIONS)


def with_tower(spec: ModelSpec, config: Mapping[str, Any], deepstack: Sequence[int] = ()) -> ModelSpec:
    """The spec with the tower of a config.json's `vision_config`, and rotary positions of three sections.

    deepstack: layers, where the config is silent. Raises ValueError naming what is missing or not understood.
    """
    vision = vision_spec_from(config.get("vision_config"), spec.hidden_size, deepstack)
    if len(vision.deepstack) > spec.num_hidden_layers:
        raise ValueError(
            f"deepstack_visual_indexes has {len(vision.deepstack)} entries, and num_hidden_layers is "
            f"{spec.num_hidden_layers}; each is added to the output of a layer of its own"
        )
    return dataclasses.replace(spec, vision=vision)


def with_sections(spec: ModelSpec, sections: Sequence[int], *, in_order: bool = False) -> ModelSpec:
    """The spec with rotary positions of three sections, as in `RopeSpec`. Raises ValueError for what are none."""
    if any(type(section) is not int for section in sections):
        raise ValueError(f"mrope_section is {shown(sections)}; it must be three whole numbers")

    def turned(own: AttentionSpec) -> AttentionSpec:
        assert own.rope is not None, "models that see images turn their heads"
        rope = dataclasses.replace(own.rope, sections=tuple(sections), sections_in_order=in_order)
        return dataclasses.replace(own, rope=rope)

    return spec.with_attention(turned)


def vision_spec_from(config: object, width: int, deepstack: Sequence[int]) -> VisionSpec:
    """VisionSpec of a `vision_config`. width: of the text model, which must be the tower's. deepstack: as `with_tower`.

    Raises ValueError naming what is missing or not understood.
    """
    reader, rope = axial_tower_readers(config)
    patch = reader.alike("patch_size", 16)
    spec = VisionSpec(
        hidden_size=reader.get("hidden_size", 1152),
        intermediate_size=reader.get("intermediate_size", 4304),
        num_layers=reader.get("depth", 27),
        num_heads=reader.get("num_heads", 16),
        patch_shape=(reader.get("in_channels", 3), reader.alike("temporal_patch_size", 2), patch, patch),
        merge=reader.get("spatial_merge_size", 2),
        num_positions=reader.get("num_position_embeddings", 2304),
        out_size=reader.get("out_hidden_size", 3584),
        deepstack=tuple(_layers(reader.config, reader, deepstack)),
        hidden_act=reader.get("hidden_act", "gelu_pytorch_tanh"),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
    )
    reader.finish()
    rope.finish()
    if spec.out_size != width:
        raise ValueError(f"vision_config's out_hidden_size is {spec.out_size}, and the text's hidden_size is {width}")
    return spec


def _layers(config: Mapping[str, Any], reader: ConfigReader, default: Sequence[int]) -> list[int]:
    """The layers of deepstack; an empty list is none of them."""
    key = "deepstack_visual_indexes"
    layers = reader.get(key, [] if config.get(key) is not None else list(default))
    if any(type(layer) is not int for layer in layers):
        raise ValueError(f"{key} is {shown(layers)}; it must be a list of layers")
    return list(layers)


def over(text: Family, read: Callable[[Family, ConfigReader], ModelSpec] = _spec, *, models: str, notes: str) -> Family:
    """The family whose text model this is. read: the spec of the whole."""
    return with_towers(
        text,
        functools.partial(read, text),
        functools.partial(tower_rules, source=_TOWER),
        of_tower=(_TOWER + "*",),
        models=models,
        notes=notes,
    )


FAMILIES = {
    "Qwen3VLForConditionalGeneration": over(
        qwen.QWEN3, models="Qwen3-VL 2B to 32B", notes="[with images and videos](../guides/images.md)"
    ),
    "Qwen3VLMoeForConditionalGeneration": over(
        dataclasses.replace(
            qwen.QWEN3_MOE,
            respell=lambda config: {**_EXPERTS, **config, "norm_topk_prob": True},  # weights always add up to 1
            weight_rules=lambda spec: tensors.joined(tensors.weight_rules(spec), spec, transposed=True),
        ),
        models="Qwen3-VL 30B-A3B, 235B-A22B",
        notes="[with images and videos](../guides/images.md); experts as published, `[in, out]`",
    ),
}
