"""FalconH1ForCausalLM: a decoder whose every layer has attention and Mamba2 side by side, with multipliers throughout.

Attention's are few here: its projections have no biases, so what multiplies inputs and keys is in the scale of q k, and
what multiplies inputs and outputs is in that of outputs. Inputs of Mamba2 likewise.
Source: Zuo et al. 2025 (Falcon-H1); keys as in Hugging Face's FalconH1Config.
"""

import dataclasses

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import IN_KERNELS, Family
from ferrum_jax.models.families.mamba2_reader import mamba2_from, mamba2_rules
from ferrum_jax.models.families.plain import attention_from, mlp_from, spec_from
from ferrum_jax.models.spec import AttentionSpec, CacheGroup, Mamba2Spec, MlpSpec, ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(
        attention_bias=False, mlp_bias=False, projectors_bias=False, mamba_use_mlp=True, attn_layer_indices=None
    )
    reader.leave("num_logits_to_keep")
    every = tuple(range(reader.require("num_hidden_layers")))
    return spec_from(
        reader,
        attention=_attention(reader),
        mlp=_mlp(reader),
        recurrence=_mamba2(reader),
        cache_groups=(CacheGroup(kind="full", layers=every), CacheGroup(kind="state", layers=every)),
        embedding_scale=float(reader.get("embedding_multiplier", 1.0)),
        logit_scale=float(reader.get("lm_head_multiplier", 1.0)),
    )


def _attention(reader: ConfigReader) -> AttentionSpec:
    own, inputs = attention_from(reader), reader.get("attention_in_multiplier", 1.0)
    logits = inputs**2 * reader.get("key_multiplier", 1.0)
    return dataclasses.replace(
        own,
        query_pre_attn_scalar=own.head_dim / logits**2,
        output_multiplier=float(inputs * reader.get("attention_out_multiplier", 1.0)),
    )


def _mlp(reader: ConfigReader) -> MlpSpec:
    gate, down = _numbers(reader, "mlp_multipliers", 2)
    return mlp_from(reader, gate_multiplier=gate, output_multiplier=down)


def _mamba2(reader: ConfigReader) -> Mamba2Spec:
    inner = reader.get("mamba_expand", 2) * reader.require("hidden_size")
    has_norm = reader.flag("mamba_rms_norm")
    if has_norm and reader.get("mamba_norm_before_gate", True):
        raise ValueError("mamba_norm_before_gate is true; norms of Mamba2 are served where they come after the gate")
    reader.get("mamba_norm_before_gate", True)
    by_inputs = reader.get("ssm_in_multiplier", 1.0)
    return mamba2_from(
        reader,
        reader.get("mamba_d_ssm", inner),
        norm=has_norm,
        multipliers=tuple(by_inputs * x for x in _numbers(reader, "ssm_multipliers", 5)),
        output_multiplier=float(reader.get("ssm_out_multiplier", 1.0)),
    )


def _numbers(reader: ConfigReader, key: str, count: int) -> list[float]:
    """As many numbers, 1 where the config is silent."""
    values = reader.get(key, [1.0] * count)
    if len(values) != count or not all(type(x) in (int, float) for x in values):
        raise ValueError(f"{key} is {shown(values)}; it must be {count} numbers")
    return [float(x) for x in values]


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    frame = tensors.frame_rules(spec, {"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"})
    return (
        *(rule.renamed(lambda name: name.replace("model.norm.", "model.final_layernorm.")) for rule in frame),
        *(_beside(rule) for rule in tensors.attention_rules(spec)),
        *mamba2_rules(spec, "mamba", "attention.recurrence"),
        *(rule.renamed(lambda name: name.replace(".mlp.", ".feed_forward.")) for rule in tensors.mlp_rules(spec)),
    )


def _beside(rule: Rule) -> Rule:
    return dataclasses.replace(rule, target=rule.target.replace(".attention.", ".attention.attention."))


FAMILIES = {
    "FalconH1ForCausalLM": Family(
        read=_spec,
        defaults={"max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
        weight_rules=_rules,
        models="Falcon-H1",
        notes=f"attention and Mamba2 in each layer, {IN_KERNELS}",
    )
}
