"""Gemma2ForCausalLM, Gemma3ForCausalLM and the text part of Gemma3ForConditionalGeneration.

Llama's decoder with norms on both sides of attention and MLP that multiply by 1 + weight, embeddings times the root
of D, a scale of queries that is not the head dim's, GELU, and layers with a sliding window between those with full
attention. Gemma 2 caps the logits of attention and of tokens. Gemma 3 has norms on the heads of q and k instead, and
rotates windowed layers at frequencies of their own, which no scaling of the context touches.
Source: Gemma Team 2024 (Gemma 2), 2025 (Gemma 3); keys and defaults as in Hugging Face's configs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import ConfigReader, cache_groups, mapping, rope_from, stored_dtype
from ferrum_jax.spec import ModelSpec, RopeSpec

# Keys of these families that no released model's result depends on: `hidden_activation` is what is read, and the other
# two repeat `sliding_window` and the pattern behind `layer_types`.
_UNREAD = ("hidden_act", "sliding_window_size", "_sliding_window_pattern")
# Keys of Gemma3ForConditionalGeneration that concern images alone.
_OF_IMAGES = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
_TEXT_PART = "language_model."


def gemma2_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Gemma 2 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    max_positions = reader.get("max_position_embeddings", 8192)
    return _spec(
        reader,
        architecture="Gemma2ForCausalLM",
        vocab_size=reader.get("vocab_size", 256000),
        max_position_embeddings=max_positions,
        attn_logit_softcapping=reader.nullable("attn_logit_softcapping", 50.0),
        final_logit_softcapping=reader.nullable("final_logit_softcapping", 30.0),
        rope=rope_from(reader, max_positions),
        full_every=2,
    )


def gemma3_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Gemma 3 text config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    max_positions = reader.get("max_position_embeddings", 131072)
    if reader.get("attn_logit_softcapping", None) is not None:
        raise ValueError("attn_logit_softcapping is not null; Gemma 3 does not cap the logits of attention")
    rope, local_rope = _ropes(reader, max_positions)
    return _spec(
        reader,
        architecture="Gemma3ForCausalLM",
        vocab_size=reader.get("vocab_size", 262208),
        max_position_embeddings=max_positions,
        final_logit_softcapping=reader.nullable("final_logit_softcapping", None),
        rope=rope,
        local_rope=local_rope,
        qk_norm=True,
        full_every=reader.get("sliding_window_pattern", 6),
    )


def gemma3_text_part_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of the text part of a Gemma 3 that sees images; it is served as a text model.

    Raises ValueError naming what is missing or not understood.
    """
    reader = ConfigReader(config)
    for key in _OF_IMAGES:
        reader.get(key, None)
    inherited = {key: reader.get(key, None) for key in ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")}
    text = {key: value for key, value in inherited.items() if value is not None} | reader.require(
        "text_config", like={}
    )
    reader.finish()
    if inherited["eos_token_id"] is not None:  # that of the part names no end of turn
        text["eos_token_id"] = inherited["eos_token_id"]
    return dataclasses.replace(gemma3_spec_from_config(text), architecture="Gemma3ForConditionalGeneration")


def text_part_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of the text part, and the Hugging Face tensor it comes from."""
    rules = decoder.weight_rules(spec)
    return tuple(dataclasses.replace(rule, source=_TEXT_PART + rule.source) for rule in rules)


def text_part_harmless(spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of tensors that the text part does not need: those of images, and what a Decoder may leave over."""
    images = ("vision_tower.*", "multi_modal_projector.*")
    return (*images, *(_TEXT_PART + pattern for pattern in decoder.harmless_tensors(spec)))


def _spec(reader: ConfigReader, *, full_every: int, **family: Any) -> ModelSpec:
    """What the families read alike. full_every: where layer_types is absent, every so many layers attend to all."""
    for key in _UNREAD:
        reader.get(key, None)
    if reader.get("use_bidirectional_attention", False):
        raise ValueError("use_bidirectional_attention is true; a decoder here attends to the past alone")
    num_layers, hidden_size = reader.require("num_hidden_layers"), reader.require("hidden_size")
    pattern = ["sliding_attention" if (layer + 1) % full_every else "full_attention" for layer in range(num_layers)]
    kinds: Sequence[str] = reader.get("layer_types", pattern)
    bias = bool(reader.get("attention_bias", False))
    spec = ModelSpec(
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=reader.get("num_attention_heads", 8),
        num_key_value_heads=reader.get("num_key_value_heads", 4),
        head_dim=reader.get("head_dim", 256),
        intermediate_size=reader.require("intermediate_size"),
        hidden_act=reader.get("hidden_activation", "gelu_pytorch_tanh"),
        rms_norm_eps=reader.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", True)),
        attention_bias=bias,
        attention_output_bias=bias,
        zero_centred_norms=True,
        sandwich_norms=True,
        embedding_scale=hidden_size**0.5,
        query_pre_attn_scalar=reader.get("query_pre_attn_scalar", 256.0),
        # also where the window is as long as any context: layers with one may have a rope of their own
        cache_groups=cache_groups(kinds, num_layers, reader.nullable("sliding_window", 4096)),
        dtype=stored_dtype(reader),
        eos_token_ids=reader.token_ids("eos_token_id"),
        **family,
    )
    reader.finish()
    return spec


def _ropes(reader: ConfigReader, max_positions: int) -> tuple[RopeSpec, RopeSpec]:
    """Of layers with full attention and of windowed ones: `rope_parameters` by kind, or keys of the older spelling."""
    by_kind = mapping(reader, "rope_parameters")
    unknown = sorted(set(by_kind) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"rope_parameters has {unknown}; known are 'full_attention' and 'sliding_attention'")
    full = {"rope_theta": reader.get("rope_theta", 1e6), **mapping(reader, "rope_scaling")}
    full |= by_kind.get("full_attention") or {}
    local = {"rope_theta": reader.get("rope_local_base_freq", 1e4), **(by_kind.get("sliding_attention") or {})}
    ropes = [rope_from(ConfigReader({"rope_parameters": values}), max_positions) for values in (full, local)]
    return ropes[0], ropes[1]
