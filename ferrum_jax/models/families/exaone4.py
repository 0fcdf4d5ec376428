"""Exaone4ForCausalLM: Llama's decoder with norms after each half and on the heads of q and k.

Layers with a window have rope; those between them attend to all and know no positions.
Source: LG AI Research 2025 (EXAONE 4.0); keys as in Hugging Face's Exaone4Config.
"""

from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.families import plain
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.spec import ModelSpec, QkNorm


def _spec(reader: ConfigReader) -> ModelSpec:
    window = reader.nullable("sliding_window", 4096)
    pattern = reader.get("sliding_window_pattern", 4)
    kinds = plain.every_nth_full(reader, pattern if window is not None else 1)
    attention = plain.attention_from(reader, qk_norm=QkNorm())
    still = (window is not None and kind == "full_attention" for kind in kinds)
    return plain.spec_from(
        reader,
        attention=attention,
        other_attention=plain.still_where(still, attention),
        norm=plain.norm_from(reader, before=False, after=True),
        cache_groups=plain.windows_of(reader, kinds, window),
    )


def _with_a_number(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the length of a pattern that is spelled "LLLG", local layers and then a global one."""
    pattern = config.get("sliding_window_pattern")
    spelled = isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G"
    return dict(config) | ({"sliding_window_pattern": len(pattern)} if spelled and pattern else {})


FAMILIES = {
    "Exaone4ForCausalLM": Family(
        read=_spec,
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
        respell=_with_a_number,
        models="EXAONE 4.0",
        notes="layers without rope between those with a window",
    )
}
