"""HunYuanDenseV1ForCausalLM and HunYuanMoEV1ForCausalLM: Llama's decoder with norms on the heads of turned q and k.

Long contexts turn slower by one factor that does not depend on their length ("dynamic" with alpha).
Source: Tencent Hunyuan Team 2025 (Hunyuan-A13B); keys as in Hugging Face's configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models import decoder
from ferrum_jax.models.bounds import check_number, shown
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.plain import attention_from, norm_from, spec_from
from ferrum_jax.models.rope_reader import mapping, rope_from
from ferrum_jax.spec import ExpertsSpec, ModelSpec, QkNorm, RopeSpec

_MAX_POSITIONS = 2048
# Keys of published configs of which the reference implementation knows one value, or reads none.
_ONLY = {"use_qk_norm": True, "use_cla": False, "mlp_bias": False, "norm_type": "rms", "use_rotary_pos_emb": True}
_UNREAD = ("eod_token_id", "im_start_id", "im_end_id", "pad_id", "use_mixed_mlp_moe", "org_vocab_size")


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Hunyuan config.json. Raises ValueError naming what is missing or not understood."""
    return _spec(ConfigReader(config), "HunYuanDenseV1ForCausalLM")


def moe_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Hunyuan MoE config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    width = reader.require("intermediate_size")
    experts = ExpertsSpec(
        layers=tuple(range(reader.require("num_hidden_layers"))),
        num_experts=reader.alike("num_experts", 1),
        num_experts_per_tok=reader.alike("moe_topk", 1),
        intermediate_size=reader.alike("moe_intermediate_size", width),
        norm_topk_prob=True,
        shared_intermediate_size=width * reader.alike("num_shared_expert", 1),
        shared_gate=False,
    )
    reader.only(moe_layer_num_skipped=0)
    return _spec(reader, "HunYuanMoEV1ForCausalLM", experts=experts)


def _spec(reader: ConfigReader, architecture: str, **family: Any) -> ModelSpec:
    """What the families read alike."""
    reader.only(**_ONLY)
    for key in _UNREAD:
        reader.get(key, None)
    bias = bool(reader.get("attention_bias", False))
    num_heads = reader.require("num_attention_heads")
    head_dim = reader.get("head_dim", reader.require("hidden_size") // num_heads)
    reader.only(attention_head_dim=head_dim)
    attention = attention_from(
        reader,
        max_positions=_MAX_POSITIONS,
        bias=bias,
        output_bias=bias,
        qk_norm=QkNorm(after_rope=True),
        rope=_rope(reader, head_dim),
    )
    norm = norm_from(reader, 1e-5)
    return spec_from(reader, architecture, max_positions=_MAX_POSITIONS, attention=attention, norm=norm, **family)


def _rope(reader: ConfigReader, head_dim: int) -> RopeSpec:
    """Of "dynamic" with alpha the theta alone is other: theta * alpha ** (H / (H - 2)); its other keys are not read."""
    key = "rope_scaling" if mapping(reader, "rope_scaling") else "rope_parameters"
    scaling = mapping(reader, key)
    alpha = scaling.get("alpha")
    if alpha is None:
        return rope_from(reader, reader.get("max_position_embeddings", _MAX_POSITIONS))
    if scaling.get("rope_type", scaling.get("type")) != "dynamic":
        raise ValueError(f"{key} is {shown(scaling)}; alpha belongs to the type 'dynamic'")
    theta = reader.get("rope_theta", scaling.get("rope_theta", 10000.0))
    for name, value in (("alpha", alpha), ("rope_theta", theta)):
        check_number(name, value)
    check_number("head_dim", head_dim)
    if head_dim < 4:
        raise ValueError(f"head_dim is {head_dim}; alpha stretches heads of 4 dimensions or more")
    return RopeSpec(rope_theta=theta * alpha ** (head_dim / (head_dim - 2)))


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a Hunyuan, and the Hugging Face tensor it comes from."""
    body = (*decoder.frame_rules(spec), *decoder.attention_rules(spec, "query_layernorm", "key_layernorm"))
    return (*body, *decoder.mlp_rules(spec), *decoder.expert_rules(spec, router="gate.wg", shared="shared_mlp"))
