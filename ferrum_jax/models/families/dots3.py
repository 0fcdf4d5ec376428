"""Dots3NoteForCausalLM, and the text part of Dots3NoteForConditionalGeneration (dots3-note).

DeepSeek-V3's latent attention and experts. Some layers have an indexer; the others attend to a window, and have heads
and latents of other sizes. Behind their norms latents are multiplied by the root of the model's width over their size,
the key that heads share is normed before it turns, and each head's output goes through a gate.
Source: Dots Studio 2026 (dots3-note); keys and defaults as in Hugging Face's Dots3NoteTextConfig, and as published.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models.families import deepseek, tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import ONE_TOKEN, Family
from ferrum_jax.models.families.plain import layers_where, sparse_layers, spec_from, windows_of
from ferrum_jax.models.families.rope_reader import mapping, rope_from
from ferrum_jax.models.families.text_part import text_part_from
from ferrum_jax.models.spec import AttentionSpec, IndexerSpec, ModelSpec, RopeSpec

_OF_OTHERS = ("vision_config", "audio_config", "image_token_id", "video_token_id", "audio_token_id")
_TOWERS = ("vision_encoder.*", "audio_encoder.*", "audio_adapter.*", "model.vision_tower.*", "model.audio_tower.*")
# Sizes of layers with a window, which published configs say with "swa_" before them, and the reference's by layer.
_WINDOWED = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
_THETAS = {"indexed_attention": ("rope_theta", 8e7), "sliding_attention": ("swa_rope_theta", 5e4)}


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(scoring_func="sigmoid", topk_method="noaux_tc", ep_size=1, mlp_bias=False, use_dsa=True)
    reader.only(moe_layer_freq=1)
    reader.leave("num_nextn_predict_layers", "num_mtp_layers")  # of layers behind the last
    kinds = _kinds(reader)
    windowed = layers_where(kind == "sliding_attention" for kind in kinds)
    far, near = _attention(reader)
    sparse = sparse_layers(reader, reader.get("first_k_dense_replace", 1))
    width = reader.get("shared_experts_intermediate_size", reader.get("moe_shared_expert_intermediate_size", 1536))
    shared = width * reader.get("n_shared_experts", 1)
    return spec_from(
        reader,
        attention=far,
        other_attention=((windowed, near),) if windowed else (),
        experts=deepseek.experts_from(reader, sparse, shared_intermediate_size=shared),
        cache_groups=windows_of(reader, kinds, reader.get("sliding_window", reader.get("sliding_window_size", 512))),
    )


def _kinds(reader: ConfigReader) -> list[str]:
    """The kind of each layer: "full_attention", where it has an indexer, or "sliding_attention"."""
    slide = reader.flag("use_sliding_window", True)
    layers = range(reader.require("num_hidden_layers"))
    silent = ["sliding_attention" if slide and i > 1 and i % 4 != 1 else "indexed_attention" for i in layers]
    kinds = reader.get("layer_types", silent)
    if "full_attention" in kinds:
        raise ValueError(f"layer_types is {shown(kinds)}; 'full_attention', all keys without an indexer, is not served")
    return ["full_attention" if kind == "indexed_attention" else kind for kind in kinds]


def _attention(reader: ConfigReader) -> tuple[AttentionSpec, AttentionSpec]:
    """Attention of layers with an indexer, and of layers with a window."""
    indexer = deepseek.indexer_from(reader, of_all=False, interleaved=True)
    own: dict[str, Any] = {key: reader.get(f"swa_{key}", silent) for key, silent in _WINDOWED.items()}
    own["qk_rope_head_dim"] = reader.get("swa_qk_rope_head_dim", own["head_dim"] - own["qk_nope_head_dim"])
    own |= {"attention_bias": reader.flag("attention_bias"), "rms_norm_eps": reader.get("rms_norm_eps", 1e-5)}
    far, near = _ropes(reader)
    return _layer(reader, far, indexer), _layer(ConfigReader(own), near, None)


def _layer(reader: ConfigReader, rope: RopeSpec, indexer: IndexerSpec | None) -> AttentionSpec:
    own = deepseek.latent_attention_from(reader, rope=rope, indexer=indexer, head_gate=True)
    assert own.latent is not None
    if own.latent.q_lora_rank is None:
        raise ValueError("q_lora_rank is null; of this architecture queries are made of a latent")
    latent = dataclasses.replace(own.latent, norm_eps=reader.get("rms_norm_eps", 1e-5), rooted=True, shared_norm=True)
    return dataclasses.replace(own, latent=latent)


def _ropes(reader: ConfigReader) -> tuple[RopeSpec, RopeSpec]:
    """The ropes of layers with an indexer and of those with a window; sizes say how much of a head turns."""
    by_kind, longest = mapping(reader, "rope_parameters"), reader.require("max_position_embeddings")
    unknown = sorted(set(by_kind) - set(_THETAS))
    if unknown or not all(isinstance(values, Mapping) for values in by_kind.values()):
        raise ValueError(
            f"rope_parameters is {shown(by_kind)}; it must have an object for each of {sorted(_THETAS)}, and no other"
        )
    ropes = []
    for kind, (key, silent) in _THETAS.items():
        values = {"rope_theta": reader.get(key, silent), **by_kind.get(kind, {})}
        values.pop("partial_rotary_factor", None)
        ropes.append(rope_from(ConfigReader({"rope_parameters": values}), longest))
    return ropes[0], ropes[1]


def _with_one_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the sizes of windowed layers as published ones say them, and kinds of layers as the reference.

    Raises ValueError where per_layer_config says other things.
    """
    found = {key: value for key, value in config.items() if value is not None}
    by_layer = found.pop("per_layer_config", None)
    kinds = found.get("layer_types")
    if by_layer is None:
        if isinstance(kinds, list | tuple):
            found["layer_types"] = ["indexed_attention" if kind == "full_attention" else kind for kind in kinds]
    else:
        found |= {f"swa_{key}": value for key, value in _of_windowed(by_layer, found).items()}
    flags = found.get("moe_layer_freq")
    if isinstance(flags, list | tuple):
        found["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in flags]
        del found["moe_layer_freq"]
    return found


def _of_windowed(by_layer: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of attention in layers with a window, of per_layer_config and of the config."""
    kinds = config.get("layer_types")
    windowed = [
        i for i, kind in enumerate(kinds if isinstance(kinds, list | tuple) else ()) if kind == "sliding_attention"
    ]
    said: list[Any] = list(by_layer.values()) if isinstance(by_layer, Mapping) else [None]
    numbers = [str(key) for key in by_layer] if isinstance(by_layer, Mapping) else []
    known = {*_WINDOWED, "qk_rope_head_dim"}
    are_alike = all(isinstance(each, Mapping) and each == said[0] and set(each) <= known for each in said)
    if not are_alike or not all(n.isdecimal() for n in numbers) or sorted(map(int, numbers)) != windowed:
        raise ValueError(
            f"per_layer_config is {shown(by_layer)}; it must give the layers of layer_types that are "
            f"'sliding_attention', {windowed}, sizes of attention, the same to each, and nothing to others"
        )
    own = {**config, **(said[0] if said else {})}
    return {key: own[key] for key in known if key in own}


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    layers = spec.attention_layers
    return (
        *deepseek.weight_rules(spec),
        *tensors.linear("self_attn.g_proj", "attention.gate_heads", layers, bias=False),
        *tensors.per_layer("self_attn.k_rope_only_layernorm.weight", "attention.shared_norm.weight", layers),
    )


def _whole(reader: ConfigReader) -> ModelSpec:
    """The text part, which published configs have beside what concerns images and sounds, and the reference's under
    text_config."""
    if reader.config.get("text_config"):
        return text_part_from(reader, _OF_OTHERS, _TEXT)
    reader.leave(*_OF_OTHERS)
    return _spec(reader)


_NOTES = f"{deepseek.CHOSEN}; {ONE_TOKEN}"
_TEXT = Family(
    read=_spec,
    defaults={
        "max_position_embeddings": 524288,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 1024,
        "moe_intermediate_size": 1536,
    },
    respell=_with_one_spelling,
    weight_rules=_rules,
    harmless=lambda spec: (*deepseek.harmless_tensors(spec), "model.mtp.*"),
    models="dots3-note, text saved alone",
    notes=_NOTES,
)
FAMILIES = {
    "Dots3NoteForCausalLM": _TEXT,
    "Dots3NoteForConditionalGeneration": dataclasses.replace(
        _TEXT,
        read=_whole,
        respell=lambda config: dict(config) if config.get("text_config") else _with_one_spelling(config),
        harmless=lambda spec: (*_TEXT.harmless(spec), *_TOWERS),
        models="dots3-note",
        notes=f"its text part; images, videos and sounds are refused; {_NOTES}",
    ),
}
