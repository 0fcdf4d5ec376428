"""Reading a config.json so that nothing in it is silently ignored.

A key is either read by the family, or in the table of keys that change nothing here, or refused by name.
A key whose value is null or an empty list or dict counts as absent, as in the reference implementation.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.spec import CacheGroup, RopeSpec

# Keys that do not change a token's logits: book-keeping, training, and defaults of generation (which an engine
# takes from generation_config.json or the request).
HARMLESS_KEYS = frozenset(
    """
    architectures model_type transformers_version _name_or_path name_or_path torch_dtype dtype use_cache
    initializer_range attention_dropout router_aux_loss_coef router_jitter_noise
    resid_pdrop embd_pdrop auto_map is_llama_config transformers.js_config max_sequence_length
    output_router_logits pretraining_tp cache_implementation
    bos_token_id pad_token_id eos_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    task_specific_params
    return_dict output_hidden_states output_attentions torchscript chunk_size_feed_forward is_encoder_decoder is_decoder
    add_cross_attention cross_attention_hidden_size tie_encoder_decoder finetuning_task id2label label2id num_labels
    problem_type use_bfloat16 tf_legacy_loss bad_words_ids begin_suppress_tokens suppress_tokens
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    do_sample temperature top_k top_p typical_p min_length max_length num_beams num_beam_groups num_return_sequences
    diversity_penalty early_stopping length_penalty repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size output_scores return_dict_in_generate
    """.split()  # noqa: SIM905
)
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}


_KINDS: Mapping[type, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    str: (str, "a string"),
    list: (list | tuple, "a list"),
    dict: (Mapping, "an object"),
}


class ConfigReader:
    """Hands out the values of a config and remembers which keys were asked for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._values = {key: value for key, value in config.items() if value not in (None, [], {})}
        self._nulls = {key for key, value in config.items() if value is None}
        self._read: set[str] = set()

    def get(self, key: str, default: Any) -> Any:
        """The value of key, or default where it is absent, null or empty.

        Raises ValueError for a value of another type than the default's; one of None takes all.
        """
        self._read.add(key)
        value = self._values.get(key, default)
        kinds, what = _KINDS.get(type(default), (object, ""))
        if not isinstance(value, kinds) or (isinstance(value, bool) and type(default) in (int, float)):
            raise ValueError(f"{key} is {json.dumps(value)}; it must be {what}")
        return value

    def nullable(self, key: str, default: Any) -> Any:
        """The value of key, None where it is null, and default where it is absent: for keys whose null means none."""
        return None if key in self._nulls else self.get(key, default)

    def require(self, key: str, like: Any = 0) -> Any:
        """The value of key, of the type of `like`. Raises ValueError when it is absent or of another."""
        if key not in self._values:
            raise ValueError(f"config.json has no {key!r}, which this architecture needs")
        return self.get(key, like)

    def only(self, **values: Any) -> None:
        """Raises ValueError where the config has one of these keys with another value than the one a family knows."""
        for key, value in values.items():
            if self.get(key, value) != value:
                raise ValueError(
                    f"{key} is {json.dumps(self.get(key, value))}; of this architecture it must be {json.dumps(value)}"
                )

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple; empty when absent. Raises ValueError for anything else."""
        value = self.get(key, ())
        ids = value if isinstance(value, list | tuple) else (value,)
        if any(type(i) is not int or i < 0 for i in ids):
            raise ValueError(f"{key} is {value!r}; it must be a token id or a list of them")
        return tuple(ids)

    def finish(self) -> None:
        """Raises one ValueError that names every key nobody understood."""
        unknown = sorted(set(self._values) - self._read - HARMLESS_KEYS)
        if unknown:
            pairs = ", ".join(f"{key} = {self._values[key]!r}" for key in unknown)
            raise ValueError(
                f"config.json has keys that this architecture does not understand: {pairs}. They may change the "
                "result, so they are not ignored; remove them if they do not matter for this model"
            )


def cache_groups(kinds: Sequence[str], num_layers: int, window: int | None) -> tuple[CacheGroup, ...]:
    """The layers that attend to all tokens and those that attend to a sliding window, each where there are any.

    kinds: of each layer, as in layer_types; without a window all attend to all. Raises ValueError for other kinds and
    for another number of them.
    """
    odd = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if odd:
        raise ValueError(f"layer_types has {odd}; known are 'full_attention' and 'sliding_attention'")
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, and num_hidden_layers is {num_layers}")
    slides = [window is not None and kind == "sliding_attention" for kind in kinds]
    if any(slides) and (type(window) is not int or window < 1):
        raise ValueError(
            f"sliding_window is {json.dumps(window)}; it must be a whole number, 1 or more, or null for none"
        )
    full = tuple(layer for layer, does in enumerate(slides) if not does)
    windowed = tuple(layer for layer, does in enumerate(slides) if does)
    groups = (CacheGroup(kind="full", layers=full), CacheGroup(kind="window", layers=windowed, window=window))
    return tuple(group for group in groups if group.layers)


def window_within(reader: ConfigReader, longest: int, default: int | None = None) -> int | None:
    """The sliding window; None where the config says null, or one that is as long as the longest context."""
    window = reader.nullable("sliding_window", default)
    return None if window is None or window >= longest else window


def stored_dtype(reader: ConfigReader) -> str:
    """The dtype a checkpoint says it is stored in; float32 where it is silent."""
    return str(reader.get("dtype", reader.get("torch_dtype", "float32"))).removeprefix("torch.")


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
    outside = reader.get("rope_theta", 0.0) or nested.get("rope_theta", default_theta)
    theta = values.pop("rope_theta", outside)
    spelled = values.pop("type", "default")
    rope_type = values.pop("rope_type", spelled)
    factor = nested.get("partial_rotary_factor", default_partial or 1.0)
    partial = float(values.pop("partial_rotary_factor", reader.get("partial_rotary_factor", 0.0) or factor))
    if default_partial is None and partial != 1:
        raise ValueError(f"partial_rotary_factor is {partial}; this architecture turns whole heads")
    if rope_type not in _ROPE_KEYS:
        raise ValueError(f"rope scaling is of type {rope_type!r}; supported are {tuple(_ROPE_KEYS)}")
    unknown = sorted(set(values) - set(_ROPE_KEYS[rope_type]))
    if unknown:
        raise ValueError(f"rope scaling of type {rope_type!r} has keys that are not understood: {unknown}")
    rope = _rope_spec(rope_type, float(theta), values, max_position_embeddings)
    return dataclasses.replace(rope, partial_rotary_factor=partial)


def mapping(reader: ConfigReader, key: str) -> dict[str, Any]:
    """The object under a key of rotary positions, empty when absent. Raises ValueError where it is none."""
    value = reader.get(key, None)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r}; it must be an object whose rope_type is one of {tuple(_ROPE_KEYS)}")
    return dict(value)


def _rope_spec(rope_type: str, theta: float, values: dict[str, Any], max_position_embeddings: int) -> RopeSpec:
    if rope_type == "default":
        return RopeSpec(rope_theta=theta)
    original = int(values.get("original_max_position_embeddings", max_position_embeddings))
    if "factor" not in values and rope_type == "yarn":
        values["factor"] = max_position_embeddings / original
    if rope_type == "longrope":
        values.setdefault("factor", max(max_position_embeddings / original, 1.0))
    more = {"llama3": {"low_freq_factor", "high_freq_factor"}, "longrope": {"short_factor", "long_factor"}}
    missing = sorted(({"factor"} | more.get(rope_type, set())) - set(values))
    if missing:
        raise ValueError(f"rope scaling of type {rope_type!r} lacks {missing}")
    if rope_type == "linear":
        return RopeSpec(rope_type="linear", rope_theta=theta, factor=float(values["factor"]))
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
