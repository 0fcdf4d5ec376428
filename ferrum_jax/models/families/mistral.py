"""MistralForCausalLM and MixtralForCausalLM: Llama with a sliding window in all layers, or in none; and with experts.

Mistral 0.2, 0.3, Nemo and later have no window. Mixtral has eight experts in every layer, two of them for each token.
Source: Jiang et al. 2023, 2024 (Mixtral of Experts); keys as in Hugging Face's MistralConfig and MixtralConfig.
"""

import functools

from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader, window_within
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import all_windowed, experts_from, spec_from
from ferrum_jax.models.spec import ModelSpec


def _mixtral(reader: ConfigReader) -> ModelSpec:
    num_experts = reader.get("num_local_experts", reader.get("num_experts", 8))
    experts = experts_from(reader, num_experts, norm_topk_prob=True)
    return spec_from(reader, experts=experts, cache_groups=all_windowed(reader, window_within(reader)))


FAMILIES = {
    "MistralForCausalLM": Family(
        read=lambda reader: spec_from(reader, cache_groups=all_windowed(reader, window_within(reader))),
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        models="Mistral 7B, Nemo, Small, Large",
        notes="sliding window where the config has one",
    ),
    "MixtralForCausalLM": Family(
        read=_mixtral,
        defaults={"max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        weight_rules=functools.partial(tensors.weight_rules, experts=tensors.MIXTRALS_EXPERTS),
        models="Mixtral 8x7B, 8x22B",
        notes="also with sliding windows",
    ),
}
