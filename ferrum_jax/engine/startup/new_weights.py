"""New weights for a model that runs: what a trainer names, found and checked, then put in the place of the old ones."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from checkpoints import open_checkpoint
from checkpoints.memory import Copies, copies_of, copies_of_tensors, is_own
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.models.families import registry
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.runtime.layout import ModelLayout

NewWeights = nnx.Module | nnx.State | Mapping[Any, Any] | str | os.PathLike[str]


def copies_for(
    layout: ModelLayout,
    state: NewWeights,
    *,
    spec: registry.AnySpec,
    names: Mapping[str, str] | None,
    partial: bool,
    cast: bool,
) -> Copies:
    """The maker of each changed parameter's copy. See `LLM.update_weights`; spec: of the model as it is stored.

    Raises ValueError, before anything is copied, for all that does not fit.
    """
    targets, expansions = layout.targets, layout.model.expansions
    if isinstance(state, str | os.PathLike):
        if names or partial:
            raise ValueError("a folder is taken as a whole, by its own names; leave names and partial out")
        return _of_folder(layout, os.fspath(state), spec)
    if not isinstance(state, nnx.Module | nnx.State | Mapping):
        raise ValueError(f"the weights are {type(state).__name__}; give a folder, or arrays by name")
    arrays = {name: _array(name, array) for name, array in _renamed(registry.parameters_of(state), names or {}).items()}
    if not arrays:
        raise ValueError("the weights are empty: 0 arrays; give those that change")
    if is_own(arrays, targets):
        return copies_of(arrays, targets, expansions, cast=cast, partial=partial)
    rules, harmless = registry.rules_of(layout.spec)
    return copies_of_tensors(arrays, targets, expansions, rules=rules, harmless=harmless, partial=partial)


def _of_folder(layout: ModelLayout, folder: str, spec: registry.AnySpec) -> Copies:
    checkpoint = open_checkpoint(folder)
    source = ModelSource.of_checkpoint(checkpoint, mtp=isinstance(spec, ModelSpec) and spec.num_mtp_layers > 0)
    if source.spec != spec:
        raise ValueError(
            f"{folder} is another model than the one that runs: they differ in {_differences(source.spec, spec)}"
        )
    targets, expansions = layout.targets, layout.model.expansions
    if checkpoint.kind == "huggingface":
        rules, harmless = registry.rules_of(layout.spec)
        return copies_of_tensors(
            checkpoint.tensors,
            targets,
            expansions,
            rules=rules,
            harmless=harmless,
            scheme=checkpoint.scheme,
        )
    arrays = source.read(targets, expansions)
    return {name: (lambda array=array: array) for name, array in arrays.items()}


def _differences(found: Any, wanted: Any) -> str:
    if type(found) is not type(wanted):
        return f"{type(found).__name__} and {type(wanted).__name__}"
    fields = [field.name for field in dataclasses.fields(found)]
    return ", ".join(name for name in fields if getattr(found, name) != getattr(wanted, name))


def _renamed(arrays: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    unknown = sorted(set(names) - arrays.keys())
    found = {names.get(name, name): array for name, array in arrays.items()}
    if unknown or len(found) < len(arrays):
        what = f"has {unknown}, which the weights do not have" if unknown else "gives two arrays one name"
        raise ValueError(f"names {what}; correct it")
    return found


def _array(name: str, value: Any) -> jax.Array | np.ndarray:
    """The value as an array; one of another library, such as a tensor of torch, where it shares its memory.

    Raises ValueError for what is none.
    """
    if isinstance(value, jax.Array | np.ndarray):
        return value
    if hasattr(value, "__dlpack__"):
        detached = value.detach() if hasattr(value, "detach") else value
        return jax.dlpack.from_dlpack(detached.contiguous() if hasattr(detached, "contiguous") else detached)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return np.asarray(value)
    raise ValueError(f"{name} is a {type(value).__name__}; it must be an array")
