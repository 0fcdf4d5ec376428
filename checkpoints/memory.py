"""Weights that are in memory already: a trainer's arrays, copied to where a model wants them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from checkpoints.formats import Leaf
from checkpoints.formats.quantise import quantised
from checkpoints.placement import made_forms, place, stored_targets, whole_targets
from checkpoints.rules import Expansion


def take(
    arrays: Mapping[str, jax.Array | np.ndarray],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    expansions: Mapping[str, Expansion] = MappingProxyType({}),
    *,
    cast: bool = False,
) -> dict[str, jax.Array]:
    """{parameter: a copy of its array} with exactly the shapes, dtypes and shardings of `targets`.

    The caller's arrays may be donated or changed afterwards. expansions: for targets longer than their arrays.
    cast: take other dtypes too. Raises one ValueError for all names, shapes and dtypes that do not fit.
    """
    wanted = stored_targets(targets, expansions)
    arrays = _in_forms(arrays, wanted)
    problems = [f"{name} is missing" for name in wanted if name not in arrays]
    problems += [f"{name} is left over: the model has no such parameter" for name in arrays if name not in wanted]
    for name in wanted.keys() & arrays.keys():
        have, want = arrays[name], wanted[name]
        if tuple(have.shape) != tuple(want.shape):
            problems.append(f"{name} is {list(have.shape)}; the model wants {list(want.shape)}")
        elif have.dtype != want.dtype and not cast:
            problems.append(f"{name} is {have.dtype}; the model computes in {want.dtype}")
    if problems:
        listed = "\n  ".join(sorted(problems))
        raise ValueError(f"the weights do not fit the model, {len(problems)} mismatches:\n  {listed}")
    return {name: _copy(arrays[name], target, expansions.get(name)) for name, target in targets.items()}


def _in_forms(arrays: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """The arrays, with the leaves of a form in the place of a dense one where the model wants them."""
    found = dict(arrays)
    for name, form in made_forms(wanted).items():
        if name in found and tuple(found[name].shape) == tuple(whole_targets(wanted)[name].shape):
            packed = quantised(name, np.asarray(found.pop(name)), form)
            found |= {f"{name}.{leaf}": packed.leaf(leaf) for leaf in packed.leaf_shapes}
    return found


def _copy(array: jax.Array | np.ndarray | Leaf, target: jax.ShapeDtypeStruct, expansion: Expansion | None) -> jax.Array:
    """From device to device, without a compile, if only the sharding may differ; otherwise through the host."""
    if isinstance(array, jax.Array) and expansion is None and array.dtype == target.dtype:
        return jax.device_put(array, target.sharding, may_alias=False)
    return place([array if isinstance(array, Leaf) else np.array(array)], target, expansion)
