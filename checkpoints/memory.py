"""Weights that are in memory already: a trainer's arrays, copied to where a model wants them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax
import numpy as np

from checkpoints.placement import place, stored_targets
from checkpoints.rules import Stretch


def take(
    arrays: Mapping[str, jax.Array | np.ndarray],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    stretches: Mapping[str, Stretch] = MappingProxyType({}),
    *,
    cast: bool = False,
) -> dict[str, jax.Array]:
    """{parameter: a copy of its array} with exactly the shapes, dtypes and shardings of `targets`.

    The caller's arrays may be donated or changed afterwards. stretches: of targets that are longer than their arrays.
    cast: take other dtypes too. Raises one ValueError for all names, shapes and dtypes that do not fit.
    """
    wanted = stored_targets(targets, stretches)
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
    return {name: _copy(arrays[name], target, stretches.get(name)) for name, target in targets.items()}


def _copy(array: jax.Array | np.ndarray, target: jax.ShapeDtypeStruct, stretch: Stretch | None) -> jax.Array:
    """From device to device where the array is there as it is wanted, without a compile; else through the host."""
    if isinstance(array, jax.Array) and stretch is None and array.dtype == target.dtype:
        return jax.device_put(array, target.sharding, may_alias=False)
    return place([np.array(array)], target, stretch)
