"""Gemma2ForCausalLM, Gemma3ForCausalLM and Gemma3ForConditionalGeneration.

Llama's decoder with norms on both sides of attention and MLP that multiply by 1 + weight, embeddings times the root
of D, a scale of queries that is not the head dim's, GELU, and layers with a sliding window between those with full
attention. Gemma 2 caps the logits of attention and of tokens. Gemma 3 has norms on the heads of q and k instead, and
rotates windowed layers at frequencies of their own, which no scaling of the context touches. Where it sees images, a
SigLIP tower gives an image's tokens their embeddings, and these tokens attend to all of their image.
Source: Gemma Team 2024 (Gemma 2), 2025 (Gemma 3); keys and defaults as in Hugging Face's configs.
"""

import dataclasses
from typing import Any

from ferrum_jax.models.families import siglip
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import attention_from, every_nth_full, mlp_from, norm_from, spec_from, windows_of
from ferrum_jax.models.families.rope_reader import ropes_by_kind
from ferrum_jax.models.families.text_part import IMAGES, in_language_model, text_part_from, with_towers
from ferrum_jax.models.spec import AttentionSpec, ModelSpec, QkNorm, RopeSpec

# Keys of these families that no released model's result depends on: `hidden_activation` is what is read, and the other
# two repeat `sliding_window` and the pattern behind `layer_types`.
_UNREAD = ("hidden_act", "sliding_window_size", "_sliding_window_pattern")
# Keys of Gemma3ForConditionalGeneration that concern images alone.
_OF_IMAGES = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")


def _gemma2(reader: ConfigReader) -> ModelSpec:
    cap = reader.nullable("attn_logit_softcapping", 50.0)
    return _spec(
        reader,
        attention=_attention(reader, attn_logit_softcapping=cap),
        final_logit_softcapping=reader.nullable("final_logit_softcapping", 30.0),
        full_every=2,
    )


def _gemma3(reader: ConfigReader) -> ModelSpec:
    if reader.get("attn_logit_softcapping", None) is not None:
        raise ValueError("attn_logit_softcapping is not null; Gemma 3 does not cap the logits of attention")
    rope, local_rope = ropes_by_kind(reader, local_theta=1e4)
    return _spec(
        reader,
        attention=_attention(reader, qk_norm=QkNorm(), rope=rope),
        local_rope=local_rope,
        final_logit_softcapping=reader.nullable("final_logit_softcapping", None),
        full_every=reader.get("sliding_window_pattern", 6),
    )


def _spec(
    reader: ConfigReader,
    *,
    full_every: int,
    attention: AttentionSpec,
    local_rope: RopeSpec | None = None,
    **family: Any,
) -> ModelSpec:
    """The spec with the keys that all Gemma families share.

    full_every: where layer_types is absent, one layer in this many attends to all. local_rope: of layers with a window.
    """
    reader.leave(*_UNREAD)
    if reader.get("use_bidirectional_attention", False):
        raise ValueError("use_bidirectional_attention is true; a decoder here attends to the past alone")
    # also where the window is as long as any context: layers with one may have a rope of their own
    groups = windows_of(reader, every_nth_full(reader, full_every), reader.nullable("sliding_window", 4096))
    local = dataclasses.replace(attention, rope=local_rope or attention.rope)
    return spec_from(
        reader,
        mlp=mlp_from(reader, hidden_act=reader.get("hidden_activation", "gelu_pytorch_tanh")),
        norm=norm_from(reader, zero_centred=True, after=True),
        embedding_scale=reader.require("hidden_size") ** 0.5,
        cache_groups=groups,
        attention=attention,
        other_attention=tuple((group.layers, local) for group in groups if group.window) if local_rope else (),
        **family,
    )


def _attention(reader: ConfigReader, **family: Any) -> AttentionSpec:
    scale = reader.get("query_pre_attn_scalar", 256.0)
    return attention_from(reader, biases="attention_bias", query_pre_attn_scalar=scale, **family)


def _whole(reader: ConfigReader) -> ModelSpec:
    """A Gemma 3 that sees images; without a `vision_config` its text part alone."""
    spec, config = text_part_from(reader, _OF_IMAGES, GEMMA3), reader.config
    if not config.get("vision_config"):
        return spec
    tokens = reader.get("mm_tokens_per_image", 256)
    return dataclasses.replace(spec, vision=siglip.vision_spec_from(config["vision_config"], spec.hidden_size, tokens))


_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
GEMMA3 = Family(
    read=_gemma3,
    defaults=_DEFAULTS | {"max_position_embeddings": 131072, "vocab_size": 262208, "rope_theta": 1e6},
    models="Gemma 3, text",
)
FAMILIES = {
    "Gemma2ForCausalLM": Family(
        read=_gemma2,
        defaults=_DEFAULTS | {"max_position_embeddings": 8192, "vocab_size": 256000},
        models="Gemma 2",
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": with_towers(
        GEMMA3,
        _whole,
        siglip.tower_rules,
        of_tower=IMAGES,
        beside_tower=siglip.HARMLESS,
        rename=in_language_model,
        models="Gemma 3 from 4B on",
        notes="[with images](../guides/images.md)",
    ),
}
