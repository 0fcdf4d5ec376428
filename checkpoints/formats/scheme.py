"""Scheme: what a config.json says of its quantised weights. Each format makes one from its own words."""

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from checkpoints.formats.packed import PackedWeight
from checkpoints.names.patterns import Pattern
from checkpoints.stored_weight import WeightForm
from ferrum_jax.io.error_text.known_fields import ANY, Fields, Known, one_of

KEYS = ("quantization_config", "compression_config")  # of config.json, where it describes packed weights
_TEXT = "text_config"  # of config.json, where the text model of several may say it for itself
_LONGEST = 200  # characters of a value that a message shows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """The tensors of one quantised module, by the ends of their names. name: of what they stand for."""

    name: str
    form: WeightForm
    tensors: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """form_of: of a module, by its name in the checkpoint; None where it is dense. pack: its tensors as one weight.

    marks: ends of names that only quantised modules have. others: their other ends. stands_for: the end of the name of
    a dense weight. names_all: modules that the config does not call dense are quantised, routers and gates too;
    has_head: so is the head. transposed: the rules see its modules as [.., in, out]. targets: modules, classes and
    patterns that it names.
    """

    method: str
    form_of: Callable[[str], WeightForm | None]
    pack: Callable[[Module], PackedWeight]
    marks: tuple[str, ...]
    others: tuple[str, ...] = ()
    stands_for: str = ".weight"
    names_all: bool = False
    has_head: bool = False
    transposed: bool = False
    targets: tuple[str, ...] = ()


def refusal(key: str, value: Any, why: str | None = None) -> str:
    """An error's text: the format that `key` of a config.json describes is not supported, and what to do.

    It does not advise to remove the key: the weights would then be misread.
    """
    found = value if isinstance(value, Mapping) else {}
    method = str(found.get("quant_method", found.get("quant_algo", "a format that it does not name")))[:_LONGEST]
    bits = f" of {found['bits']} bits" if isinstance(found.get("bits"), int) else ""
    return (
        f"the weights are quantised: {key} of config.json says {method}{bits}{'' if why is None else f' with {why}'}, "
        "which is not supported yet; give the checkpoint in bfloat16, float16 or float32 that this one was made from "
        "(its model card names it)"
    )


def without_forms(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json without what it says of quantised weights, for readers of families."""
    found = {key: value for key, value in config.items() if key not in KEYS}
    return found | ({_TEXT: without_forms(found[_TEXT])} if isinstance(found.get(_TEXT), Mapping) else {})


def said_of_forms(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's descriptions of quantised weights by key. Raises ValueError where two places differ."""
    inner = config.get(_TEXT)
    levels = {"": config, f"{_TEXT}.": inner if isinstance(inner, Mapping) else {}}
    said = {(where, key): level[key] for where, level in levels.items() for key in KEYS if level.get(key)}
    if len({json.dumps(value, sort_keys=True) for value in said.values()}) > 1:
        names = " and ".join(f"{where}{key}" for where, key in said)
        raise ValueError(f"config.json says of quantised weights two things, in {names}; keep one of them")
    return {key: value for (_, key), value in said.items()}


class Settings:
    """A quantisation's description. where: in it, for what is inside."""

    def __init__(self, values: Mapping[str, Any], key: str, where: str = "") -> None:
        self.values, self.key, self._where = values, key, where

    def read(self, fields: Fields) -> dict[str, Any]:
        """The values by name; an empty one counts as absent. Raises ValueError for others, which may change a code."""
        problems = fields.problems({name: value for name, value in self.values.items() if value not in (None, [], {})})
        if problems:
            self.refuse(", ".join(problems)[:_LONGEST])
        return fields.values(self.values)

    def pattern(self, text: str) -> Pattern:
        """A pattern of module names. Raises ValueError for a text that is none."""
        try:
            return Pattern(text)
        except ValueError as error:
            raise ValueError(f"{self.key} of config.json names layers by {text[:_LONGEST]!r}: {error}") from None

    def refuse(self, why: str) -> None:
        raise ValueError(refusal(self.key, self.values if not self._where else {"quant_method": self._where}, why))


def fields_of(*ignored: str, **read: Known) -> Fields:
    """The keys of a description. ignored: keys about how codes were found, which do not change their meaning."""
    said = "{name} = {value}"
    return Fields({**{name: Known(ANY) for name in ignored}, **read}, wrong=said, refused=said)


NOTHING = Known(one_of(None, False, ""))  # it may be there, and say nothing


def scale_dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype in which a checkpoint of this config.json has its scales, as far as it says."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    dtype = str(config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype"))
    dtype = dtype.removeprefix("torch.")
    return dtype if dtype in ("bfloat16", "float16") else "float32"


def is_within(names: Collection[str], module: str) -> bool:
    """Whether one of the names is a run of the parts of a module's name: "mlp.gate" of "layers.0.mlp.gate"."""
    parts = module.split(".")
    return bool(names) and any(
        ".".join(parts[i:j]) in names for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)
    )


def group_size(settings: Settings, name: str, value: Any) -> int | None:
    """A group's inputs, None where all inputs of an output share a scale (-1). Refuses what is no size."""
    if value == -1:
        return None
    if type(value) is not int or value < 2 or not math.isfinite(value):
        settings.refuse(f"{name} = {value!r}")
    return value
