"""The texts of specs that fingerprints digest; equal specs give equal text.

A field stands in the text where its value is not its default. So a new field leaves the texts of all models without it
as they are, and with them their fingerprints: journals and saved prefixes of earlier versions stay valid. Some fields
of the first versions stand there always. These are listed here, and no field is ever added to the lists.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

Lists = Mapping[str, str]  # names of fields, with blanks between, by their class

_ROPE = (
    "rope_type rope_theta partial_rotary_factor interleaved factor original_max_position_embeddings low_freq_factor "
    "high_freq_factor beta_fast beta_slow truncate attention_factor short_factor long_factor is_long"
)
_FORM = "group scale_dtype has_zeros has_order activations activation_group has_input_scale"
_ALWAYS: Lists = {
    "AttentionSpec": "bias output_bias qk_norm gate sinks query_pre_attn_scalar attn_logit_softcapping rope "
    "temperature",
    "CacheGroup": "window",
    "ExpertsSpec": "scoring corrected num_groups num_chosen_groups norm_topk_prob routed_scaling_factor weighs_inputs "
    "shared_intermediate_size shared_gate bias",
    "IndexerSpec": "interleaved shared",
    "KimiDeltaSpec": "low_rank decay_bound flat_rates",
    "LatentSpec": "q_lora_rank",
    "Mamba2Spec": "conv_bias norm step_limit multipliers",
    "MlpSpec": "hidden_act bias gated swiglu_limit swiglu_alpha",
    "ModelSpec": "other_attention experts recurrence norm parallel embedding_scale residual_multiplier logit_scale "
    "tie_word_embeddings final_logit_softcapping cache_groups",
    "NormSpec": "kind eps bias zero_centred before after",
    "QkNorm": "over_all_heads after_rope has_weight",
    "RopeSpec": _ROPE,
    "SoundSpec": "num_readers hidden_act tower",
    "Temperature": "offset",
    "VisionSpec": "num_positions deepstack hidden_act rope_theta",
    "WeightForm": _FORM,
}
# An earlier version wrote two more: its fingerprints are accepted too (docs/decisions/0121-digests-of-specs.md).
_ONCE: Lists = {**_ALWAYS, "RopeSpec": f"{_ROPE} longest", "WeightForm": f"{_FORM} has_power_scales"}
_ENCODERS: Lists = {
    "BertSpec": "scorer",
    "ModernBertSpec": "scorer",
    "RopeSpec": f"{_ROPE} sections",
}


def model_text(spec: Any, *, once: bool = False) -> str:
    """Canonical JSON of a decoder's spec. once: as the earlier version wrote it."""
    return json.dumps(_tree(spec, _ONCE if once else _ALWAYS), sort_keys=True, separators=(",", ":"))


def encoder_text(spec: Any, *, once: bool = False) -> str:
    """The repr of an encoder's spec. once: as the earlier version wrote it, with every field."""
    return repr(spec) if once else _repr(spec)


def _kept(spec: Any, always: Lists) -> dict[str, Any]:
    """The values of the fields that stand in a text, in their order."""
    written, found = always.get(type(spec).__name__, "").split(), dict[str, Any]()
    for field in dataclasses.fields(spec):
        make, value = field.default_factory, getattr(spec, field.name)
        default = field.default if make is dataclasses.MISSING else make()
        if field.name in written or value != default:
            found[field.name] = value
    return found


def _tree(value: Any, always: Lists) -> Any:
    if isinstance(value, tuple):
        return [_tree(each, always) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {name: _tree(each, always) for name, each in _kept(value, always).items()}


def _repr(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_repr, value))}{',' * (len(value) == 1)})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = ", ".join(f"{name}={_repr(each)}" for name, each in _kept(value, _ENCODERS).items())
    return f"{type(value).__qualname__}({fields})"
