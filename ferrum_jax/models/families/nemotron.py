"""NemotronForCausalLM: Nemotron-4 and Minitron. LayerNorms of 1 + weight, squared ReLU without a gate, partial rope.

Source: Parmar et al. 2024 (Nemotron-4 15B); keys as in Hugging Face's NemotronConfig.
"""

from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import attention_from, mlp_from, norm_from, spec_from
from ferrum_jax.models.spec import ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    return spec_from(
        reader,
        attention=attention_from(reader, biases="attention_bias"),
        mlp=mlp_from(reader, biases="mlp_bias", gated=False),
        norm=norm_from(reader, key="norm_eps", kind="layer", bias=True, zero_centred=True),
    )


def _with_one_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `partial_rotary_factor` for what older ones call `rotary_percent` or `rope_percent`."""
    found = dict(config)
    for key in ("rotary_percent", "rope_percent"):
        if found.get(key) is not None:
            found.setdefault("partial_rotary_factor", found.pop(key))
    return found


FAMILIES = {
    "NemotronForCausalLM": Family(
        read=_spec,
        defaults={
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
            "hidden_act": "relu2",
            "norm_eps": 1e-5,
        },
        respell=_with_one_spelling,
        models="Nemotron-4, Minitron",
    )
}
