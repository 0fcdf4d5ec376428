"""GptOssForCausalLM: experts with biases and a clamped gate, attention with sinks, a window in every second layer.

The experts' weights lie as [E, in, out], gate and up interleaved; published ones are MXFP4
(`checkpoints/formats/mxfp4.py`), and stay so.
Source: OpenAI 2025 (gpt-oss model card); keys as in Hugging Face's GptOssConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import (
    ConfigReader,
    cache_groups,
    stored_dtype,
    window_within,
)
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import AttentionSpec, ExpertsSpec, MlpSpec, ModelSpec, NormSpec


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a gpt-oss config.json. Raises ValueError naming keys that are missing or not understood."""
    reader = ConfigReader(config)
    num_layers = reader.require("num_hidden_layers")
    max_positions = reader.get("max_position_embeddings", 131072)
    width = reader.require("intermediate_size")
    kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)]
    bias = bool(reader.get("attention_bias", True))
    rope = rope_from(reader, max_positions, default_theta=150000.0)
    _refuse(reader, rope.original_max_position_embeddings)
    spec = ModelSpec(
        architecture="GptOssForCausalLM",
        vocab_size=reader.require("vocab_size"),
        hidden_size=reader.require("hidden_size"),
        num_hidden_layers=num_layers,
        max_position_embeddings=max_positions,
        attention=AttentionSpec(
            num_attention_heads=reader.require("num_attention_heads"),
            num_key_value_heads=reader.get("num_key_value_heads", reader.require("num_attention_heads")),
            head_dim=reader.get("head_dim", 64),
            bias=bias,
            output_bias=bias,
            sinks=True,
            rope=rope,
        ),
        mlp=MlpSpec(
            intermediate_size=width,
            swiglu_limit=float(reader.get("swiglu_limit", 7.0)),
            swiglu_alpha=float(reader.get("swiglu_alpha", 1.702)),
        ),
        experts=ExpertsSpec(
            layers=tuple(range(num_layers)),
            num_experts=reader.get("num_local_experts", reader.get("num_experts", 128)),
            num_experts_per_tok=reader.get("num_experts_per_tok", 4),
            intermediate_size=width,
            norm_topk_prob=True,
            bias=True,
        ),
        norm=NormSpec(eps=reader.get("rms_norm_eps", 1e-5)),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", False)),
        cache_groups=cache_groups(
            reader.get("layer_types", kinds), num_layers, window_within(reader, max_positions, 128)
        ),
        dtype=stored_dtype(reader),
        eos_token_ids=reader.token_ids("eos_token_id"),
    )
    reader.finish()
    return spec


def _refuse(reader: ConfigReader, original_context: int) -> None:
    """Raises ValueError where two names of one thing disagree."""
    act = reader.get("hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"hidden_act is {act!r}; this architecture has its own clamped SwiGLU, said as 'silu'")
    chosen = reader.get("num_experts_per_tok", 4)
    for name, also, value in (
        ("experts_per_token", "num_experts_per_tok", chosen),
        ("initial_context_length", "original_max_position_embeddings of the rope", original_context),
    ):
        if reader.get(name, value) != value:
            raise ValueError(f"{name} is {reader.get(name, value)} and {also} {value}; they must be equal")


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a gpt-oss, and the Hugging Face tensor it comes from."""
    every = tuple(range(spec.num_hidden_layers))
    gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    return (
        *decoder.frame_rules(spec),
        *decoder.attention_rules(spec),
        *decoder.per_layer("self_attn.sinks", "attention.sinks", every),
        *decoder.linear("mlp.router", "mlp.router", every, True),
        *decoder.per_layer(gate_up, "mlp.experts.gate", every, TensorSlice(axis=2, step=2, transposed=True)),
        *decoder.per_layer(gate_up, "mlp.experts.up", every, TensorSlice(axis=2, start=1, step=2, transposed=True)),
        *decoder.per_layer(down, "mlp.experts.down", every, TensorSlice(transposed=True)),
        *decoder.per_layer(f"{gate_up}_bias", "mlp.experts.gate_bias", every, TensorSlice(axis=1, step=2)),
        *decoder.per_layer(f"{gate_up}_bias", "mlp.experts.up_bias", every, TensorSlice(axis=1, start=1, step=2)),
        *decoder.per_layer(f"{down}_bias", "mlp.experts.down_bias", every),
    )
