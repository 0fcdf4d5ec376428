"""Keys that most decoders' config.json share, so that a family's file holds only its own.

A family calls `spec_from` with keyword arguments, which take the place of the values that are read here.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader, cache_groups, stored_dtype
from ferrum_jax.models.families.rope_reader import rope_from
from ferrum_jax.models.spec import AttentionSpec, CacheGroup, ExpertsSpec, MlpSpec, ModelSpec, NormSpec


def spec_from(reader: ConfigReader, **family: Any) -> ModelSpec:
    """ModelSpec of a config.json. Raises ValueError naming keys that are missing or not understood.

    Attention is the family's or `attention_from`, MLPs are gated, norms are RMSNorms before each half.
    """
    read: dict[str, Any] = {
        "vocab_size": reader.require("vocab_size"),
        "hidden_size": reader.require("hidden_size"),
        "num_hidden_layers": reader.require("num_hidden_layers"),
        "max_position_embeddings": reader.require("max_position_embeddings"),
        "tie_word_embeddings": reader.flag("tie_word_embeddings"),
        "dtype": stored_dtype(reader),
        "eos_token_ids": reader.token_ids("eos_token_id"),
    }
    for part, from_config in {"attention": attention_from, "mlp": mlp_from, "norm": norm_from}.items():
        if part not in family:
            read[part] = from_config(reader)
    spec = ModelSpec(architecture=reader.architecture, **read | family)
    reader.finish()
    return spec


def attention_from(reader: ConfigReader, *, biases: str = "", **family: Any) -> AttentionSpec:
    """The heads, as many of K and V as of q where the config is silent, and the rope, of whole heads.

    biases: the key that says whether q, k, v and o have some.
    """
    num_heads = reader.require("num_attention_heads")
    read: dict[str, Any] = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.get("num_key_value_heads", num_heads),
        "head_dim": reader.get("head_dim", reader.require("hidden_size") // num_heads),
    }
    if biases:
        read["bias"] = read["output_bias"] = reader.flag(biases)
    if "rope" not in family:
        read["rope"] = rope_from(reader)
    return AttentionSpec(**read | family)


def mlp_from(reader: ConfigReader, *, biases: str = "", **family: Any) -> MlpSpec:
    """The width, and the activation, which is SiLU where the config is silent. biases: the key that says of some."""
    if biases:
        family["bias"] = reader.flag(biases)
    if "hidden_act" not in family:
        family["hidden_act"] = reader.get("hidden_act", "silu")
    if "intermediate_size" not in family:
        family["intermediate_size"] = reader.require("intermediate_size")
    return MlpSpec(**family)


def norm_from(reader: ConfigReader, *, key: str = "rms_norm_eps", **family: Any) -> NormSpec:
    """RMSNorms, or what the family has, with the eps of the config under a key."""
    return NormSpec(eps=reader.get(key, 1e-6), **family)


def experts_from(reader: ConfigReader, num_experts: int, **family: Any) -> ExpertsSpec:
    """Experts of all layers, as wide as the config's MLPs, where the family does not say otherwise."""
    if "num_experts_per_tok" not in family:
        family["num_experts_per_tok"] = reader.get("num_experts_per_tok", 2)
    if "intermediate_size" not in family:
        family["intermediate_size"] = reader.require("intermediate_size")
    if "layers" not in family:
        family["layers"] = tuple(range(reader.require("num_hidden_layers")))
    return ExpertsSpec(num_experts=num_experts, **family)


def every_nth_full(reader: ConfigReader, period: int) -> list[str]:
    """layer_types; where the config is silent, one layer in this many attends to all, and the others to a window."""
    layers = range(reader.require("num_hidden_layers"))
    return reader.get(
        "layer_types", ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in layers]
    )


def windows_of(reader: ConfigReader, kinds: Sequence[str], window: int | None) -> tuple[CacheGroup, ...]:
    """The cache groups of layers of these kinds."""
    return cache_groups(kinds, reader.require("num_hidden_layers"), window)


def all_windowed(reader: ConfigReader, window: int | None) -> tuple[CacheGroup, ...]:
    """All layers with this window, or without one."""
    return windows_of(reader, ["sliding_attention"] * reader.require("num_hidden_layers"), window)


def still_where(is_so: Iterable[Any], attention: AttentionSpec, **changes: Any) -> Any:
    """other_attention of a model in which the layers for which it is so know no positions."""
    return ((layers_where(is_so), dataclasses.replace(attention, rope=None, **changes)),)


def layers_where(is_so: Iterable[Any]) -> tuple[int, ...]:
    """The layers for which it is so."""
    return tuple(layer for layer, is_it in enumerate(is_so) if is_it)


def layers_that_turn(reader: ConfigReader) -> list[int]:
    """A 1 for each layer that knows positions, and a 0 for others: every fourth where the config is silent."""
    period = reader.get("no_rope_layer_interval", 4)
    turns = [int((i + 1) % period != 0) for i in range(reader.require("num_hidden_layers"))]
    return reader.flags("no_rope_layers", turns)


def sparse_layers(reader: ConfigReader, num_dense: int) -> tuple[int, ...]:
    """The layers with experts: as mlp_layer_types says, or those behind the first. Raises ValueError for odd kinds."""
    num_layers = reader.require("num_hidden_layers")
    kinds = reader.get("mlp_layer_types", ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense))
    if len(kinds) != num_layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise ValueError(
            f"mlp_layer_types is {shown(kinds)}; it must name 'dense' or 'sparse' for each of {num_layers} layers"
        )
    return layers_where(kind == "sparse" for kind in kinds)


def hybrid_groups(
    kinds: Sequence[str],
    num_layers: int,
    *,
    attend: Sequence[str] = ("full_attention",),
    recur: Sequence[str] = ("linear_attention",),
    others: Sequence[str] = (),
) -> tuple[CacheGroup, ...]:
    """Layers that attend to all tokens, and those with a state, by what their kinds are called.

    others: kinds that have no cache. Raises ValueError for other kinds or another number.
    """
    known = (*attend, *recur, *others)
    if len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ValueError(f"layer_types is {shown(kinds)}; it must name one of {known} for each of {num_layers} layers")
    full, state = (layers_where(kind in names for kind in kinds) for names in (attend, recur))
    groups = (CacheGroup(kind="full", layers=full), CacheGroup(kind="state", layers=state))
    return tuple(group for group in groups if group.layers)
