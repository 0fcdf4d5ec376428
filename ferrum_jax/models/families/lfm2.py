"""Lfm2ForCausalLM: a decoder of short convolutions between gates, with attention in some layers.

Source: the model card of LFM2 (Liquid AI, 2025); keys as in Hugging Face's Lfm2Config.
"""

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import attention_from, hybrid_groups, norm_from, spec_from
from ferrum_jax.models.spec import CacheGroup, MlpSpec, ModelSpec, QkNorm, ShortConvSpec

# What training began with, and sizes that are said a second time.
_OF_TRAINING = (
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
    *("block_norm_eps", "num_heads", "theta"),
)


def _spec(reader: ConfigReader) -> ModelSpec:
    size = reader.require("hidden_size")
    reader.only(
        conv_bias=False, block_use_swiglu=True, use_pos_enc=True, conv_dim=size, conv_dim_out=size, block_dim=size
    )
    reader.leave(*_OF_TRAINING)
    return spec_from(
        reader,
        attention=attention_from(reader, qk_norm=QkNorm()),
        mlp=MlpSpec(intermediate_size=_width(reader)),
        norm=norm_from(reader, key="norm_eps"),
        recurrence=ShortConvSpec(conv_channels=size, conv_kernel_dim=reader.get("conv_L_cache", 3)),
        cache_groups=_cache_groups(reader),
        tie_word_embeddings=reader.flag("tie_embedding", reader.flag("tie_word_embeddings")),
    )


def _width(reader: ConfigReader) -> int:
    """The width of MLPs: two thirds of what the config says, rounded up, unless it says that it is the width itself."""
    width = reader.get("block_ff_dim", reader.get("intermediate_size", 12288))
    multiple, factor = reader.get("block_multiple_of", 256), reader.get("block_ffn_dim_multiplier", 1.0)
    if not reader.get("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _cache_groups(reader: ConfigReader) -> tuple[CacheGroup, ...]:
    """Attention where layer_types or full_attn_idxs say so, and a convolution elsewhere."""
    layers = range(reader.require("num_hidden_layers"))
    full = reader.get("full_attn_idxs", list(layers))
    kinds = reader.get("layer_types", ["full_attention" if layer in full else "conv" for layer in layers])
    return hybrid_groups(kinds, len(layers), recur=("conv",))


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    size, conv = spec.hidden_size, spec.state_layers
    renamed = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.embedding_norm.weight"}
    frame = tensors.frame_rules(spec, {"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"})
    mlp = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    parts = tensors.in_turn(dict.fromkeys("bcv", size))

    def of_mlp(name: str) -> str:
        for theirs, ours in mlp.items():
            name = name.replace(f".mlp.{theirs}.", f".feed_forward.{ours}.")
        return name

    return (
        *(rule.renamed(lambda name, rule=rule: renamed.get(rule.target, name)) for rule in frame),
        *tensors.attention_rules(spec, "q_layernorm", "k_layernorm", output="out_proj"),
        *(rule.renamed(of_mlp) for rule in tensors.mlp_rules(spec)),
        *tensors.per_layer("conv.conv.weight", "attention.conv_heads", conv),
        *tensors.per_layer("conv.out_proj.weight", "attention.o.weight", conv),
        *tensors.parts_per_layer("conv.in_proj.weight", "attention.{part}_heads.weight", conv, parts),
    )


FAMILIES = {
    "Lfm2ForCausalLM": Family(
        read=_spec,
        defaults={
            "max_position_embeddings": 128_000,
            "rope_theta": 1000000.0,
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        weight_rules=_rules,
        models="LFM2",
        notes="short convolutions",
    )
}
