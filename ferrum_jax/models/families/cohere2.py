"""Cohere2ForCausalLM: Command R7B and Command A. Attention and MLP side by side behind one LayerNorm without a bias.

Layers with a window turn neighbours together; those between them attend to all and know no positions.
Source: Cohere 2024, 2025 (Command R7B, Command A); keys as in Hugging Face's Cohere2Config.
"""

import functools

from ferrum_jax.models.families import plain, tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.rope_reader import rope_from
from ferrum_jax.models.spec import ModelSpec

# Keys of published configs that the reference does not read: of one value, and repeated by others.
_ONLY = {"use_parallel_block": True, "use_gated_activation": True, "rotary_pct": 1.0}
_ONLY |= {"position_embedding_type": "rope_gptj", "order_of_interleaved_layers": "local_attn_first"}


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(**_ONLY)
    reader.leave("layer_switch", "use_embedding_sharing", "use_parallel_embedding")
    attention = plain.attention_from(reader, biases="attention_bias", rope=rope_from(reader, interleaved=True))
    kinds = plain.every_nth_full(reader, reader.get("sliding_window_pattern", 4))
    return plain.spec_from(
        reader,
        attention=attention,
        other_attention=plain.still_where((kind == "full_attention" for kind in kinds), attention),
        norm=plain.norm_from(reader, key="layer_norm_eps", kind="layer"),
        parallel=True,
        logit_scale=float(reader.get("logit_scale", 0.0625)),
        cache_groups=plain.windows_of(reader, kinds, reader.nullable("sliding_window", 4096)),
    )


FAMILIES = {
    "Cohere2ForCausalLM": Family(
        read=_spec,
        defaults={"max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True},
        weight_rules=functools.partial(tensors.weight_rules, norms={"attention_norm": "input_layernorm"}),
        models="Command R7B, Command A",
        notes="attention beside the MLP; layers without rope",
    )
}
