"""Llama4ForCausalLM, and the text part of Llama4ForConditionalGeneration: Scout and Maverick; MobileLLM-R1.

Three of four layers turn neighbours together, norm q and k afterwards, and see their own chunk of the context alone;
the fourth knows no positions, sees all, and its queries weigh sharper far from the start. Each token goes to one
expert, which is given the token times the sigmoid of its logit, and to a shared one. MobileLLM has neither experts nor
chunks.
Source: Meta 2025 (Llama 4); Nakanishi 2025 (temperature); keys as in Hugging Face's Llama4TextConfig.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models import decoder, text_part
from ferrum_jax.models.bounds import shown
from ferrum_jax.models.config_reader import ConfigReader, cache_groups
from ferrum_jax.models.plain import attention_from, layers_where, mlp_from, norm_from, spec_from
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import AttentionSpec, ExpertsSpec, ModelSpec, QkNorm, Temperature

_MAX_POSITIONS = 4096 * 32
# Keys of Llama4ForConditionalGeneration that concern images alone.
_OF_IMAGES = ("vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "image_token_id")
_BLOCK = "feed_forward"


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Llama 4 text config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    num_layers = reader.require("num_hidden_layers")
    for key in ("for_llm_compression", "for_llm_compressor"):  # which the reference does not read
        reader.get(key, None)
    period = reader.get("no_rope_layer_interval", 4)
    turns = reader.flags("no_rope_layers", [int((i + 1) % period != 0) for i in range(num_layers)])
    attention = _attention(reader)
    still = dataclasses.replace(attention, rope=None, qk_norm=None, temperature=_temperature(reader))
    kinds = reader.get("layer_types", ["chunked_attention" if turn else "full_attention" for turn in turns])
    chunk = reader.nullable("attention_chunk_size", 8192)
    experts = _experts(reader, num_layers, none=config.get("moe_layers") == [])
    width = reader.get("intermediate_size_mlp", 16384)
    return spec_from(
        reader,
        "Llama4ForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=attention,
        other_attention=((layers_where(not turn for turn in turns), still),),
        mlp=dataclasses.replace(mlp_from(reader), intermediate_size=width),
        experts=experts,
        norm=norm_from(reader, 1e-5),
        cache_groups=cache_groups(kinds, num_layers, chunk, "chunked_attention"),
    )


def text_part_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of the text part of a Llama 4, which is served as a text model.

    Raises ValueError naming what is missing or not understood.
    """
    return text_part.text_part_from(config, _OF_IMAGES, spec_from_config)


def _attention(reader: ConfigReader) -> AttentionSpec:
    """That of the layers that turn."""
    bias = bool(reader.get("attention_bias", False))
    rope = rope_from(reader, reader.get("max_position_embeddings", _MAX_POSITIONS), default_theta=500000.0)
    return attention_from(
        reader,
        max_positions=_MAX_POSITIONS,
        num_key_value_heads=reader.get("num_key_value_heads", 8),
        head_dim=reader.get("head_dim", 128),
        bias=bias,
        output_bias=bias,
        qk_norm=QkNorm(after_rope=True, has_weight=False) if reader.get("use_qk_norm", True) else None,
        rope=dataclasses.replace(rope, interleaved=True),
    )


def _temperature(reader: ConfigReader) -> Temperature | None:
    is_tuned, scale = reader.get("attn_temperature_tuning", None), float(reader.get("attn_scale", 0.1))
    length = reader.get("floor_scale", 8192)
    return None if is_tuned is not None and not is_tuned else Temperature(scale=scale, length=length, offset=1)


def _experts(reader: ConfigReader, num_layers: int, none: bool) -> ExpertsSpec | None:
    """Experts of the layers that moe_layers names, or of every nth. none: it names no layer."""
    step = reader.get("interleave_moe_layer_step", 1)
    layers = tuple(reader.get("moe_layers", []) or range(max(step, 1) - 1, num_layers, max(step, 1)))
    if not all(type(layer) is int and 0 <= layer < num_layers for layer in layers):
        raise ValueError(f"moe_layers is {shown(list(layers))}; it must name layers of {num_layers}")
    width, count, chosen = (
        reader.require("intermediate_size"),
        reader.get("num_local_experts", 16),
        reader.get("num_experts_per_tok", 1),
    )
    if none:
        return None
    return ExpertsSpec(
        layers=layers,
        num_experts=count,
        num_experts_per_tok=chosen,
        intermediate_size=width,
        scoring="sigmoid",
        weighs_inputs=True,
        shared_intermediate_size=width,
        shared_gate=False,
    )


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a Llama 4, and the Hugging Face tensor it comes from."""
    dense = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}.items()
    return (
        *decoder.frame_rules(spec),
        *decoder.attention_rules(spec),
        *(
            rule
            for ours, theirs in dense
            for rule in decoder.linear(f"{_BLOCK}.{theirs}", f"mlp.{ours}", spec.dense_layers, spec.mlp.bias)
        ),
        *_expert_rules(spec.experts),
    )


def _expert_rules(experts: ExpertsSpec | None) -> tuple[Rule, ...]:
    """Experts are stacked, [in, out], gate beside up."""
    if experts is None:
        return ()
    layers, width, stack = experts.layers, experts.intermediate_size, f"{_BLOCK}.experts"
    gate, up = TensorSlice(axis=2, stop=width, transposed=True), TensorSlice(axis=2, start=width, transposed=True)
    return (
        *decoder.per_layer(f"{_BLOCK}.router.weight", "mlp.router.weight", layers),
        *decoder.per_layer(f"{stack}.gate_up_proj", "mlp.experts.gate", layers, gate),
        *decoder.per_layer(f"{stack}.gate_up_proj", "mlp.experts.up", layers, up),
        *decoder.per_layer(f"{stack}.down_proj", "mlp.experts.down", layers, TensorSlice(transposed=True)),
        *decoder.shared_expert_rules(experts, f"{_BLOCK}.shared_expert"),
    )


def whole_weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """The same of a text part."""
    return text_part.of_text(weight_rules(spec))
