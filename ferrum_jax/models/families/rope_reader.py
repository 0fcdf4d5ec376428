"""Reading rotary positions of a config.json, in the two spellings that are in use."""

import math
from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.families.bounds import MAX_LISTED, check_number, shown
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.spec import RopeSpec

_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "proportional": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
# Beside the factor; a silent yarn, longrope or proportional rope has one.
_NEEDED = {"llama3": {"low_freq_factor", "high_freq_factor"}, "longrope": {"short_factor", "long_factor"}}


def rope_from(
    reader: ConfigReader,
    max_positions: int | None = None,
    *,
    partial_rotary_factor: float | None = None,
    interleaved: bool = False,
) -> RopeSpec:
    """RopeSpec from `rope_theta` with `rope_scaling`, or from `rope_parameters`; both spellings are in use.

    max_positions: of the config where it is None. partial_rotary_factor: where the config is silent, if the family's
    defaults do not say; a family that has neither turns whole heads.
    """
    default_partial = reader.default("partial_rotary_factor", partial_rotary_factor)
    longest = reader.require("max_position_embeddings") if max_positions is None else max_positions
    scaling, nested = (mapping(reader, key) for key in ("rope_scaling", "rope_parameters"))
    values = {key: value for key, value in (scaling or nested).items() if value is not None}
    outside, silent = reader.said("rope_theta"), reader.default("rope_theta", 10000.0)
    theta = values.pop("rope_theta", nested.get("rope_theta", silent) if outside is None else outside)
    check_number("rope_theta", theta)
    spelled = values.pop("type", "default")
    rope_type = values.pop("rope_type", spelled)
    outside = reader.said("partial_rotary_factor")
    inside = nested.get("partial_rotary_factor", default_partial or 1.0)
    partial = values.pop("partial_rotary_factor", inside if outside is None else outside)
    check_number("partial_rotary_factor", partial)
    if default_partial is None and partial != 1:
        raise ValueError(f"partial_rotary_factor is {partial}; this architecture turns whole heads")
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise ValueError(f"rope scaling is of type {shown(rope_type, repr)}; supported are {tuple(_ROPE_KEYS)}")
    unknown = sorted(set(values) - set(_ROPE_KEYS[rope_type]))
    if unknown:
        raise ValueError(f"rope scaling of type {rope_type!r} has keys that are not understood: {unknown}")
    for key, value in values.items():
        _check_rope_value(key, value)
    own = _values_of(rope_type, values, longest)
    return RopeSpec(
        rope_type=rope_type,
        rope_theta=float(theta),
        partial_rotary_factor=float(partial),
        interleaved=interleaved,
        **own,
    )


def ropes_by_kind(
    reader: ConfigReader,
    *,
    default_theta: float = 10000.0,
    local_theta: float | None = None,
    default_partial: float | None = None,
    local_partial: float | None = None,
) -> tuple[RopeSpec, RopeSpec]:
    """Ropes of full and of windowed layers: from `rope_parameters` by kind, or from keys of the older spelling.

    Scaling in the older spelling is of full layers alone. local_theta: of windowed layers where the config is silent
    of theirs; None is the other's. default_partial, local_partial: of full and of windowed layers, as in `rope_from`.
    """
    by_kind = mapping(reader, "rope_parameters")
    unknown = sorted(set(by_kind) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"rope_parameters has {unknown}; known are 'full_attention' and 'sliding_attention'")
    for kind, values in by_kind.items():
        if not isinstance(values, Mapping | None):
            raise ValueError(f"rope_parameters has as {kind} {shown(values)}; it must be an object")
    theta = reader.get("rope_theta", default_theta)
    near = theta if local_theta is None else reader.get("rope_local_base_freq", local_theta)
    full = {"rope_theta": theta, **mapping(reader, "rope_scaling"), **(by_kind.get("full_attention") or {})}
    local = {"rope_theta": near, **(by_kind.get("sliding_attention") or {})}
    longest = reader.require("max_position_embeddings")
    far, near = (
        rope_from(ConfigReader({"rope_parameters": values}), longest, partial_rotary_factor=partial)
        for values, partial in ((full, default_partial), (local, local_partial))
    )
    return far, near


def mapping(reader: ConfigReader, key: str) -> dict[str, Any]:
    """The object under a key of rotary positions, empty when absent. Raises ValueError where it is none."""
    value = reader.get(key, None)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{key} is {shown(value, repr)}; it must be an object whose rope_type is one of {tuple(_ROPE_KEYS)}"
        )
    return dict(value)


def _check_rope_value(key: str, value: object) -> None:
    """Raises ValueError for a value that rotary positions cannot have under this key."""
    if key == "truncate":
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {shown(value)}; it must be true or false")
    elif key in ("short_factor", "long_factor"):
        if not isinstance(value, list | tuple) or len(value) > MAX_LISTED:
            raise ValueError(f"{key} is {shown(value)}; it must be a list of numbers")
        for each in value:
            check_number(key, each)
    else:
        check_number(key, value)


def _values_of(rope_type: str, values: dict[str, Any], longest: int) -> dict[str, Any]:
    """RopeSpec's fields of a type. longest: the context of the config, for what the values do not say."""
    if rope_type == "default":
        return {}
    original = int(values.get("original_max_position_embeddings", longest))
    silent = {"yarn": longest / original, "longrope": max(longest / original, 1.0), "proportional": 1.0}
    values = {"factor": silent[rope_type]} | values if rope_type in silent else values
    missing = sorted(({"factor"} | _NEEDED.get(rope_type, set())) - set(values))
    if missing:
        raise ValueError(f"rope scaling of type {rope_type!r} lacks {missing}")
    found: dict[str, Any] = {"factor": float(values["factor"])}
    if rope_type in ("linear", "proportional"):
        return found
    found["original_max_position_embeddings"] = original
    if rope_type == "llama3":
        return found | {key: float(values[key]) for key in ("low_freq_factor", "high_freq_factor")}
    if rope_type == "longrope":
        lists = {key: tuple(map(float, values[key])) for key in ("short_factor", "long_factor")}
        factor = _longrope_attention_factor(values, original)
        return found | lists | {"attention_factor": factor, "is_long": longest > original}
    if rope_type == "yarn":
        found["beta_fast"], found["beta_slow"] = (
            float(values.get("beta_fast") or 32),
            float(values.get("beta_slow") or 1),
        )
        found["truncate"] = bool(values.get("truncate", True))
        found["attention_factor"] = _yarn_attention_factor(values)
    return found


def _longrope_attention_factor(values: dict[str, Any], original: int) -> float:
    """sqrt(1 + ln(factor) / ln(original length)), or what the checkpoint says. Source: Phi-3's reference code."""
    if "attention_factor" in values:
        return float(values["attention_factor"])
    return math.sqrt(1 + math.log(values["factor"]) / math.log(original)) if values["factor"] > 1 else 1.0


def _yarn_attention_factor(values: dict[str, Any]) -> float:
    """0.1 ln(factor) + 1, or what the checkpoint says. Source: Peng et al. 2023, section 3.4."""
    if "attention_factor" in values:
        return float(values["attention_factor"])

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(values["factor"]) + 1.0 if values["factor"] > 1 else 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return magnitude(values["mscale"]) / magnitude(values["mscale_all_dim"])
    return magnitude(1.0)
