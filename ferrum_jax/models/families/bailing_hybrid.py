"""BailingMoeV3ForCausalLM (Ling 3.0): layers of Kimi Delta Attention, the last of each group with latent attention.

Decays have a bound, decays and gates one projection each, and a gate weighs each head of latent attention. Experts are
DeepSeek-V3's; in the last layers of Ling-3.0-flash what they multiply has a limit. Layers behind the last are left out.
Source: the model card of Ling-3.0-flash (inclusionAI, 2026); keys as in the published configs and in Hugging Face's
BailingHybridConfig. Limits are those of the authors' server, for the reference implementation does not read their keys.
"""

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models.families import deepseek, tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.kimi_linear import DELTA, delta_rules, with_deepseeks_keys
from ferrum_jax.models.families.plain import hybrid_groups, sparse_layers, spec_from
from ferrum_jax.models.spec import ExpertsSpec, KimiDeltaSpec, ModelSpec

# What the authors' configs say of choices with a single known value.
_ONLY = {
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "linear_silu": True,
    "moe_router_enable_expert_bias": True,
    "no_kda_lora": True,
    "rope_interleave": True,
    "scale_router_input": False,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "up_proj_norm": False,
    "use_bias": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_nGPT": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "value_norm": False,
}
# What concerns training, and layers that are left out.
_LEFT = (
    *("embedding_dropout", "output_dropout", "mtp_loss_scaling_factor", "mtp_use_kda", "num_nextn_predict_layers"),
    *("num_mtp_layers", "max_window_layers", "router_dtype", "seq_aux", "num_kv_heads_for_linear_attn"),
)
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def _with_one_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without the share of a head that turns: it is the share of 128 values that the part with positions has."""
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping):
        config = {**config, "rope_parameters": {k: v for k, v in rope.items() if k != "partial_rotary_factor"}}
    return with_deepseeks_keys({key: value for key, value in config.items() if key != "partial_rotary_factor"})


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(**_ONLY, rotary_dim=reader.get("qk_rope_head_dim", 64))
    reader.leave(*_LEFT)
    num_layers, heads = reader.require("num_hidden_layers"), reader.require("num_attention_heads")
    is_bounded, bound = reader.flag("kda_safe_gate", True), reader.get("kda_lower_bound", -5.0)
    reader.only(linear_num_heads=heads)
    taps = reader.get("short_conv_kernel_size", 4)
    reader.only(linear_conv_kernel_dim=taps)
    return spec_from(
        reader,
        attention=deepseek.latent_attention_from(reader, head_gate=True),
        experts=_experts(reader),
        recurrence=KimiDeltaSpec(
            num_heads=heads,
            head_dim=reader.get("linear_head_dim", reader.get("head_dim", 128)),
            conv_kernel_dim=taps,
            low_rank=False,
            decay_bound=float(bound) if is_bounded else None,
        ),
        cache_groups=hybrid_groups(_kinds(reader, num_layers), num_layers),
    )


def _kinds(reader: ConfigReader, num_layers: int) -> list[str]:
    """The kind of each layer. Raises ValueError where implementations do not agree."""
    size = reader.get("layer_group_size", 6)
    if num_layers % size and reader.said("layer_types") is None:
        raise ValueError(
            f"num_hidden_layers is {num_layers}, no multiple of layer_group_size, {size}; say in layer_types what the "
            "last layers are"
        )
    return reader.get(
        "layer_types", ["linear_attention" if (i + 1) % size else "full_attention" for i in range(num_layers)]
    )


def _experts(reader: ConfigReader) -> ExpertsSpec | None:
    layers = sparse_layers(reader, reader.get("first_k_dense_replace", 2))
    shared = reader.get("moe_shared_expert_intermediate_size", reader.get("moe_intermediate_size", 768))
    routed_limits, shared_limits = (_limits(reader, key) for key in _LIMITS)
    limits = tuple((i, routed_limits[i], shared_limits[i]) for i in layers if routed_limits[i] or shared_limits[i])
    return deepseek.experts_from(
        reader, layers, shared_intermediate_size=shared * reader.get("n_shared_experts", 1), limits=limits
    )


def _limits(reader: ConfigReader, key: str) -> list[float]:
    """A limit for each layer, 0 for none; a list may go on behind the last."""
    num_layers = reader.require("num_hidden_layers")
    said = reader.get(key, [0] * num_layers)
    if len(said) < num_layers or any(type(limit) not in (int, float) or not 0 <= limit < 1e9 for limit in said):
        raise ValueError(f"{key} is {shown(said)}; it must be a number, 0 or more, for each of {num_layers} layers")
    return [float(limit) for limit in said]


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """The reference implementation saves what recurrent layers call o_proj as dense too."""
    delta = delta_rules(spec, DELTA | {f"{x}_proj.weight": f"{x}_heads.weight" for x in "fg"} | {"A_log": "a_log"})
    outputs = [rule for rule in delta if rule.target.endswith("attention.o.weight")]
    rules = (
        *tensors.frame_rules(spec),
        *(rule.renamed(lambda name: name.replace("o_proj", "dense")) for rule in deepseek.attention_rules(spec)),
        *tensors.in_layers({"self_attn.g_proj": "attention.gate_heads"}, spec.attention_layers, tensors.WEIGHT),
        *(rule for rule in delta if rule not in outputs),
        *tensors.or_named(outputs, {"o_proj": "dense"}),
        *tensors.mlp_rules(spec),
        *tensors.expert_rules(spec, correction="gate.expert_bias", shared="shared_experts"),
    )
    return tuple(
        rule.renamed(lambda name: name.replace("embed_tokens", "word_embeddings").replace(".self_attn.", ".attention."))
        for rule in rules
    )


FAMILIES = {
    "BailingMoeV3ForCausalLM": Family(
        read=_spec,
        defaults={
            "max_position_embeddings": 262144,
            "n_group": 8,
            "topk_group": 4,
            "n_routed_experts": 512,
            "moe_intermediate_size": 768,
            "q_lora_rank": None,
            "rope_theta": 6000000.0,
            "routed_scaling_factor": 2.5,
        },
        respell=_with_one_spelling,
        weight_rules=_rules,
        harmless=deepseek.harmless_tensors,
        also=("BailingHybridForCausalLM",),
        models="Ling-3.0-flash, Ling-3.0-tiny",
        notes=f"Kimi Delta Attention, on TPUs decoded by a kernel; {deepseek.LATENT}",
    )
}
