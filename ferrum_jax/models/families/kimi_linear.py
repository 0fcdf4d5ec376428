"""KimiLinearForCausalLM: three layers of Kimi Delta Attention to one of latent attention, which knows no positions.

Experts are DeepSeek-V3's under names of their own. Layers of `linear_attn_config` are counted from one.
Source: Kimi Team 2025 (Kimi Linear); keys as in the published configs and in Hugging Face's KimiLinearConfig.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.deepseek import LATENT, attention_rules, experts_from, latent_attention_from
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import hybrid_groups, sparse_layers, spec_from
from ferrum_jax.models.spec import KimiDeltaSpec, ModelSpec, RopeSpec

# DeepSeek's keys by the family's.
_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# What layers of Kimi Delta Attention have, ours by the checkpoint's name; then decays and gates of low rank.
DELTA = {
    **{f"{x}_proj.weight": f"{x}_heads.weight" for x in "qkvb"},
    **{f"{x}_conv1d.weight": f"{x}_conv" for x in "qkv"},
    "dt_bias": "dt_bias",
    "o_norm.weight": "norm.weight",
    "o_proj.weight": "o.weight",
}
_LOW_RANK = {f"{x}_proj.weight": f"{x}.weight" for x in ("f_a", "f_b", "g_a", "g_b")}


def with_deepseeks_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config in DeepSeek's spelling."""
    return {_KEYS.get(key, key): value for key, value in config.items()}


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(moe_router_activation_func="sigmoid", use_grouped_topk=True, moe_layer_freq=1, mla_use_nope=True)
    reader.leave("rope_theta", "num_nextn_predict_layers")  # no position turns anything, and no layer predicts more
    own = ConfigReader(reader.get("linear_attn_config", {}))
    recurrence = KimiDeltaSpec(
        num_heads=own.get("num_heads", reader.get("linear_num_heads", 32)),
        head_dim=own.get("head_dim", reader.get("linear_head_dim", 128)),
        conv_kernel_dim=own.get("short_conv_kernel_size", reader.get("linear_conv_kernel_dim", 4)),
        flat_rates=False,
    )
    kinds = reader.get("layer_types", _kinds(own, reader.require("num_hidden_layers")))
    own.finish()
    return spec_from(
        reader,
        attention=dataclasses.replace(latent_attention_from(reader, rope=RopeSpec()), rope=None),
        experts=experts_from(reader, sparse_layers(reader, reader.get("first_k_dense_replace", 1))),
        recurrence=recurrence,
        cache_groups=hybrid_groups(kinds, reader.require("num_hidden_layers")),
    )


def _kinds(own: ConfigReader, num_layers: int) -> list[str]:
    """The kind of each layer, by two lists that count from one; without them every fourth layer attends."""
    attending, recurrent = own.get("full_attn_layers", []), own.get("kda_layers", [])
    both = [*attending, *recurrent]
    if not both:
        return ["linear_attention" if layer % 4 or not layer else "full_attention" for layer in range(num_layers)]
    if any(type(layer) is not int for layer in both) or sorted(both) != list(range(1, num_layers + 1)):
        raise ValueError(
            f"full_attn_layers is {shown(attending)} and kda_layers {shown(recurrent)}; together they must name each "
            f"layer from 1 to {num_layers} once"
        )
    return ["full_attention" if layer + 1 in attending else "linear_attention" for layer in range(num_layers)]


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """The reference implementation saves MLPs under the name of experts, which the authors do not."""
    return (
        *tensors.frame_rules(spec),
        *attention_rules(spec),
        *delta_rules(spec, DELTA | _LOW_RANK | {"A_log": "a_log_by_head"}),
        *tensors.or_named(tensors.mlp_rules(spec), {".mlp.": ".block_sparse_moe."}),
        *tensors.expert_rules(spec, **tensors.MIXTRALS_EXPERTS, shared="shared_experts"),
    )


def delta_rules(spec: ModelSpec, names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Tensors of Kimi Delta Attention, which are parameters as they are. names: ours by theirs."""
    return tensors.named_rules("model.layers.{i}.self_attn.", "layers.{i}.attention.", names, spec.state_layers)


FAMILIES = {
    "KimiLinearForCausalLM": Family(
        read=_spec,
        defaults={
            "max_position_embeddings": 1048576,
            "moe_intermediate_size": 1024,
            "q_lora_rank": None,
            "routed_scaling_factor": 2.446,
            "rms_norm_eps": 1e-5,
        },
        respell=with_deepseeks_keys,
        weight_rules=_rules,
        models="Kimi-Linear",
        notes=f"Kimi Delta Attention, on TPUs decoded by a kernel; {LATENT}",
    )
}
