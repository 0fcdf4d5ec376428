"""Gemma4ForCausalLM and Gemma4ForConditionalGeneration, which sees images and may hear sounds.

Gemma 3's decoder, whose norms multiply by their weight. Full layers have heads of another size and number, may make V
of the key's projection, and turn the first pairs of a head. Late layers attend to the keys and values of the last layer
of their kind that has some. The E models give each layer an input of its own; the 26B-A4B has experts beside its MLPs,
each half with norms of its own. Tokens of images and sounds have the embeddings of a tower; in the
large models those of images attend to all of their image in layers with a window.
Source: Gemma Team 2026 (Gemma 4); keys and defaults as in Hugging Face's Gemma4TextConfig.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from checkpoints.rules import Rule
from ferrum_jax.models.families import gemma4_sound, gemma4_vision, plain, tensors
from ferrum_jax.models.families.bounds import check_number, shown
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.rope_reader import mapping, ropes_by_kind
from ferrum_jax.models.families.text_part import text_part_from, with_towers
from ferrum_jax.models.spec import AttentionSpec, ExpertsSpec, LayerInputSpec, MlpSpec, ModelSpec, QkNorm

_ROPES = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}
# Keys of Gemma4ForConditionalGeneration that concern images and sounds alone.
_OF_OTHERS = (
    *("vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id"),
    *("boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id", "vision_soft_tokens_per_image"),
)
_OF_NORMED_EXPERTS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp.shared_norm": "pre_feedforward_layernorm",
    "mlp.shared_out_norm": "post_feedforward_layernorm_1",
    "mlp.experts_norm": "pre_feedforward_layernorm_2",
    "mlp.experts_out_norm": "post_feedforward_layernorm_2",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def _spec(reader: ConfigReader) -> ModelSpec:
    if reader.nullable("use_bidirectional_attention", None) not in (None, "vision"):  # between tokens of an image alone
        raise ValueError("use_bidirectional_attention is not 'vision'; a decoder here attends to the past alone")
    pad = reader.nullable("pad_token_id", 0)
    reader.only(vocab_size_per_layer_input=reader.require("vocab_size"), attention_bias=False)
    kinds = [*plain.every_nth_full(reader, 6)[:-1], "full_attention"]  # whatever it says of the last
    groups = plain.windows_of(reader, kinds, reader.get("sliding_window", 512))
    borrowed = _borrowed(kinds, reader.get("num_kv_shared_layers", 0))
    full, local = _attention(reader, plain.layers_where(kind == "full_attention" for kind in kinds))
    borrowers = tuple(layer for layer, _ in borrowed)
    own = (dataclasses.replace(group, layers=tuple(i for i in group.layers if i not in borrowers)) for group in groups)
    mlp = plain.mlp_from(reader, hidden_act=reader.get("hidden_activation", "gelu_pytorch_tanh"))
    doubled = borrowers if reader.get("use_double_wide_mlp", False) else ()
    wide = dataclasses.replace(mlp, intermediate_size=2 * mlp.intermediate_size)
    size = reader.nullable("hidden_size_per_layer_input", 256)
    return plain.spec_from(
        reader,
        attention=full,
        other_attention=((plain.layers_where(kind != "full_attention" for kind in kinds), local),),
        mlp=mlp,
        other_mlp=((doubled, wide),) if doubled else (),
        experts=_experts(reader, mlp),
        norm=plain.norm_from(reader, rounds_once=True, after=True),
        layer_inputs=LayerInputSpec(size=size, hidden_act=mlp.hidden_act, image_id=pad or 0) if size else None,
        layer_scales=True,
        embedding_scale=reader.require("hidden_size") ** 0.5,
        cache_groups=tuple(own),
        borrowed=borrowed,
        final_logit_softcapping=reader.nullable("final_logit_softcapping", None),
    )


def _borrowed(kinds: Sequence[str], count: int) -> tuple[tuple[int, int], ...]:
    """Each of the last `count` layers, with the last layer of its kind before them."""
    first = len(kinds) - count
    last = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    without = sorted(set(kinds) - set(last))
    if count and without:
        raise ValueError(
            f"num_kv_shared_layers is {count} of {len(kinds)} layers; before them there is no layer of {without}, "
            "whose keys and values they would share"
        )
    return tuple((layer, last[kind]) for layer, kind in enumerate(kinds) if layer >= first)


def _attention(reader: ConfigReader, full_layers: Sequence[int]) -> tuple[AttentionSpec, AttentionSpec]:
    """Attention of full layers and of those with a window."""
    far, near = ropes_by_kind(reader, local_theta=1e4, default_partial=1.0)
    if far.rope_type == "default" and far.partial_rotary_factor != 1:
        raise ValueError("partial_rotary_factor is of a rope of type 'proportional' here, not 'default'")
    local = plain.attention_from(reader, qk_norm=QkNorm(), v_norm=True, query_pre_attn_scalar=1.0, rope=near)
    shares_projection = reader.flag("attention_k_eq_v")
    said = _heads_of_full(reader, full_layers)
    num_kv_heads = reader.get("num_global_key_value_heads", None) if shares_projection else None
    reader.get("num_global_key_value_heads", None)  # which counts where they share it
    return (
        dataclasses.replace(
            local,
            head_dim=said.get("head_dim", reader.get("global_head_dim", 512)),
            num_key_value_heads=said.get("num_key_value_heads", num_kv_heads or local.num_key_value_heads),
            value_of_key=shares_projection,
            rope=far,
        ),
        local,
    )


def _heads_of_full(reader: ConfigReader, full_layers: Sequence[int]) -> dict[str, int]:
    """Heads of full layers, all alike, as per_layer_config spells them in newer files."""
    by_layer = mapping(reader, "per_layer_config")
    if not by_layer:
        return {}
    said = [by_layer[key] for key in sorted(by_layer)]
    alike = {str(i) for i in full_layers} == set(map(str, by_layer)) and all(each == said[0] for each in said)
    if not alike or not isinstance(said[0], Mapping) or not set(said[0]) <= {"head_dim", "num_key_value_heads"}:
        raise ValueError(
            f"per_layer_config is {shown(by_layer)}; it must give head_dim or num_key_value_heads to the full layers "
            f"{list(full_layers)}, the same to each, and nothing to others"
        )
    for key, value in said[0].items():
        check_number(key, value)
    return {key: int(value) for key, value in said[0].items()}


def _experts(reader: ConfigReader, mlp: MlpSpec) -> ExpertsSpec | None:
    """Experts beside every layer's MLP, which is as one that all tokens go to."""
    sizes = {key: reader.get(key, None) for key in ("num_experts", "top_k_experts", "moe_intermediate_size")}
    if not reader.get("enable_moe_block", False):
        return None
    missing = [key for key, value in sizes.items() if value is None]
    if missing:
        raise ValueError(f"enable_moe_block is true and config.json has no {', '.join(missing)}")
    return plain.experts_from(
        reader,
        sizes["num_experts"],
        num_experts_per_tok=sizes["top_k_experts"],
        intermediate_size=sizes["moe_intermediate_size"],
        norm_topk_prob=True,
        shared_intermediate_size=mlp.intermediate_size,
        shared_gate=False,
        own_norms=True,
    )


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    every = tuple(range(spec.num_hidden_layers))
    norms = tensors.BOTH if spec.experts is None else _OF_NORMED_EXPERTS
    return (
        *tensors.frame_rules(spec, norms),
        *tensors.attention_rules(spec),
        *tensors.mlp_rules(spec),
        *_expert_rules(spec),
        *_input_rules(spec),
        *tensors.per_layer("layer_scalar", "scale", every),
    )


def _expert_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Routers, experts, which are stacked, gate by up, and the MLP beside them."""
    if spec.experts is None:
        return ()
    scales = {"router.scale": "mlp.router_scale", "router.per_expert_scale": "mlp.expert_scales"}
    return (
        *tensors.in_layers(scales, spec.experts.layers),
        *tensors.stacked_expert_rules(
            spec.experts, "experts.gate_up_proj", "experts.down_proj", router="router.proj.weight"
        ),
        *tensors.shared_expert_rules(spec.experts, "mlp"),
    )


def _input_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Weights that make the layers' inputs, and each layer's weights for its own."""
    if spec.layer_inputs is None:
        return ()
    of_model = {
        "embed_tokens_per_layer.weight": "embed",
        "per_layer_model_projection.weight": "projection.weight",
        "per_layer_projection_norm.weight": "norm.weight",
    }
    of_layer = {
        "per_layer_input_gate": "own_input.gate",
        "per_layer_projection": "own_input.projection",
        "post_per_layer_input_norm": "own_input_norm",
    }
    return (
        *tensors.named_rules("model.", "layer_inputs.", of_model),
        *tensors.in_layers(of_layer, tuple(range(spec.num_hidden_layers)), tensors.WEIGHT),
    )


def _harmless(spec: ModelSpec) -> tuple[str, ...]:
    """The decoder's, and what layers without keys and values of their own may bring along for these."""
    unused = (f"model.layers.{layer}.self_attn.{part}.weight" for layer, _ in spec.borrowed for part in _OF_LENDERS)
    return (*tensors.harmless_tensors(spec), *unused)


_OF_LENDERS = ("k_proj", "v_proj", "k_norm", "v_norm")


def _whole(reader: ConfigReader) -> ModelSpec:
    """A Gemma 4 that sees images with a `vision_config`, and hears sounds with an `audio_config`."""
    spec, config = text_part_from(reader, _OF_OTHERS, _TEXT), reader.config
    vision = sound = None
    if config.get("vision_config"):
        both_ways = config["text_config"].get("use_bidirectional_attention") == "vision"
        vision = gemma4_vision.vision_spec_from(config["vision_config"], spec.hidden_size, windows_see_whole=both_ways)
    if config.get("audio_config"):
        sound = gemma4_sound.sound_spec_from(config["audio_config"], spec.hidden_size)
    return dataclasses.replace(spec, vision=vision, sound=sound)


_SAID = "Gemma 4: E2B, E4B, 31B, 26B-A4B"
_TEXT = Family(
    read=_spec,
    defaults={
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    respell=lambda config: {**config, "rope_parameters": config.get("rope_parameters") or _ROPES},
    weight_rules=_rules,
    harmless=_harmless,
    models=f"{_SAID}, text saved alone",
)
FAMILIES = {
    "Gemma4ForCausalLM": _TEXT,
    "Gemma4ForConditionalGeneration": with_towers(
        _TEXT,
        _whole,
        gemma4_vision.tower_rules,
        of_tower=("model.vision_tower.*", "model.embed_vision.*"),
        sound_rules=gemma4_sound.tower_rules,
        of_sounds=("model.audio_tower.*", "model.embed_audio.*"),
        models=_SAID,
        notes="[images of any size and videos](../guides/images.md); E2B and E4B "
        "[with sounds](../guides/sounds.md#sounds-in-prompts)",
    ),
}
