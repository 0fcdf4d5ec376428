"""HunYuanDenseV1ForCausalLM and HunYuanMoEV1ForCausalLM: Llama's decoder with norms on the heads of turned q and k.

Long contexts turn slower by one factor that does not depend on their length ("dynamic" with alpha).
Source: Tencent Hunyuan Team 2025 (Hunyuan-A13B); keys as in Hugging Face's configs.
"""

import functools
from typing import Any

from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.bounds import check_number, shown
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import attention_from, spec_from
from ferrum_jax.models.families.rope_reader import mapping, rope_from
from ferrum_jax.models.spec import ExpertsSpec, ModelSpec, QkNorm, RopeSpec

# Keys of published configs that the reference implementation knows one value of, or does not read.
_ONLY = {"use_qk_norm": True, "use_cla": False, "mlp_bias": False, "norm_type": "rms", "use_rotary_pos_emb": True}
_UNREAD = ("eod_token_id", "im_start_id", "im_end_id", "pad_id", "use_mixed_mlp_moe", "org_vocab_size")


def _spec(reader: ConfigReader, **family: Any) -> ModelSpec:
    reader.only(**_ONLY)
    reader.leave(*_UNREAD)
    head_dim = reader.get("head_dim", reader.require("hidden_size") // reader.require("num_attention_heads"))
    reader.only(attention_head_dim=head_dim)
    norm, rope = QkNorm(after_rope=True), _rope(reader, head_dim)
    return spec_from(
        reader, attention=attention_from(reader, biases="attention_bias", qk_norm=norm, rope=rope), **family
    )


def _moe(reader: ConfigReader) -> ModelSpec:
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
    return _spec(reader, experts=experts)


def _rope(reader: ConfigReader, head_dim: int) -> RopeSpec:
    """A "dynamic" rope with alpha only has another theta, theta * alpha ** (H / (H - 2)); other keys are not read."""
    key = "rope_scaling" if mapping(reader, "rope_scaling") else "rope_parameters"
    scaling = mapping(reader, key)
    alpha = scaling.get("alpha")
    if alpha is None:
        return rope_from(reader)
    if scaling.get("rope_type", scaling.get("type")) != "dynamic":
        raise ValueError(f"{key} is {shown(scaling)}; alpha belongs to the type 'dynamic'")
    theta = reader.get("rope_theta", scaling.get("rope_theta", 10000.0))
    for name, value in (("alpha", alpha), ("rope_theta", theta)):
        check_number(name, value)
    check_number("head_dim", head_dim)
    if head_dim < 4:
        raise ValueError(f"head_dim is {head_dim}; alpha stretches heads of 4 dimensions or more")
    return RopeSpec(rope_theta=theta * alpha ** (head_dim / (head_dim - 2)))


_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_RULES = functools.partial(
    tensors.weight_rules,
    attention={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    experts={"router": "gate.wg", "shared": "shared_mlp"},
)
FAMILIES = {
    "HunYuanDenseV1ForCausalLM": Family(
        read=_spec, defaults=_DEFAULTS, weight_rules=_RULES, models="Hunyuan 0.5B to 7B"
    ),
    "HunYuanMoEV1ForCausalLM": Family(read=_moe, defaults=_DEFAULTS, weight_rules=_RULES, models="Hunyuan-A13B"),
}
