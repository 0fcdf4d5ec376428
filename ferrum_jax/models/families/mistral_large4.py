"""MistralLarge4ForConditionalGeneration: the text part of Mistral Large 4.

DeepSeek-V3.2's latent attention without a latent of queries. Heads and indexers weigh sharper far from the start by
weights of their own, frequencies of rotary positions are learned, and every fourth layer knows no positions. Layers may
take the keys that the last indexer before them chose, and may attend to the latents of an earlier layer. Experts are
scored by softmax. Weights have Mistral's own names.
Source: Mistral AI 2026 (Mistral Large 4); keys and defaults as in Hugging Face's MistralLarge4TextConfig.
"""

import dataclasses
from collections.abc import Sequence

from checkpoints.rules import Rule
from ferrum_jax.models.families import deepseek, tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import ONE_TOKEN, Family
from ferrum_jax.models.families.glm5 import shared_from
from ferrum_jax.models.families.ministral3 import OF_IMAGES
from ferrum_jax.models.families.plain import layers_that_turn, layers_where, spec_from
from ferrum_jax.models.families.rope_reader import mapping, rope_from
from ferrum_jax.models.families.text_part import text_part_from
from ferrum_jax.models.spec import AttentionSpec, CacheGroup, ModelSpec

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
# Parts of names in Hugging Face's spelling, which the rules below say, and in Mistral's; the first that fits.
_MISTRALS = (
    ("model.embed_tokens", "tok_embeddings"),
    ("model.", ""),
    ("lm_head", "output"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attention.wq"),
    ("self_attn.kv_a_proj_with_mqa", "attention.wkv_a_with_mqa"),
    ("self_attn.kv_a_layernorm", "attention.kv_a_norm"),
    ("self_attn.kv_b_proj", "attention.wkv_b"),
    ("self_attn.o_proj", "attention.wo"),
    ("self_attn.", "attention."),
    ("mlp.experts.", "experts."),
    ("mlp.shared_experts.", "shared_experts."),
    ("mlp.gate.", "gate."),
    ("mlp.", "feed_forward."),
    ("gate_proj", "w1"),
    ("down_proj", "w2"),
    ("up_proj", "w3"),
)
_UNSERVED = ("vision_encoder.*", "pre_mm_projector_norm.*", "patch_merger.*", "vision_language_adapter.*")


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.leave("num_nextn_predict_layers", "num_mtp_layers", "index_share_for_mtp_iteration")
    turning = _attention(reader)
    still = layers_where(not turns for turns in layers_that_turn(reader))
    shared = shared_from(reader)
    borrowed = _borrowed(reader, still, shared)
    borrowers = {layer for layer, _ in borrowed}
    owners = tuple(layer for layer in range(reader.require("num_hidden_layers")) if layer not in borrowers)
    return spec_from(
        reader,
        attention=turning,
        other_attention=_others(turning, still, shared),
        experts=deepseek.experts_from(
            reader, deepseek.with_experts(reader), scoring="softmax", corrected=False, norm_topk_prob=True
        ),
        cache_groups=(CacheGroup(kind="full", layers=owners),),
        borrowed=borrowed,
        final_logit_softcapping=float(reader.get("final_logit_softcapping", 30.0)),
    )


def _attention(reader: ConfigReader) -> AttentionSpec:
    """Attention of a layer that knows positions and has an indexer."""
    said = mapping(reader, "rope_parameters") or _ROPE
    rope = rope_from(ConfigReader({"rope_parameters": said}), reader.require("max_position_embeddings"))
    own = deepseek.latent_attention_from(
        reader,
        rope=dataclasses.replace(rope, learned_frequencies=True),
        learned_temperature=True,
        indexer=deepseek.indexer_from(reader, interleaved=True, own_queries=True),
    )
    assert own.latent is not None
    latent = dataclasses.replace(own.latent, q_lora_rank=None, norm_eps=reader.get("rms_norm_eps", 1e-5))
    return dataclasses.replace(own, latent=latent)


def _others(
    turning: AttentionSpec, still: Sequence[int], shared: Sequence[int]
) -> tuple[tuple[tuple[int, ...], AttentionSpec], ...]:
    """The layers that know no positions, those without an indexer of their own, and those that are both."""
    assert turning.latent is not None and turning.indexer is not None
    whole = turning.latent.qk_nope_head_dim + turning.head_dim  # of a key that is all a head's own
    latent = dataclasses.replace(turning.latent, qk_nope_head_dim=whole, shared_key=False)
    without = {"rope": None, "latent": latent}
    taking = {"indexer": dataclasses.replace(turning.indexer, shared=True)}
    kinds = (
        (set(still) & set(shared), dataclasses.replace(turning, **without, **taking)),
        (set(still) - set(shared), dataclasses.replace(turning, **without)),
        (set(shared) - set(still), dataclasses.replace(turning, **taking)),
    )
    return tuple((tuple(sorted(layers)), own) for layers, own in kinds if layers)


def _borrowed(reader: ConfigReader, still: Sequence[int], shared: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The layers that attend to an earlier one's latents, with that one.

    Raises ValueError where that is not the last lender of the same kind, or a layer has an indexer whose keys would be
    all that is kept of it.
    """
    count = reader.require("num_hidden_layers")
    lenders = reader.get("kv_source_layers", list(range(count)))
    if len(lenders) != count or any(type(lender) is not int or not 0 <= lender < count for lender in lenders):
        raise ValueError(f"kv_source_layers is {shown(lenders)}; it must name a layer for each of {count}")
    borrowed = tuple((layer, lender) for layer, lender in enumerate(lenders) if lender != layer)
    for layer, lender in borrowed:
        alike = [other for _, other in borrowed if other < layer and (other in still) == (layer in still)]
        if lenders[lender] != lender or not alike or lender != max(alike):
            raise ValueError(
                f"kv_source_layers is {shown(lenders)}, and {layer} attends to the latents of {lender}; that must be "
                "the last layer before it that lends, of those with positions, or without, as it is"
            )
        if layer not in shared:
            raise ValueError(
                f"kv_source_layers is {shown(lenders)}, and {layer} has latents of {lender} and an indexer of its own; "
                "a cache of an indexer's keys alone is not served, so its indexer_types must be 'shared'"
            )
    return borrowed


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    layers = spec.attention_layers
    owners = tuple(layer for group in spec.kv_groups for layer in group.layers)
    indexers = {layer: spec.attention_of(layer).indexer for layer in layers}
    own = tuple(layer for layer, indexer in indexers.items() if indexer is not None and not indexer.shared)
    temperature = {"ssmax_scaling.s": "temperature.scale", "ssmax_scaling.b": "temperature.bias"}
    of_indexer = {f"self_attn.indexer.{theirs}": f"attention.indexer.{ours}" for theirs, ours in temperature.items()}
    of_heads = {f"self_attn.{theirs}": f"attention.{ours}" for theirs, ours in temperature.items()}
    rules = (
        *tensors.frame_rules(spec),
        *(
            dataclasses.replace(rule, layers=owners) if "kv_a" in rule.target else rule
            for rule in deepseek.attention_rules(spec)
        ),
        *tensors.in_layers(of_heads, layers),
        *tensors.in_layers(of_indexer, own),
        *tensors.linear("self_attn.indexer.q_input_norm", "attention.indexer.q_norm", own, True),
        *tensors.mlp_rules(spec),
        *tensors.expert_rules(spec, shared="shared_experts"),
    )
    return (
        Rule(source="lerope.alpha", target="rope_weights"),
        *(rule.renamed(_mistrals) for rule in rules),
    )


def _mistrals(name: str) -> str:
    for theirs, ours in _MISTRALS:
        name = name.replace(theirs, ours)
    return name


_NOTES = f"{deepseek.CHOSEN}; {ONE_TOKEN}"
_TEXT = Family(
    read=_spec,
    defaults={
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "qk_nope_head_dim": 64,
        "index_n_heads": 32,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 6144,
        "first_k_dense_replace": 1,
    },
    weight_rules=_rules,
    harmless=lambda spec: (*map(_mistrals, deepseek.harmless_tensors(spec)), "mtp_dspark.*", *_UNSERVED),
    models="Mistral Large 4, text saved alone",
    notes=_NOTES,
)
FAMILIES = {
    "MistralLarge4TextForCausalLM": _TEXT,
    "MistralLarge4ForConditionalGeneration": dataclasses.replace(
        _TEXT,
        read=lambda reader: text_part_from(reader, OF_IMAGES, _TEXT),
        defaults={},
        models="Mistral Large 4",
        notes=f"its text part; images are refused; {_NOTES}",
    ),
}
