"""Gemma2ForCausalLM, Gemma3ForCausalLM and Gemma3ForConditionalGeneration.

Llama's decoder with norms on both sides of attention and MLP that multiply by 1 + weight, embeddings times the root
of D, a scale of queries that is not the head dim's, GELU, and layers with a sliding window between those with full
attention. Gemma 2 caps the logits of attention and of tokens. Gemma 3 has norms on the heads of q and k instead, and
rotates windowed layers at frequencies of their own, which no scaling of the context touches. Where it sees images, a
SigLIP tower gives an image's tokens their embeddings, and these tokens attend to all of their image.
Source: Gemma Team 2024 (Gemma 2), 2025 (Gemma 3); keys and defaults as in Hugging Face's configs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models import siglip, text_part
from ferrum_jax.models.config_reader import ConfigReader, cache_groups, stored_dtype
from ferrum_jax.models.rope_reader import rope_from, ropes_by_kind
from ferrum_jax.models.text_part import text_part_from
from ferrum_jax.spec import AttentionSpec, MlpSpec, ModelSpec, NormSpec, QkNorm, RopeSpec

# Keys of these families that no released model's result depends on: `hidden_activation` is what is read, and the other
# two repeat `sliding_window` and the pattern behind `layer_types`.
_UNREAD = ("hidden_act", "sliding_window_size", "_sliding_window_pattern")
# Keys of Gemma3ForConditionalGeneration that concern images alone.
_OF_IMAGES = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")


def gemma2_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Gemma 2 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    max_positions = reader.get("max_position_embeddings", 8192)
    return _spec(
        reader,
        architecture="Gemma2ForCausalLM",
        vocab_size=reader.get("vocab_size", 256000),
        max_position_embeddings=max_positions,
        attention=_attention(
            reader,
            attn_logit_softcapping=reader.nullable("attn_logit_softcapping", 50.0),
            rope=rope_from(reader, max_positions),
        ),
        final_logit_softcapping=reader.nullable("final_logit_softcapping", 30.0),
        full_every=2,
    )


def gemma3_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Gemma 3 text config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    max_positions = reader.get("max_position_embeddings", 131072)
    if reader.get("attn_logit_softcapping", None) is not None:
        raise ValueError("attn_logit_softcapping is not null; Gemma 3 does not cap the logits of attention")
    rope, local_rope = ropes_by_kind(reader, max_positions, default_theta=1e6, local_theta=1e4)
    return _spec(
        reader,
        architecture="Gemma3ForCausalLM",
        vocab_size=reader.get("vocab_size", 262208),
        max_position_embeddings=max_positions,
        attention=_attention(reader, qk_norm=QkNorm(), rope=rope),
        local_rope=local_rope,
        final_logit_softcapping=reader.nullable("final_logit_softcapping", None),
        full_every=reader.get("sliding_window_pattern", 6),
    )


def gemma3_whole_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Gemma 3 that sees images; without a `vision_config` of its text part alone.

    Raises ValueError naming what is missing or not understood.
    """
    spec = text_part_from(config, _OF_IMAGES, gemma3_spec_from_config)
    if not config.get("vision_config"):
        return spec
    tokens = ConfigReader(config).get("mm_tokens_per_image", 256)
    return dataclasses.replace(spec, vision=siglip.vision_spec_from(config["vision_config"], spec.hidden_size, tokens))


def gemma3_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of the text model and of the tower, and the Hugging Face tensor it comes from."""
    return (*text_part.weight_rules(spec), *(() if spec.vision is None else siglip.tower_rules(spec.vision)))


def gemma3_harmless(spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of tensors that the model does not need: of a model that is served for text alone, the tower's."""
    found = text_part.harmless_tensors(spec)
    return (
        found if spec.vision is None else (*siglip.HARMLESS, *(name for name in found if name not in text_part.IMAGES))
    )


def _spec(
    reader: ConfigReader,
    *,
    full_every: int,
    attention: AttentionSpec,
    local_rope: RopeSpec | None = None,
    **family: Any,
) -> ModelSpec:
    """What the families read alike.

    full_every: where layer_types is absent, one layer in this many attends to all. local_rope: of layers with a window.
    """
    for key in _UNREAD:
        reader.get(key, None)
    if reader.get("use_bidirectional_attention", False):
        raise ValueError("use_bidirectional_attention is true; a decoder here attends to the past alone")
    num_layers, hidden_size = reader.require("num_hidden_layers"), reader.require("hidden_size")
    pattern = ["sliding_attention" if (layer + 1) % full_every else "full_attention" for layer in range(num_layers)]
    kinds: Sequence[str] = reader.get("layer_types", pattern)
    # also where the window is as long as any context: layers with one may have a rope of their own
    groups = cache_groups(kinds, num_layers, reader.nullable("sliding_window", 4096))
    local = dataclasses.replace(attention, rope=local_rope or attention.rope)
    spec = ModelSpec(
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        mlp=MlpSpec(
            intermediate_size=reader.require("intermediate_size"),
            hidden_act=reader.get("hidden_activation", "gelu_pytorch_tanh"),
        ),
        norm=NormSpec(eps=reader.get("rms_norm_eps", 1e-6), zero_centred=True, after=True),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", True)),
        embedding_scale=hidden_size**0.5,
        cache_groups=groups,
        attention=attention,
        other_attention=tuple((group.layers, local) for group in groups if group.window) if local_rope else (),
        dtype=stored_dtype(reader),
        eos_token_ids=reader.token_ids("eos_token_id"),
        **family,
    )
    reader.finish()
    return spec


def _attention(reader: ConfigReader, **family: Any) -> AttentionSpec:
    """What the families read alike of their attention."""
    bias = bool(reader.get("attention_bias", False))
    return AttentionSpec(
        num_attention_heads=reader.get("num_attention_heads", 8),
        num_key_value_heads=reader.get("num_key_value_heads", 4),
        head_dim=reader.get("head_dim", 256),
        bias=bias,
        output_bias=bias,
        query_pre_attn_scalar=reader.get("query_pre_attn_scalar", 256.0),
        **family,
    )
