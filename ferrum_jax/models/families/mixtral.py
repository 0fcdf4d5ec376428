"""MixtralForCausalLM: Mistral's decoder with eight experts in every layer, two of them for each token.

Source: Jiang et al. 2024 (Mixtral of Experts); keys as in Hugging Face's MixtralConfig.
"""

from __future__ import annotations

import functools

from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader, window_within
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import all_windowed, experts_from, spec_from
from ferrum_jax.models.spec import ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    num_experts = reader.get("num_local_experts", reader.get("num_experts", 8))
    experts = experts_from(reader, num_experts, norm_topk_prob=True)
    return spec_from(reader, experts=experts, cache_groups=all_windowed(reader, window_within(reader)))


FAMILIES = {
    "MixtralForCausalLM": Family(
        read=_spec,
        defaults={"max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        weight_rules=functools.partial(tensors.weight_rules, experts=tensors.MIXTRALS_EXPERTS),
        models="Mixtral 8x7B, 8x22B",
        notes="also with sliding windows",
    )
}
