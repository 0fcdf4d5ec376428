"""Phi3ForCausalLM: Phi-3, Phi-3.5 and Phi-4. Llama's decoder with fused projections, and long contexts by longrope.

longrope divides frequencies by one list of factors in contexts up to the original length and by another in longer
ones. The reference implementation changes lists when a sequence outgrows the original length, and computes all of
it anew. Keys in a cache cannot follow, so an engine takes one list for its life: the long one if max_model_len is
beyond the original length (`ModelSpec.fitted`).
Source: Abdin et al. 2024 (Phi-3); Ding et al. 2024 (LongRoPE); keys as in Hugging Face's Phi3Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Part, Rule
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import ConfigReader, cache_groups, rope_from, stored_dtype, window_within
from ferrum_jax.spec import ModelSpec

# Keys of which the reference implementation knows one value.
_ONLY = {
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,  # every layer attends in full
    "interpolate_factor": 1,
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Phi-3 or Phi-4 config.json. Raises ValueError naming keys that are missing or not understood."""
    reader = ConfigReader(_with_one_spelling(config))
    hidden_size = reader.require("hidden_size")
    num_heads = reader.require("num_attention_heads")
    num_layers = reader.require("num_hidden_layers")
    max_positions = reader.get("max_position_embeddings", 4096)
    reader.only(**_ONLY)
    spec = ModelSpec(
        architecture="Phi3ForCausalLM",
        vocab_size=reader.require("vocab_size"),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=reader.get("num_key_value_heads", num_heads),
        head_dim=reader.get("head_dim", hidden_size // num_heads),
        intermediate_size=reader.require("intermediate_size"),
        max_position_embeddings=max_positions,
        hidden_act=reader.get("hidden_act", "silu"),
        rms_norm_eps=reader.get("rms_norm_eps", 1e-5),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", False)),
        rope=rope_from(reader, max_positions, default_partial=1.0),
        cache_groups=cache_groups(["sliding_attention"] * num_layers, num_layers, window_within(reader, max_positions)),
        dtype=stored_dtype(reader),
        eos_token_ids=reader.token_ids("eos_token_id"),
    )
    reader.finish()
    return spec


def _with_one_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with "longrope" for what older ones call "su" or "yarn", the original length beside the factors."""
    found = dict(config)
    original = found.pop("original_max_position_embeddings", None) or 4096
    for key in ("rope_scaling", "rope_parameters"):
        rope = dict(found.get(key) or {})
        kind = rope.get("rope_type", rope.pop("type", "default"))
        if kind in ("su", "yarn", "longrope"):
            found[key] = {"original_max_position_embeddings": original} | rope | {"rope_type": "longrope"}
    return found


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a Phi-3, and the Hugging Face tensor it comes from."""
    every = tuple(range(spec.num_hidden_layers))
    q = spec.num_attention_heads * spec.head_dim
    k = q + spec.num_key_value_heads * spec.head_dim
    qkv, gate_up, width = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight", spec.intermediate_size
    return (
        *decoder.frame_rules(spec),
        *decoder.per_layer(qkv, "attention.q.weight", every, Part(stop=q)),
        *decoder.per_layer(qkv, "attention.k.weight", every, Part(start=q, stop=k)),
        *decoder.per_layer(qkv, "attention.v.weight", every, Part(start=k)),
        *decoder.per_layer("self_attn.o_proj.weight", "attention.o.weight", every),
        *decoder.per_layer(gate_up, "mlp.gate.weight", every, Part(stop=width)),
        *decoder.per_layer(gate_up, "mlp.up.weight", every, Part(start=width)),
        *decoder.per_layer("mlp.down_proj.weight", "mlp.down.weight", every),
    )
