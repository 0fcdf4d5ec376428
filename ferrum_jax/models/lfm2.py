"""Lfm2ForCausalLM: a decoder of short convolutions between gates, with attention in some layers.

Source: the model card of LFM2 (Liquid AI, 2025); keys as in Hugging Face's Lfm2Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models import decoder
from ferrum_jax.models.bounds import shown
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.plain import attention_from, layers_where, spec_from
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import CacheGroup, MlpSpec, ModelSpec, NormSpec, QkNorm, ShortConvSpec

_MAX_POSITIONS = 128_000
_KINDS = ("full_attention", "conv")
# What training began with, and sizes that are said a second time.
_OF_TRAINING = (
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
    *("block_norm_eps", "num_heads", "theta"),
)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of an LFM2 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    size = reader.require("hidden_size")
    reader.only(
        conv_bias=False, block_use_swiglu=True, use_pos_enc=True, conv_dim=size, conv_dim_out=size, block_dim=size
    )
    for key in _OF_TRAINING:
        reader.get(key, None)
    rope = rope_from(reader, reader.get("max_position_embeddings", _MAX_POSITIONS), default_theta=1000000.0)
    return spec_from(
        reader,
        "Lfm2ForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=attention_from(reader, max_positions=_MAX_POSITIONS, qk_norm=QkNorm(), rope=rope),
        mlp=MlpSpec(intermediate_size=_width(reader)),
        norm=NormSpec(eps=reader.get("norm_eps", 1e-5)),
        recurrence=ShortConvSpec(conv_channels=size, conv_kernel_dim=reader.get("conv_L_cache", 3)),
        cache_groups=_cache_groups(reader),
        tie_word_embeddings=bool(reader.get("tie_embedding", reader.get("tie_word_embeddings", True))),
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
    if len(kinds) != len(layers) or any(kind not in _KINDS for kind in kinds):
        raise ValueError(
            f"layer_types is {shown(kinds)}; it must name one of {_KINDS} for each of {len(layers)} layers"
        )
    groups = zip(("full", "state"), _KINDS, strict=True)
    found = (CacheGroup(kind=ours, layers=layers_where(kind == theirs for kind in kinds)) for ours, theirs in groups)
    return tuple(group for group in found if group.layers)


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of an LFM2, and the Hugging Face tensor it comes from."""
    size, every = spec.hidden_size, tuple(range(spec.num_hidden_layers))
    renamed = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.embedding_norm.weight"}
    norms = {"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"}
    frame = decoder.frame_rules(spec, norms)
    mlp = {"w1": "gate", "w3": "up", "w2": "down"}.items()
    parts = {
        f"{part}_heads.weight": TensorSlice(start=i * size, stop=(i + 1) * size)
        for i, part in enumerate(("b", "c", "v"))
    }
    conv = spec.state_layers
    return (
        *(Rule(source=renamed[rule.target], target=rule.target) if rule.target in renamed else rule for rule in frame),
        *decoder.attention_rules(spec, "q_layernorm", "k_layernorm", output="out_proj"),
        *(
            rule
            for theirs, ours in mlp
            for rule in decoder.linear(f"feed_forward.{theirs}", f"mlp.{ours}", every, False)
        ),
        *decoder.per_layer("conv.conv.weight", "attention.conv_heads", conv),
        *decoder.per_layer("conv.out_proj.weight", "attention.o.weight", conv),
        *(
            rule
            for name, part in parts.items()
            for rule in decoder.per_layer("conv.in_proj.weight", f"attention.{name}", conv, part)
        ),
    )
