"""SmolLM3ForCausalLM: Llama's decoder in which every fourth layer knows no positions.

Source: Bakouch et al. 2025 (SmolLM3); Yang et al. 2025 (layers without rope); keys as in Hugging Face's SmolLM3Config.
"""

from ferrum_jax.models.families import plain
from ferrum_jax.models.families.config_reader import ConfigReader, window_within
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.spec import ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.leave("max_window_layers")  # which the reference does not read
    turns, window = plain.layers_that_turn(reader), window_within(reader)
    kinds = reader.get("layer_types", ["full_attention" if turn else "sliding_attention" for turn in turns])
    attention = plain.attention_from(reader, biases="attention_bias")
    return plain.spec_from(
        reader,
        attention=attention,
        other_attention=plain.still_where((not turn for turn in turns), attention),
        mlp=plain.mlp_from(reader, biases="mlp_bias"),
        cache_groups=plain.windows_of(reader, kinds, window if reader.flag("use_sliding_window") else None),
    )


FAMILIES = {
    "SmolLM3ForCausalLM": Family(
        read=_spec,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True},
        models="SmolLM3",
        notes="every fourth layer without rope",
    )
}
