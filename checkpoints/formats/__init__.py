"""Published formats of quantised weights: each is a reader that gives a form (`checkpoints/stored_weight.py`).

`scheme_of` says what a config.json means, before a weight is read; `join` puts a `PackedWeight` in the place of the
tensors of each quantised module. Everything else is refused by name.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from checkpoints.formats import awq, compressed_tensors, fp8, gptq, mxfp4
from checkpoints.formats.packed import Leaf, PackedWeight
from checkpoints.formats.scheme import (
    KEYS,
    Module,
    Scheme,
    Settings,
    refusal,
    said_of_forms,
    scale_dtype_of,
    without_forms,
)
from checkpoints.names.problems import listed
from checkpoints.stored_weight import WeightForm

__all__ = [
    "KEYS",
    "Leaf",
    "PackedWeight",
    "Scheme",
    "StoredForms",
    "join",
    "refusal",
    "said_of_forms",
    "scheme_of",
    "stored_scale_dtype",
    "without_forms",
]

_FORMATS: dict[str, Callable[[Settings, str], Scheme]] = {
    "awq": awq.scheme_from,
    "compressed-tensors": compressed_tensors.scheme_from,
    "fp8": fp8.scheme_from,
    "gptq": gptq.scheme_from,
    "mxfp4": mxfp4.scheme_from,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredForms:
    """Facts of quantised weights that config.json leaves open.

    scale_dtype: of scales, None where unknown. forms: (parameter, form) of weights that are not dense, in our own
    checkpoints; None takes the forms of config.json.
    """

    scale_dtype: str | None = None
    forms: tuple[tuple[str, WeightForm], ...] | None = None


def scheme_of(config: Mapping[str, Any], scale_dtype: str | None = None) -> Scheme | None:
    """The scheme of a config.json's quantised weights, or None.

    scale_dtype: of the scales as they are stored; None takes that of config.json. Raises ValueError for a format, or
    a kind of one, that is not supported.
    """
    for key, value in said_of_forms(config).items():
        method = value.get("quant_method") if isinstance(value, Mapping) else None
        if not isinstance(method, str) or method not in _FORMATS:
            raise ValueError(refusal(key, value))
        return _FORMATS[method](Settings(value, key), scale_dtype or scale_dtype_of(config))
    return None


def stored_scale_dtype(dtypes: Mapping[str, str]) -> str | None:
    """The dtype that holds all scales of groups among these tensors, by name; None where there are none."""
    found = {dtype for name, dtype in dtypes.items() if name.endswith((".weight_scale", ".scales"))} - {"uint8"}
    return None if not found else found.pop() if len(found) == 1 else "float32"


def join(tensors: Mapping[str, Any], scheme: Scheme | None) -> dict[str, Any]:
    """The tensors, with a PackedWeight for those of each quantised module.

    Raises ValueError for tensors that do not fit one another or that config.json says nothing of.
    """
    if scheme is None:
        return dict(tensors)
    found, problems = dict(tensors), []
    modules: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    marked = {name[: -len(end)] for end in scheme.marks for name in tensors if name.endswith(end)}
    ends = (*scheme.marks, *scheme.others)
    for base in sorted(marked):
        modules[base] = {end: tensors[base + end] for end in ends if base + end in tensors}
    for base, own in modules.items():
        form = scheme.form_of(base)
        try:
            if form is None:
                raise ValueError(
                    f"{base}{min(own)} is of a quantised weight, and config.json says that {base} is dense"
                )
            missing = [base + end for end in scheme.marks if end not in own and scheme.method != "compressed-tensors"]
            if missing:
                raise ValueError(f"{', '.join(missing)} is missing beside {base}{min(own)}; copy the checkpoint again")
            packed = scheme.pack(Module(name=base + scheme.stands_for, form=form, tensors=own))
        except ValueError as error:
            problems.append(str(error))
            continue
        for end in own:
            del found[base + end]
        found[base + scheme.stands_for] = packed
    if problems:
        raise ValueError(f"the quantised weights cannot be read, {len(problems)} mismatches:\n  " + listed(problems))
    return found
