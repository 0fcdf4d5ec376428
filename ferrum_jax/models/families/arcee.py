"""ArceeForCausalLM: Llama's decoder whose MLPs have no gate and square what ReLU leaves.

Source: Arcee AI 2025 (AFM-4.5B); So et al. 2021 (Primer: squared ReLU); keys as in Hugging Face's ArceeConfig.
"""

from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import attention_from, mlp_from, spec_from
from ferrum_jax.models.spec import ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    attention = attention_from(reader, biases="attention_bias")
    return spec_from(reader, attention=attention, mlp=mlp_from(reader, biases="mlp_bias", gated=False))


FAMILIES = {
    "ArceeForCausalLM": Family(
        read=_spec,
        defaults={"max_position_embeddings": 4096, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
        models="AFM-4.5B",
    )
}
