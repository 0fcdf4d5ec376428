"""GlmMoeDsaForCausalLM (GLM-5): DeepSeek-V3.2's latent attention and experts, and layers that share an indexer.

A layer whose type is "shared" attends to the keys that the last indexer before it chose. Pairs of an indexer that turn
are neighbours.
Source: Zhipu AI 2026 (GLM-5); keys as in Hugging Face's config.
"""

import dataclasses

from ferrum_jax.models.families import deepseek
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import ONE_TOKEN
from ferrum_jax.models.families.plain import spec_from
from ferrum_jax.models.spec import AttentionSpec, ModelSpec

_LETTERS = {"F": "full", "S": "shared"}


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, ep_size=1, mlp_bias=False)
    reader.only(indexer_rope_interleave=True, moe_router_dtype="float32")
    # of layers behind the last
    reader.leave("num_nextn_predict_layers", "num_mtp_layers", "index_share_for_mtp_iteration")
    experts = deepseek.experts_from(reader, deepseek.with_experts(reader))
    attention = deepseek.latent_attention_from(reader, indexer=deepseek.indexer_from(reader, interleaved=True))
    other = sharing(attention, shared_from(reader))
    return spec_from(reader, attention=attention, other_attention=other, experts=experts)


def shared_from(reader: ConfigReader) -> tuple[int, ...]:
    """The layers that have no indexer of their own. Raises ValueError where the first is one."""
    count = reader.require("num_hidden_layers")
    every, offset = max(reader.get("index_topk_freq", 1), 1), reader.get("index_skip_topk_offset", 2)
    kinds = ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(count)]
    said = "index_topk_freq and index_skip_topk_offset"
    for key in ("index_topk_pattern", "indexer_types"):  # the last that is there counts
        if (found := reader.said(key)) is not None:
            said, kinds = f"{key} is {shown(found)}, and", found
    if not isinstance(kinds, str | list | tuple) or len(kinds) != count:
        raise ValueError(f"{said} must name one of 'full' (F) and 'shared' (S) for each of {count} layers")
    kinds = [_LETTERS.get(str(kind), kind) for kind in kinds]
    if not set(map(str, kinds)) <= {"full", "shared"} or kinds[0] != "full":
        raise ValueError(f"{said} must say 'full' or 'shared' of a layer, and 'full' of the first")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "shared")


def sharing(attention: AttentionSpec, layers: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], AttentionSpec], ...]:
    """`ModelSpec.other_attention` where these layers take the keys that the last indexer before them chose."""
    assert attention.indexer is not None
    indexer = dataclasses.replace(attention.indexer, shared=True)
    return ((layers, dataclasses.replace(attention, indexer=indexer)),) if layers else ()


FAMILIES = {
    "GlmMoeDsaForCausalLM": deepseek.family(
        read=_spec,
        defaults={
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "index_n_heads": 32,
            "routed_scaling_factor": 2.5,
        },
        models="GLM-5",
        notes=f"{deepseek.CHOSEN}; {ONE_TOKEN}",
    )
}
