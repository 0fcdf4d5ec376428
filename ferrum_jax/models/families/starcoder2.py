"""Starcoder2ForCausalLM: LayerNorms, MLPs without a gate, and biases everywhere.

Source: Lozhkov et al. 2024 (StarCoder 2); keys as in Hugging Face's Starcoder2Config.
"""

import functools

from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader, window_within
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import all_windowed, attention_from, mlp_from, norm_from, spec_from
from ferrum_jax.models.spec import ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(mlp_type="default", norm_type="layer_norm")
    reader.leave("residual_dropout", "embedding_dropout", "max_length")  # of training
    return spec_from(
        reader,
        attention=attention_from(reader, biases="use_bias"),
        mlp=mlp_from(reader, biases="use_bias", gated=False),
        norm=norm_from(reader, key="norm_epsilon", kind="layer", bias=True),
        cache_groups=all_windowed(reader, window_within(reader)),
    )


FAMILIES = {
    "Starcoder2ForCausalLM": Family(
        read=_spec,
        defaults={
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        weight_rules=functools.partial(tensors.weight_rules, mlp={"up": "c_fc", "down": "c_proj"}),
        models="StarCoder 2",
    )
}
