"""adapter_config.json: the ranks and scales of a LoRA that PEFT saved, and what of PEFT is refused by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from checkpoints.names.patterns import Pattern
from ferrum_jax.io.error_text import Elsewhere, quoted
from ferrum_jax.io.error_text.known_fields import NAMES, FieldKind, Fields, Known, one_of

CONFIG = "adapter_config.json"
_MOST = 3e38  # of a rank or an alpha: scales are float32
_MERGE = "merge it with PEFT and load the merged model"
_UNKNOWN_TENSORS = (
    *("lora_bias", "fan_in_fan_out", "use_dora", "use_qalora", "use_bdlora", "layer_replication"),
    *("trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config"),
    *("monteclora_config", "megatron_config"),
)
_BIASES = ("none", "all", "lora_only")  # which of the base's were trained and saved
# They change the base's weights, so that the tensors alone say too little.
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_RANK = FieldKind(lambda value: type(value) is int and 0 < value < _MOST, "a whole number above 0")
_ALPHA = FieldKind(lambda value: type(value) in (int, float) and 0 < value < _MOST, "a number above 0")
_NUMBERS = FieldKind(lambda value: isinstance(value, dict), "an object of names and numbers")
_EMPTY = (None, "", [], {})
# In the keys that are not read, the values under which the tensors mean what they do without them.
_FIELDS = Fields(
    {
        **{name: Elsewhere((*_EMPTY, False, 0), _MERGE) for name in _UNKNOWN_TENSORS},
        "peft_type": Elsewhere((*_EMPTY, "LORA"), _MERGE),
        "bias": Known(one_of(*_BIASES), "none"),
        "modules_to_save": Known(NAMES, []),
        "r": Known(_RANK),
        "lora_alpha": Known(_ALPHA),
        "rank_pattern": Known(_NUMBERS, {}),
        "alpha_pattern": Known(_NUMBERS, {}),
    },
    refused="{name} is {value}: {instead}",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """base: what it says of its base model. bias: which biases of the base were trained, one of _BIASES.

    saves_head: a whole head was saved. problems: why it cannot be served.
    """

    rank: int
    alpha: float
    ranks: Mapping[Pattern, int]
    alphas: Mapping[Pattern, float]
    by_root: bool
    base: str
    bias: str
    saves_head: bool
    problems: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AdapterConfig:
        known = {name: config[name] for name in _FIELDS.table if config.get(name) not in _EMPTY}
        problems, found = _FIELDS.problems(known), _FIELDS.values(known)
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_CHANGES_BASE):
            problems.append(
                f"init_lora_weights is {start!r}, which changes the base; save it as a plain LoRA, with "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
            )
        saved = found["modules_to_save"] if NAMES.holds(found["modules_to_save"]) else []
        if others := [name for name in saved if name != "lm_head"]:
            problems.append(f"modules_to_save is {saved!r}, and of {others} whole weights were trained: {_MERGE}")
        for key, kind in (("rank_pattern", _RANK), ("alpha_pattern", _ALPHA)):
            problems += _pattern_problems(key, found[key], kind)
        if problems:
            found = _FIELDS.values({})
        return cls(
            rank=found["r"] or 1,
            alpha=found["lora_alpha"] or 1,
            ranks={_of_names(name): rank for name, rank in found["rank_pattern"].items()},
            alphas={_of_names(name): alpha for name, alpha in found["alpha_pattern"].items()},
            by_root=bool(config.get("use_rslora")),
            base=str(config.get("base_model_name_or_path")),
            bias=found["bias"],
            saves_head="lm_head" in saved,
            problems=tuple(problems),
        )

    def bias_problem(self, biases: Collection[str], adapted: Collection[str]) -> str | None:
        """Why a base with these biases is served without what was trained of them; None where nothing was.

        biases: names of tensors. adapted: names of modules.
        """
        own = {name.rpartition(".")[0] for name in biases}
        trained = {"none": (), "all": biases, "lora_only": own.intersection(adapted)}[self.bias]
        return (
            f"bias is {self.bias!r}, and {len(trained)} biases of the base were trained: {_MERGE}" if trained else None
        )

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """A module's rank and scale, by its name; the scale is alpha over the rank, or over the root of the rank."""
        rank, alpha = _of(module, self.ranks, self.rank), _of(module, self.alphas, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.by_root else rank)


def _of(module: str, patterns: Mapping[Pattern, Any], other: Any) -> Any:
    """The value of the first pattern that a name matches."""
    return next((value for pattern, value in patterns.items() if pattern.match(module)), other)


def _of_names(text: str) -> Pattern:
    """The pattern that a key of a field of patterns stands for: of a whole name, or of its end behind a dot."""
    return Pattern(rf"(.*\.)?({text})$")


def _pattern_problems(key: str, patterns: Any, kind: FieldKind) -> list[str]:
    """The problems of a field of patterns: names, which may be regular expressions, and their numbers."""
    found = []
    for name, value in patterns.items() if _NUMBERS.holds(patterns) else ():
        try:
            Pattern(name)
            _of_names(name)
        except ValueError as error:
            found.append(f"{key} names {quoted(name)}: {error}")
        if not kind.holds(value):
            found.append(f"{name} is {quoted(value)}; it must be {kind.words}")
    return found
