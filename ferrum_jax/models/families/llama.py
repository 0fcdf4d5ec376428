"""LlamaForCausalLM: Llama 1 to 3.3, and the many models that share its architecture.

Source: Touvron et al. 2023; Dubey et al. 2024; keys as in Hugging Face's LlamaConfig.
"""

from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import attention_from, mlp_from, spec_from
from ferrum_jax.models.spec import ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(rope_interleaved=False)  # SmolLM2's say so
    attention = attention_from(reader, biases="attention_bias")
    return spec_from(reader, attention=attention, mlp=mlp_from(reader, biases="mlp_bias"))


FAMILIES = {
    "LlamaForCausalLM": Family(
        read=_spec, defaults={"max_position_embeddings": 2048}, models="Llama 1 to 3.3 and what shares its config"
    )
}
