"""adapter_config.json: the ranks and scales of a LoRA that PEFT saved, and what of PEFT is refused by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from checkpoints.names.patterns import Pattern

CONFIG = "adapter_config.json"
_PATTERNS = ("rank_pattern", "alpha_pattern")
_MOST = 3e38  # of a rank or an alpha: scales are float32
_MERGE = "merge it with PEFT and load the merged model"
# Key -> values under which the tensors mean what they do without it. Any other value is refused.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "layer_replication": (),
    "trainable_token_indices": (),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "kasa_config": (),
    "velora_config": (),
    "monteclora_config": (),
    "megatron_config": (),
}
# They change the base's weights, so that the tensors alone say too little.
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


_BIASES = ("none", "all", "lora_only")  # which of the base's were trained and saved


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
        problems = [
            f"{key} is {config[key]!r}: {_MERGE}"
            for key, plain in _PLAIN.items()
            if config.get(key) and config[key] not in plain
        ]
        bias = config.get("bias") or "none"
        if bias not in _BIASES:
            problems.append(f"bias is {_short(bias)}; it must be one of {_BIASES}")
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_CHANGES_BASE):
            problems.append(
                f"init_lora_weights is {start!r}, which changes the base; save it as a plain LoRA, with "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
            )
        saved = config.get("modules_to_save") or []
        if not isinstance(saved, list):
            problems.append(f"modules_to_save is {saved!r}; it must be a list of names")
            saved = []
        if others := [name for name in saved if name != "lm_head"]:
            problems.append(f"modules_to_save is {saved!r}, and of {others} whole weights were trained: {_MERGE}")
        wrong = [problem for key in _PATTERNS for problem in _pattern_problems(key, config)]
        ranks, alphas = ({} if wrong else config.get(key) or {} for key in _PATTERNS)
        of_ranks, of_alphas = {"r": config.get("r"), **ranks}, {"lora_alpha": config.get("lora_alpha"), **alphas}
        wrong += [
            f"{k} is {_short(v)}; it must be a whole number above 0" for k, v in of_ranks.items() if not _is_rank(v)
        ]
        wrong += [f"{k} is {_short(v)}; it must be a number above 0" for k, v in of_alphas.items() if not _is_number(v)]
        problems += wrong
        return cls(
            rank=1 if wrong else config["r"],
            alpha=1 if wrong else config["lora_alpha"],
            ranks={} if wrong else {_of_names(name): rank for name, rank in ranks.items()},
            alphas={} if wrong else {_of_names(name): alpha for name, alpha in alphas.items()},
            by_root=bool(config.get("use_rslora")),
            base=str(config.get("base_model_name_or_path")),
            bias=bias if bias in _BIASES else "none",
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
    """What a key of a field of patterns stands for: a name, or its end behind a dot."""
    return Pattern(rf"(.*\.)?({text})$")


def _pattern_problems(key: str, config: Mapping[str, Any]) -> list[str]:
    """Why a field is no mapping of names, which may be regular expressions."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        return [f"{key} is {_short(patterns)}; it must be an object of names and numbers"]
    found = []
    for pattern in patterns:
        try:
            Pattern(pattern)
            _of_names(pattern)
        except ValueError as error:
            found.append(f"{key} names {_short(pattern)}: {error}")
    return found


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
