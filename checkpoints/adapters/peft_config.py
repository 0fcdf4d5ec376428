"""adapter_config.json: the ranks and scales of a LoRA that PEFT saved, and what of PEFT is refused by name."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

CONFIG = "adapter_config.json"
_MERGE = "merge it with PEFT and load the merged model"
# Key -> values under which the tensors mean what they do without it. Any other value is refused.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """base: what it says of its base model. saves_head: a whole head was saved. problems: why it cannot be served."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    by_root: bool
    base: str
    saves_head: bool
    problems: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AdapterConfig:
        problems = [
            f"{key} is {config[key]!r}: {_MERGE}"
            for key, plain in _PLAIN.items()
            if config.get(key) and config[key] not in plain
        ]
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_CHANGES_BASE):
            problems.append(
                f"init_lora_weights is {start!r}, which changes the base; save it as a plain LoRA, with "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
            )
        saved = config.get("modules_to_save") or []
        if others := [name for name in saved if name != "lm_head"]:
            problems.append(f"modules_to_save is {saved!r}, and of {others} whole weights were trained: {_MERGE}")
        ranks, alphas = (config.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
        numbers = {"r": config.get("r"), "lora_alpha": config.get("lora_alpha"), **ranks, **alphas}
        wrong = {key: value for key, value in numbers.items() if not _is_number(value)}
        problems += [f"{key} is {value!r}; it must be a number above 0" for key, value in wrong.items()]
        return cls(
            rank=config.get("r", 0) if not wrong else 1,
            alpha=config.get("lora_alpha", 0) if not wrong else 1,
            ranks=ranks if not wrong else {},
            alphas=alphas if not wrong else {},
            by_root=bool(config.get("use_rslora")),
            base=str(config.get("base_model_name_or_path")),
            saves_head="lm_head" in saved,
            problems=tuple(problems),
        )

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """A module's rank and scale, by its name; the scale is alpha over the rank, or over the root of the rank."""
        rank, alpha = _of(module, self.ranks, self.rank), _of(module, self.alphas, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.by_root else rank)


def _of(module: str, patterns: Mapping[str, Any], other: Any) -> Any:
    """The value of the first pattern that a name, or its end behind a dot, matches."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), other)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
