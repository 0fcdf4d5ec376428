"""MistralForCausalLM: Llama with a sliding window in all layers, or in none (0.2, 0.3, Nemo and later).

Source: Jiang et al. 2023; keys as in Hugging Face's MistralConfig.
"""

from __future__ import annotations

from ferrum_jax.models.families.config_reader import ConfigReader, window_within
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import all_windowed, spec_from
from ferrum_jax.models.spec import ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    return spec_from(reader, cache_groups=all_windowed(reader, window_within(reader)))


FAMILIES = {
    "MistralForCausalLM": Family(
        read=_spec,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        models="Mistral 7B, Nemo, Small, Large",
        notes="sliding window where the config has one",
    )
}
