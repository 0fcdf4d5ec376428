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

from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import ConfigReader, cache_groups, stored_dtype, window_within
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import AttentionSpec, MlpSpec, ModelSpec, NormSpec

# Keys for which the reference implementation knows one value.
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
        max_position_embeddings=max_positions,
        attention=AttentionSpec(
            num_attention_heads=num_heads,
            num_key_value_heads=reader.get("num_key_value_heads", num_heads),
            head_dim=reader.get("head_dim", hidden_size // num_heads),
            rope=rope_from(reader, max_positions, default_partial=1.0),
        ),
        mlp=MlpSpec(intermediate_size=reader.require("intermediate_size"), hidden_act=reader.get("hidden_act", "silu")),
        norm=NormSpec(eps=reader.get("rms_norm_eps", 1e-5)),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", False)),
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
        if not isinstance(found.get(key), Mapping):
            continue
        rope = dict(found[key])
        kind = rope.get("rope_type", rope.pop("type", "default"))
        if kind in ("su", "yarn", "longrope"):
            found[key] = {"original_max_position_embeddings": original} | rope | {"rope_type": "longrope"}
    return found


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a Phi-3, and the Hugging Face tensor it comes from."""
    every = tuple(range(spec.num_hidden_layers))
    own = spec.attention
    q = own.num_attention_heads * own.head_dim
    k = q + own.num_key_value_heads * own.head_dim
    qkv = "self_attn.qkv_proj.weight"
    return (
        *decoder.frame_rules(spec),
        *decoder.per_layer(qkv, "attention.q.weight", every, TensorSlice(stop=q)),
        *decoder.per_layer(qkv, "attention.k.weight", every, TensorSlice(start=q, stop=k)),
        *decoder.per_layer(qkv, "attention.v.weight", every, TensorSlice(start=k)),
        *decoder.per_layer("self_attn.o_proj.weight", "attention.o.weight", every),
        *decoder.fused_mlp_rules(spec),
    )
