"""HYV4ForCausalLM (Hy4): DeepSeek-V3.2's latent attention with sinks and gates, in layers with hyper-connections.

A layer whose type is "shared" attends to the keys that the last indexer before it chose, and what turns in an indexer
stands last in its heads. Routed experts limit their gates, others do not. The head is float32. The published number of
KV heads counts for nothing, since all heads share a latent.
Source: Tencent 2026 (Hy4); keys as in Hugging Face's HYV4Config.
"""

from checkpoints.rules import Rule
from ferrum_jax.models.families import deepseek, glm5, tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import ONE_TOKEN, Family, with_unserved
from ferrum_jax.models.families.plain import norm_from, spec_from
from ferrum_jax.models.spec import ModelSpec, StreamsSpec

_ONLY = {"learnable_sink": True, "enable_ihc": True, "rope_interleave": False, "moe_layer_freq": 1}
_HYPER = {"hc_fn": "mix", "hc_base": "base", "hc_scale": "scale"}
_ATTENTION = {
    "self_attn.linear_gate.weight": "attention.gate_heads.weight",
    "self_attn.learnable_sink_param": "attention.sinks",
}

# What the reference implementation says in names of tensors: as it saves them, and internally.
_AS_SAVED = {
    ".gate_proj": ".linear_gate",
    "attn.linear_gate": "attn.gate_proj",
    "learnable_sink_param": "sinks",
    "hc_attn_layer.hc_pre.": "hc_pre.hc_attn_layer.",
    "hc_pre.hc_attn_layer.hc_": "attn_hc.",
    "hc_mlp_layer.hc_pre.": "hc_pre.hc_mlp_layer.",
    "hc_pre.hc_mlp_layer.hc_": "ffn_hc.",
    "model.hc_head.": "model.hc_pre.hc_head.",
    "hc_head.hc_head_": "hc_head.hc_",
}


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(**_ONLY)
    reader.leave("learnable_sink_init", "num_nextn_predict_layers", "num_mtp_layers")
    norm = norm_from(reader)
    indexer = deepseek.indexer_from(reader, turns_last=True, key_norm_eps=norm.eps)
    attention = deepseek.latent_attention_from(reader, indexer=indexer, value_gate=True, sinks=True)
    streams = StreamsSpec(
        num_streams=reader.get("hc_mult", 4),
        magnitude=float(reader.get("hc_magnitude", 2.0)),
        eps=float(reader.get("hc_eps", 1e-6)),
    )
    limit = float(reader.get("swiglu_limit", 10.0))
    return spec_from(
        reader,
        attention=attention,
        other_attention=glm5.sharing(attention, glm5.shared_from(reader)),
        experts=deepseek.experts_from(reader, deepseek.with_experts(reader), gate_limit=limit),
        norm=norm,
        hyper_connections=streams,
        wide_head=True,
    )


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    every = tuple(range(spec.num_layers))
    halves = {"hc_attn_layer": "attention_streams", "hc_mlp_layer": "mlp_streams"}
    names = _ATTENTION | {
        f"{theirs}.hc_pre.{name}": f"{ours}.{part}" for theirs, ours in halves.items() for name, part in _HYPER.items()
    }
    of_head = {f"hc_head_{name.removeprefix('hc_')}": part for name, part in _HYPER.items()}
    rules = (
        *tensors.frame_rules(spec),
        *tensors.named_rules("model.hc_head.", "streams.", of_head),
        *tensors.in_layers(names, every),
        *deepseek.attention_rules(spec),
        *tensors.mlp_rules(spec),
        *_expert_rules(spec),
    )
    return tensors.or_named(rules, _AS_SAVED)


def _expert_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    if spec.experts is None:
        return ()
    stacked = tensors.stacked_expert_rules(
        spec.experts, "mlp.experts.gate_up_proj", "mlp.experts.down_proj", router="mlp.gate.weight"
    )
    correction = tensors.per_layer("mlp.gate.e_score_correction_bias", "mlp.correction", spec.experts.layers)
    return (*stacked, *correction, *tensors.shared_expert_rules(spec.experts, "mlp.shared_experts"))


FAMILIES = {
    "HYV4ForCausalLM": Family(
        read=_spec,
        defaults={
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_interleave": False,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "index_n_heads": 16,
            "index_topk_freq": 4,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 768,
            "routed_scaling_factor": 2.827,
        },
        respell=lambda config: {key: value for key, value in config.items() if key != "num_key_value_heads"},
        weight_rules=_rules,
        harmless=with_unserved("model.mtp_layers.*"),
        models="Hy4",
        notes=f"{deepseek.CHOSEN}; {ONE_TOKEN}",
    )
}
