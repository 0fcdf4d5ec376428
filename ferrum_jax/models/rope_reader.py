"""Reading rotary positions of a config.json, in the two spellings that are in use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.bounds import MOST_LISTED, check_number, shown
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.spec import RopeSpec

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


def rope_from(
    reader: ConfigReader,
    max_position_embeddings: int,
    *,
    default_theta: float = 10000.0,
    default_partial: float | None = None,
) -> RopeSpec:
    """RopeSpec from `rope_theta` with `rope_scaling`, or from `rope_parameters`; both spellings are in use.

    default_partial: partial_rotary_factor where the config is silent; None of families that always turn whole heads.
    """
    scaling, nested = (mapping(reader, key) for key in ("rope_scaling", "rope_parameters"))
    values = {key: value for key, value in (scaling or nested).items() if value is not None}
    outside = reader.get("rope_theta", None)
    theta = values.pop("rope_theta", nested.get("rope_theta", default_theta) if outside is None else outside)
    check_number("rope_theta", theta)
    spelled = values.pop("type", "default")
    rope_type = values.pop("rope_type", spelled)
    outside = reader.get("partial_rotary_factor", None)
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
    rope = _rope_spec(rope_type, float(theta), values, max_position_embeddings)
    return dataclasses.replace(rope, partial_rotary_factor=float(partial))


def ropes_by_kind(
    reader: ConfigReader,
    max_positions: int,
    *,
    default_theta: float,
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
    near, far = (ConfigReader({"rope_parameters": values}) for values in (local, full))
    return (
        rope_from(far, max_positions, default_partial=default_partial),
        rope_from(near, max_positions, default_partial=local_partial),
    )


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
        if not isinstance(value, list | tuple) or len(value) > MOST_LISTED:
            raise ValueError(f"{key} is {shown(value)}; it must be a list of numbers")
        for each in value:
            check_number(key, each)
    else:
        check_number(key, value)


def _rope_spec(rope_type: str, theta: float, values: dict[str, Any], max_position_embeddings: int) -> RopeSpec:
    if rope_type == "default":
        return RopeSpec(rope_theta=theta)
    original = int(values.get("original_max_position_embeddings", max_position_embeddings))
    if "factor" not in values and rope_type == "yarn":
        values["factor"] = max_position_embeddings / original
    if rope_type == "longrope":
        values.setdefault("factor", max(max_position_embeddings / original, 1.0))
    if rope_type == "proportional":
        values.setdefault("factor", 1.0)
    more = {"llama3": {"low_freq_factor", "high_freq_factor"}, "longrope": {"short_factor", "long_factor"}}
    missing = sorted(({"factor"} | more.get(rope_type, set())) - set(values))
    if missing:
        raise ValueError(f"rope scaling of type {rope_type!r} lacks {missing}")
    if rope_type in ("linear", "proportional"):
        return RopeSpec(rope_type=rope_type, rope_theta=theta, factor=float(values["factor"]))
    if rope_type == "dynamic":
        own = {"factor": float(values["factor"]), "original_max_position_embeddings": original}
        return RopeSpec(rope_type="dynamic", rope_theta=theta, **own)
    if rope_type == "llama3":
        return RopeSpec(
            rope_type="llama3",
            rope_theta=theta,
            factor=float(values["factor"]),
            original_max_position_embeddings=original,
            low_freq_factor=float(values["low_freq_factor"]),
            high_freq_factor=float(values["high_freq_factor"]),
        )
    if rope_type == "longrope":
        return RopeSpec(
            rope_type="longrope",
            rope_theta=theta,
            factor=float(values["factor"]),
            original_max_position_embeddings=original,
            attention_factor=_longrope_attention_factor(values, original),
            short_factor=tuple(map(float, values["short_factor"])),
            long_factor=tuple(map(float, values["long_factor"])),
            is_long=max_position_embeddings > original,
        )
    return RopeSpec(
        rope_type="yarn",
        rope_theta=theta,
        factor=float(values["factor"]),
        original_max_position_embeddings=original,
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_yarn_attention_factor(values),
    )


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
