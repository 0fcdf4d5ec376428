"""DeepseekV2ForCausalLM, DeepseekV3ForCausalLM (V3, R1, Kimi-K2), DeepseekV32ForCausalLM (V3.2), and
KimiK25ForConditionalGeneration, whose text part is a V3.

Latent attention, and experts behind the first layers: of the best groups, the best experts, and one that all tokens go
to. V2 scores them by softmax and groups by their best expert; V3 by sigmoid and a correction, groups by their best two.
YaRN's mscale is a factor of the logits besides. Layers behind the last predict one token
more, for drafts. V3.2 is V3 with an indexer in each layer, whose pairs that turn are halves.
Source: DeepSeek-AI 2024 (DeepSeek-V2, section 2; DeepSeek-V3, sections 2.1 and 2.2), 2025 (DeepSeek-V3.2, section 2.1);
Moonshot AI 2026 (Kimi K2.5); keys as in Hugging Face's configs.
"""

import dataclasses
import functools
import math
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import ONE_TOKEN, Family
from ferrum_jax.models.families.mtp import MtpLayers, copies_in_layers, rules_in_layers
from ferrum_jax.models.families.plain import sparse_layers, spec_from
from ferrum_jax.models.families.rope_reader import mapping, rope_from
from ferrum_jax.models.families.text_part import text_part_of
from ferrum_jax.models.spec import AttentionSpec, ExpertsSpec, IndexerSpec, LatentSpec, ModelSpec, RopeSpec

LATENT = (
    "latent attention: on Hopper GPUs a kernel decodes, all else there is "
    "[on XLA](../decisions/0092-latents-on-hopper.md); on TPUs prompts too have a kernel"
)
LEFT_TO_XLA = "../decisions/0106-more-shapes-on-tpus.md"
CHOSEN = (
    "latent attention to keys that an indexer chooses: on TPUs kernels decode, prompts beyond those keys are "
    f"[on XLA]({LEFT_TO_XLA})"
)

# Keys of Kimi-K2.5 that concern images and videos alone.
_OF_IMAGES = (
    *("vision_config", "projection_hidden_size", "projection_layer_norm_eps", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "media_placeholder_token_id", "ignore_index"),
    *("use_unified_vision_chunk", "video_placeholder"),
)


def _v2(reader: ConfigReader) -> ModelSpec:
    reader.only(norm_topk_prob=False, scoring_func="softmax", mlp_bias=False)
    is_grouped = {"greedy": False, "group_limited_greedy": True}
    method = reader.get("topk_method", "greedy")
    if method not in is_grouped:
        raise ValueError(f"topk_method is {method!r}; known are {sorted(is_grouped)}")
    chosen: dict[str, Any] = {"scoring": "softmax", "corrected": False, "num_best": 1, "norm_topk_prob": False}
    chosen |= {} if is_grouped[method] else {"num_groups": 1, "num_chosen_groups": 1}
    return _spec(reader, experts_from(reader, **chosen))


def _v3(reader: ConfigReader) -> ModelSpec:
    reader.only(scoring_func="sigmoid", topk_method="noaux_tc")
    return _spec(reader, experts_from(reader))


def _v32(reader: ConfigReader) -> ModelSpec:
    reader.only(scoring_func="sigmoid", topk_method="noaux_tc", mlp_bias=False)
    return _spec(reader, experts_from(reader, with_experts(reader)), indexer=indexer_from(reader))


def indexer_from(reader: ConfigReader, *, of_all: bool = True, **family: Any) -> IndexerSpec:
    """The indexer, as DeepSeek-V3.2 names its parts; of_all: of each layer. Raises ValueError where it cannot turn."""
    if of_all:
        reader.only(layer_types=["indexed_attention"] * reader.require("num_hidden_layers"))
    turning, width = reader.get("qk_rope_head_dim", 64), reader.get("index_head_dim", 128)
    if turning > width:
        raise ValueError(f"qk_rope_head_dim is {turning} and index_head_dim {width}; the former must fit into it")
    return IndexerSpec(
        num_heads=reader.get("index_n_heads", 64), head_dim=width, top_k=reader.get("index_topk", 2048), **family
    )


def with_experts(reader: ConfigReader) -> tuple[int, ...]:
    """The layers with experts: those that the config lists, or all but the first, 3 where it is silent."""
    return sparse_layers(reader, min(reader.get("first_k_dense_replace", 3), reader.require("num_hidden_layers")))


def _spec(reader: ConfigReader, experts: ExpertsSpec | None, **attention: Any) -> ModelSpec:
    reader.only(moe_layer_freq=1, ep_size=1)
    # of layers behind the last, which `Family.mtp` counts, and of training
    reader.leave("num_nextn_predict_layers", "num_mtp_layers", "aux_loss_alpha", "seq_aux")
    return spec_from(reader, attention=latent_attention_from(reader, **attention), experts=experts)


def latent_attention_from(reader: ConfigReader, *, rope: RopeSpec | None = None, **family: Any) -> AttentionSpec:
    """The heads, their latents and the rope of what turns, in neighbours where the config is silent.

    rope: None is that of the config. Raises ValueError naming the key whose value cannot be.
    """
    heads = reader.require("num_attention_heads")
    reader.only(num_key_value_heads=heads)
    turning, staying = reader.get("qk_rope_head_dim", 64), reader.get("qk_nope_head_dim", 128)
    reader.only(qk_head_dim=turning + staying)
    reader.leave("head_dim")  # what some tools write beside it, of either size
    rope, bias = rope or rope_from(reader), reader.flag("attention_bias")
    return AttentionSpec(
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=turning,
        v_head_dim=reader.get("v_head_dim", 128),
        bias=bias,
        output_bias=bias,
        query_pre_attn_scalar=(turning + staying) / _mscale(reader) ** 4,
        rope=dataclasses.replace(rope, interleaved=reader.flag("rope_interleave", True)),
        latent=LatentSpec(
            kv_lora_rank=reader.get("kv_lora_rank", 512),
            qk_nope_head_dim=staying,
            q_lora_rank=reader.nullable("q_lora_rank", 1536),
        ),
        **family,
    )


def _mscale(reader: ConfigReader) -> float:
    """YaRN's factor of q and of k, beside that of cos and sin."""
    values = mapping(reader, "rope_scaling") or mapping(reader, "rope_parameters")
    scale, factor = values.get("mscale_all_dim") or 0.0, values.get("factor") or 1.0
    return 0.1 * scale * math.log(factor) + 1.0 if scale and factor > 1 else 1.0


def experts_from(reader: ConfigReader, layers: tuple[int, ...] | None = None, **family: Any) -> ExpertsSpec | None:
    """Experts of these layers as in DeepSeek-V3, but for what the family says; None without layers.

    layers: None are those behind the first.
    """
    if layers is None:
        layers = tuple(range(reader.get("first_k_dense_replace", 0), reader.require("num_hidden_layers")))
    width = reader.get("moe_intermediate_size", 2048)
    read: dict[str, Any] = {
        "num_experts": reader.get("n_routed_experts", 256),
        "num_experts_per_tok": reader.get("num_experts_per_tok", 8),
        "intermediate_size": width,
        "scoring": "sigmoid",
        "corrected": True,
        "num_groups": reader.get("n_group", 1),
        "num_chosen_groups": reader.get("topk_group", 1),
        "norm_topk_prob": reader.flag("norm_topk_prob", True),
        "routed_scaling_factor": float(reader.get("routed_scaling_factor", 1.0)),
        "shared_intermediate_size": width * reader.get("n_shared_experts", 1),
        "shared_gate": False,
    }
    return ExpertsSpec(layers=layers, **read | family) if layers else None


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter, and the Hugging Face tensor it comes from; each expert's matrices are tensors of their own."""
    body = (*tensors.frame_rules(spec), *attention_rules(spec), *tensors.mlp_rules(spec))
    return (*body, *tensors.expert_rules(spec, shared="shared_experts"), *rules_in_layers(spec))


def attention_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """The projections of latent attention, and the norms of its latents."""
    layers, own = spec.attention_layers, spec.attention
    has_latent = own.latent is not None and own.latent.q_lora_rank is not None
    linear = functools.partial(tensors.linear, layers=layers)
    queries = (
        *linear("self_attn.q_a_proj", "attention.q_a", bias=own.bias),
        *tensors.per_layer("self_attn.q_a_layernorm.weight", "attention.q_a_norm.weight", layers),
        *linear("self_attn.q_b_proj", "attention.q_b", bias=False),
    )
    return (
        *(queries if has_latent else linear("self_attn.q_proj", "attention.q", bias=False)),
        *linear("self_attn.kv_a_proj_with_mqa", "attention.kv_a", bias=own.bias),
        *tensors.per_layer("self_attn.kv_a_layernorm.weight", "attention.kv_a_norm.weight", layers),
        *linear("self_attn.kv_b_proj", "attention.kv_b", bias=False),
        *linear("self_attn.o_proj", "attention.o", bias=own.output_bias),
        *indexer_rules(spec),
    )


def indexer_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """The projections of layers' own indexers, and the norm of their keys."""
    indexers = {layer: spec.attention_of(layer).indexer for layer in spec.attention_layers}
    layers = tuple(layer for layer, own in indexers.items() if own is not None and not own.shared)
    linear = functools.partial(tensors.linear, layers=layers, bias=False)
    norm = functools.partial(tensors.per_layer, layers=layers)
    return (
        *linear("self_attn.indexer.wq_b", "attention.indexer.q"),
        *linear("self_attn.indexer.wk", "attention.indexer.k"),
        *linear("self_attn.indexer.weights_proj", "attention.indexer.weigh"),
        *norm("self_attn.indexer.k_norm.weight", "attention.indexer.k_norm.weight"),
        *norm("self_attn.indexer.k_norm.bias", "attention.indexer.k_norm.bias"),
    )


def harmless_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """The decoder's, layers behind those that are taken, and what such layers repeat of the model."""
    behind = (f"model.layers.{layer}.*" for layer in range(spec.num_layers, spec.num_layers + 4))
    return (*tensors.harmless_tensors(spec), *behind, *copies_in_layers(spec))


family = functools.partial(Family, weight_rules=weight_rules, harmless=harmless_tensors)
FAMILIES = {
    "DeepseekV2ForCausalLM": family(
        read=_v2,
        defaults={"max_position_embeddings": 2048, "n_routed_experts": 64},
        models="DeepSeek-V2, V2-Lite",
        notes=LATENT,
    ),
    "DeepseekV3ForCausalLM": family(
        read=_v3,
        defaults={
            "max_position_embeddings": 4096,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
        },
        mtp=MtpLayers(),
        models="DeepSeek-V3, V3.1, R1, Kimi-K2",
        notes=f"{LATENT}; {ONE_TOKEN}",
    ),
    "DeepseekV32ForCausalLM": family(
        read=_v32,
        defaults={
            "max_position_embeddings": 163840,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
        },
        models="DeepSeek-V3.2",
        notes=f"{CHOSEN}; {ONE_TOKEN}",
    ),
}
FAMILIES["KimiK25ForConditionalGeneration"] = text_part_of(
    FAMILIES["DeepseekV3ForCausalLM"],
    _OF_IMAGES,
    models="Kimi-K2.5",
    notes=f"its text part; images are refused; {LATENT}",
)
