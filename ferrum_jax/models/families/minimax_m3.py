"""MiniMaxM3VLForCausalLM, the text part of MiniMaxM3SparseForConditionalGeneration: keys that are chosen in blocks.

Layers of the published type "minimax_m3_sparse" have an indexer with a head for each KV head: it takes the blocks of
keys with the highest scores and always the last ones, and that KV head attends to these alone. MLPs and experts have
gpt-oss's clamped SwiGLU; one expert is shared.
Source: MiniMax 2026 (MiniMax-M3); keys as in Hugging Face's MiniMaxM3VLTextConfig, and as published.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule, StoredTensor
from ferrum_jax.models.families import plain, tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import ONE_TOKEN, Family
from ferrum_jax.models.families.rope_reader import rope_from
from ferrum_jax.models.families.text_part import text_part_of
from ferrum_jax.models.spec import IndexerSpec, MlpSpec, ModelSpec, QkNorm

_KINDS = ("full_attention", "minimax_m3_sparse")
# Keys of published configs, what the reference's configs call them, and for lists of 0 and 1 what these stand for.
_INDEXER = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
_LISTS = {"sparse_attention_freq": ("layer_types", _KINDS), "moe_layer_freq": ("mlp_layer_types", ("dense", "sparse"))}
# Keys with one value that is served, and keys of layers that predict several tokens.
_ONLY = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_head"}
_ONLY |= {"use_gemma_norm": True, "n_shared_experts": 1}
_INDEXER_ONLY = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
_MTP = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "num_nextn_predict_layers")
# What the reference's own text models say in names of tensors.
_AS_SAVED = {
    "self_attn.index_": "self_attn.indexer.",
    "block_sparse_moe.e_score": "mlp.gate.e_score",
    "block_sparse_moe.": "mlp.",
}
_OF_IMAGES = (
    *("vision_config", "image_token_index", "video_token_index", "image_token_id", "video_token_id"),
    *("projector_hidden_size", "projector_hidden_act", "multimodal_projector_bias", "vision_feature_layer"),
    *("vision_feature_select_strategy", "image_seq_length", "image_grid_pinpoints", "img_token_compression_config"),
    "merged_hidden_size",
)


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(**_ONLY)
    reader.leave(*_MTP, "sparse_disable_index_value")
    if (act := reader.get("hidden_act", "silu")) not in ("silu", "swigluoai"):
        raise ValueError(f"hidden_act is {shown(act)}; this architecture has clamped SwiGLU, said as 'swigluoai'")
    clamps = (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702))
    limits: dict[str, Any] = {key: float(reader.get(key, value)) for key, value in clamps}
    head_dim = reader.require("head_dim")
    turning = reader.get("rotary_dim", 64)
    # The reference reads the factor alone, which published configs have beside rotary_dim; saved ones nest it.
    rope = rope_from(reader, partial_rotary_factor=1.0 if reader.said("rope_parameters") else turning / head_dim)
    attention = plain.attention_from(reader, qk_norm=QkNorm(), rope=rope)
    indexer = _indexer(reader, attention.num_key_value_heads, rope.rotary_dim(head_dim))
    num_layers = reader.require("num_hidden_layers")
    kinds = reader.get("layer_types", ["full_attention"] * num_layers)
    if len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        raise ValueError(f"layer_types is {shown(kinds)}; it must name one of {_KINDS} for each of {num_layers} layers")
    indexed = plain.layers_where(kind == "minimax_m3_sparse" for kind in kinds)
    with_experts = plain.sparse_layers(reader, 0)
    experts = (
        plain.experts_from(
            reader,
            reader.get("num_local_experts", 128),
            layers=with_experts,
            intermediate_size=reader.get("intermediate_size", 3072),
            scoring="sigmoid",
            corrected=True,
            norm_topk_prob=True,
            routed_scaling_factor=float(reader.get("routed_scaling_factor", 2.0)),
            shared_intermediate_size=reader.get("shared_intermediate_size", 3072),
            shared_gate=False,
        )
        if with_experts
        else None
    )
    return plain.spec_from(
        reader,
        attention=attention,
        other_attention=((indexed, dataclasses.replace(attention, indexer=indexer)),) if indexed else (),
        mlp=MlpSpec(intermediate_size=reader.get("dense_intermediate_size", 12288), **limits),
        experts=experts,
        norm=plain.norm_from(reader, zero_centred=True),
    )


def _indexer(reader: ConfigReader, num_kv_heads: int, rotary_dim: int) -> IndexerSpec:
    """The indexer of a layer that has one. Raises ValueError where its heads are not those of K, or cannot turn."""
    heads, width = reader.get("index_n_heads", 4), reader.get("index_head_dim", 128)
    block, local = reader.get("index_block_size", 128), reader.get("index_local_blocks", 1)
    chosen = reader.get("index_topk_blocks", 16)
    if heads != num_kv_heads or width < rotary_dim or local > chosen:
        raise ValueError(
            f"index_n_heads is {heads}, index_head_dim {width} and index_local_blocks {local}; there must be a head "
            f"for each of {num_kv_heads} KV heads, room for {rotary_dim} values that turn, and {chosen} blocks at most"
        )
    return IndexerSpec(
        num_heads=heads,
        head_dim=width,
        top_k=chosen * block,
        by_head=True,
        group_size=block,
        local_groups=local,
    )


def _with_one_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as the reference implementation writes it: the indexer's keys beside others, kinds of layers by name.

    Raises ValueError for an indexer that scores blocks in another way, or gives values of its own.
    """
    found = dict(config)
    sparse = found.pop("sparse_attention_config", None) or {}
    if not isinstance(sparse, Mapping):
        raise ValueError(f"sparse_attention_config is {shown(sparse)}; it must be an object")
    of_indexer = ConfigReader(sparse, architecture="sparse_attention_config")
    of_indexer.only(**_INDEXER_ONLY)
    flags = of_indexer.get("sparse_attention_freq", [])
    of_indexer.only(sparse_disable_index_value=flags)
    found |= {ours: of_indexer.get(theirs, 1) for theirs, ours in _INDEXER.items() if theirs in sparse}
    of_indexer.finish()
    found |= {"sparse_attention_freq": flags} if flags else {}
    for theirs, (ours, names) in _LISTS.items():
        flags = found.pop(theirs, None)
        if flags is None:
            continue
        if not isinstance(flags, list | tuple) or any(type(flag) is not int or flag not in (0, 1) for flag in flags):
            raise ValueError(f"{theirs} is {shown(flags)}; it must be a list of 0 and 1")
        found[ours] = [names[flag] for flag in flags]
    return found


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    indexed = tuple(i for i in spec.attention_layers if spec.attention_of(i).indexer is not None)
    names = {"index_q_proj": "heads", "index_k_proj": "k", "index_q_norm": "q_norm", "index_k_norm": "k_norm"}
    indexer = {f"self_attn.{theirs}": f"attention.indexer.{ours}" for theirs, ours in names.items()}
    experts = tensors.MIXTRALS_EXPERTS | {"correction": "e_score_correction_bias", "shared": "shared_experts"}
    of_decoder = _or_fused(tensors.joined(tensors.weight_rules(spec, experts=experts), spec), spec)
    return tensors.or_named((*of_decoder, *tensors.in_layers(indexer, indexed, tensors.WEIGHT)), _AS_SAVED)


def _or_fused(rules: tuple[Rule, ...], spec: ModelSpec) -> tuple[Rule, ...]:
    """The rules, those of gate and up of MLPs and shared experts with the tensor that may hold both."""
    widths = {"mlp": spec.mlp.intermediate_size}
    widths |= {"mlp.shared": spec.experts.shared_intermediate_size} if spec.experts else {}
    parts = {
        f"layers.{{i}}.{name}.{half}.weight": part
        for name, width in widths.items()
        for half, part in tensors.halves(width).items()
    }

    def fused(rule: Rule) -> Rule:
        name = f"{rule.source.rsplit('.', 2)[0]}.gate_up_proj.weight"
        return dataclasses.replace(rule, instead=(StoredTensor(name, parts[rule.target]),))

    return tuple(fused(rule) if rule.target in parts else rule for rule in rules)


_TEXT = Family(
    read=_spec,
    defaults={
        "max_position_embeddings": 524288,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts_per_tok": 4,
        "rope_theta": 5e6,
    },
    respell=_with_one_spelling,
    weight_rules=_rules,
    harmless=lambda spec: (*tensors.harmless_tensors(spec), "mtp.*", "model.mtp.*"),
    models="MiniMax-M3, text",
    notes="attention to blocks of keys that an indexer chooses: where contexts may be longer than those, "
    "[on XLA](../decisions/0106-more-shapes-on-tpus.md)",
)
_WHOLE = text_part_of(
    _TEXT,
    _OF_IMAGES,
    models="MiniMax-M3",
    notes=f"its text part; images are refused; {_TEXT.notes}; {ONE_TOKEN}",
)
FAMILIES = {
    "MiniMaxM3VLForCausalLM": _TEXT,
    "MiniMaxM3SparseForConditionalGeneration": dataclasses.replace(
        _WHOLE, harmless=lambda spec: (*_WHOLE.harmless(spec), "patch_merge_mlp.*")
    ),
}
