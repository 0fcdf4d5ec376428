"""What the config.json of most decoders says alike, so that a family's file holds only what is its own.

A family calls `spec_from` with what differs: its keyword arguments take the place of what is read here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ferrum_jax.models.config_reader import ConfigReader, cache_groups, stored_dtype
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import AttentionSpec, CacheGroup, MlpSpec, ModelSpec, NormSpec


def spec_from(reader: ConfigReader, architecture: str, *, max_positions: int, **family: Any) -> ModelSpec:
    """ModelSpec of a config.json. Raises ValueError naming keys that are missing or not understood.

    max_positions: where the config is silent. Attention is the family's or `attention_from`, MLPs are gated, norms are
    RMSNorms before each half.
    """
    read: dict[str, Any] = {
        "vocab_size": reader.require("vocab_size"),
        "hidden_size": reader.require("hidden_size"),
        "num_hidden_layers": reader.require("num_hidden_layers"),
        "max_position_embeddings": reader.get("max_position_embeddings", max_positions),
        "tie_word_embeddings": bool(reader.get("tie_word_embeddings", False)),
        "dtype": stored_dtype(reader),
        "eos_token_ids": reader.token_ids("eos_token_id"),
    }
    if "attention" not in family:
        read["attention"] = attention_from(reader, max_positions=max_positions)
    if "mlp" not in family:
        read["mlp"] = mlp_from(reader)
    if "norm" not in family:
        read["norm"] = norm_from(reader)
    spec = ModelSpec(architecture=architecture, **read | family)
    reader.finish()
    return spec


def attention_from(reader: ConfigReader, *, max_positions: int, **family: Any) -> AttentionSpec:
    """The heads, as many of K and V as of q where the config is silent, and the rope, of whole heads."""
    num_heads = reader.require("num_attention_heads")
    read = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.get("num_key_value_heads", num_heads),
        "head_dim": reader.get("head_dim", reader.require("hidden_size") // num_heads),
    }
    if "rope" not in family:
        family["rope"] = rope_from(reader, reader.get("max_position_embeddings", max_positions))
    return AttentionSpec(**read | family)


def mlp_from(reader: ConfigReader, **family: Any) -> MlpSpec:
    """The width, and the activation, which is SiLU where the config is silent."""
    read = {"intermediate_size": reader.require("intermediate_size"), "hidden_act": reader.get("hidden_act", "silu")}
    return MlpSpec(**read | family)


def norm_from(reader: ConfigReader, default_eps: float = 1e-6, **family: Any) -> NormSpec:
    """RMSNorms with the eps of the config."""
    return NormSpec(eps=reader.get("rms_norm_eps", default_eps), **family)


def every_nth_full(reader: ConfigReader, period: int) -> list[str]:
    """layer_types; where the config is silent, one layer in this many attends to all, and the others to a window."""
    layers = range(reader.require("num_hidden_layers"))
    return reader.get(
        "layer_types", ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in layers]
    )


def all_windowed(reader: ConfigReader, window: int | None) -> tuple[CacheGroup, ...]:
    """All layers with this window, or without one."""
    num_layers = reader.require("num_hidden_layers")
    return cache_groups(["sliding_attention"] * num_layers, num_layers, window)


def layers_where(is_so: Iterable[Any]) -> tuple[int, ...]:
    """The layers for which it is so."""
    return tuple(layer for layer, is_it in enumerate(is_so) if is_it)
