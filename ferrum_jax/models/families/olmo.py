"""Olmo2ForCausalLM, Olmo3ForCausalLM, OlmoeForCausalLM: Llama's decoder with norms over all heads of q and of k.

OLMo 2 and 3 norm what attention and MLP give, not what they are given. OLMo 3 has a window in three layers of four,
whose rope no scaling touches. OLMoE has experts in every layer and norms before.
Source: OLMo Team 2024 (OLMo 2), 2025 (OLMo 3); Muennighoff et al. 2024 (OLMoE); keys as in Hugging Face's configs.
"""

import dataclasses
from typing import Any

from ferrum_jax.models.families import plain
from ferrum_jax.models.families.config_reader import ConfigReader, window_within
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.rope_reader import ropes_by_kind
from ferrum_jax.models.spec import AttentionSpec, ModelSpec, QkNorm


def _attention(reader: ConfigReader, **family: Any) -> AttentionSpec:
    return plain.attention_from(reader, biases="attention_bias", qk_norm=QkNorm(over_all_heads=True), **family)


def _olmo2(reader: ConfigReader) -> ModelSpec:
    return plain.spec_from(reader, attention=_attention(reader), norm=plain.norm_from(reader, before=False, after=True))


def _olmo3(reader: ConfigReader) -> ModelSpec:
    full, near = ropes_by_kind(reader)
    attention, kinds = _attention(reader, rope=full), plain.every_nth_full(reader, 4)
    windowed = plain.layers_where(kind == "sliding_attention" for kind in kinds)
    return plain.spec_from(
        reader,
        attention=attention,
        other_attention=((windowed, dataclasses.replace(attention, rope=near)),),
        norm=plain.norm_from(reader, before=False, after=True),
        cache_groups=plain.windows_of(reader, kinds, window_within(reader)),
    )


def _olmoe(reader: ConfigReader) -> ModelSpec:
    if reader.get("clip_qkv", None) is not None:
        raise ValueError("clip_qkv is not null; q, k and v are not clipped here, and no released OLMoE clips them")
    experts = plain.experts_from(reader, reader.get("num_experts", 64), norm_topk_prob=reader.flag("norm_topk_prob"))
    return plain.spec_from(reader, attention=_attention(reader), experts=experts)


_OLMO2 = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
FAMILIES = {
    "Olmo2ForCausalLM": Family(read=_olmo2, defaults=_OLMO2, models="OLMo 2"),
    "Olmo3ForCausalLM": Family(
        read=_olmo3, defaults=_OLMO2 | {"rope_theta": 500000.0, "sliding_window": 4096}, models="OLMo 3"
    ),
    "OlmoeForCausalLM": Family(
        read=_olmoe,
        defaults=_OLMO2 | {"max_position_embeddings": 4096, "num_experts_per_tok": 8},
        models="OLMoE",
        notes="clip_qkv is refused",
    ),
}
