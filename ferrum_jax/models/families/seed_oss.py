"""SeedOssForCausalLM: Llama's decoder with biases on q, k and v.

Source: ByteDance Seed Team 2025 (Seed-OSS); keys as in Hugging Face's SeedOssConfig.
"""

from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import attention_from, mlp_from, spec_from
from ferrum_jax.models.spec import ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.leave("residual_dropout")  # of training
    attention = attention_from(
        reader, bias=reader.flag("attention_bias"), output_bias=reader.flag("attention_out_bias")
    )
    return spec_from(reader, attention=attention, mlp=mlp_from(reader, biases="mlp_bias"))


FAMILIES = {
    "SeedOssForCausalLM": Family(
        read=_spec,
        defaults={"max_position_embeddings": 524288, "head_dim": 128, "attention_bias": True},
        models="Seed-OSS",
    )
}
