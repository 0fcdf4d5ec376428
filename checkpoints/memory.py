"""Weights that are in memory already: a trainer's arrays, copied to where a model wants them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from checkpoints.formats import Leaf, Scheme, join
from checkpoints.formats.leaves import check_leaf
from checkpoints.formats.quantise import quantised
from checkpoints.huggingface import sources_of
from checkpoints.names.problems import listed
from checkpoints.placement import leaves_of, made_forms, place, stored_targets, whole_targets
from checkpoints.rules import Expansion, Rule, as_stored, expand, touching
from checkpoints.stored_weight import weight_of, weight_of_leaf

Copies = dict[str, Callable[[], jax.Array]]  # by parameter, what makes the copy of its array


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
    return {name: copy() for name, copy in copies_of(arrays, targets, expansions, cast=cast).items()}


def copies_of(
    arrays: Mapping[str, Any],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    expansions: Mapping[str, Expansion] = MappingProxyType({}),
    *,
    cast: bool = False,
    partial: bool = False,
) -> Copies:
    """`take` as functions that each make one copy. partial: parameters without an array are left out."""
    wanted = stored_targets(targets, expansions)
    arrays = _in_forms(arrays, wanted)
    problems = _leaf_problems(arrays, wanted)
    problems += [f"{name} is missing" for name in wanted if name not in arrays and not partial]
    problems += [f"{name} is left over: the model has no such parameter" for name in arrays if name not in wanted]
    for name in wanted.keys() & arrays.keys():
        have, want = arrays[name], wanted[name]
        if tuple(have.shape) != tuple(want.shape):
            problems.append(f"{name} is {list(have.shape)}; the model wants {list(want.shape)}")
        elif have.dtype != want.dtype and (not cast or weight_of_leaf(name)):
            problems.append(f"{name} is {have.dtype}; the model computes in {want.dtype}")
    _refuse(problems)
    given = {name: target for name, target in targets.items() if name in arrays}
    return {name: _copier([arrays[name]], target, expansions.get(name)) for name, target in given.items()}


def copies_of_tensors(
    tensors: Mapping[str, Any],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    expansions: Mapping[str, Expansion] = MappingProxyType({}),
    *,
    rules: Sequence[Rule],
    harmless: Iterable[str],
    scheme: Scheme | None = None,
    partial: bool = False,
) -> Copies:
    """`copies_of` for Hugging Face names: applies the family's rules and casts.

    scheme: for quantised tensors. partial: leave out parameters without a tensor.
    """
    tensors = join(tensors, scheme)
    if partial:
        rules = touching(as_stored(rules, tensors), tensors.keys())
        made = expand(rules)
        targets = {name: target for name, target in targets.items() if weight_of(name) in made}
    stored, plan = stored_targets(targets, expansions), expand(as_stored(rules, tensors))
    coded = {} if scheme is not None else made_forms(stored)
    on_host = {part.name for name, parts in plan.items() for part in parts if part.part or name in coded}
    tensors = {name: np.asarray(x) if name in on_host and _is_live(x) else x for name, x in tensors.items()}
    sources = sources_of(tensors, rules=rules, harmless=harmless, targets=stored, has_scheme=scheme is not None)
    _refuse_not_finite({part.name: tensors[part.name] for name in coded for part in plan[name]})
    return {
        name: _copier(leaves_of(sources[weight_of(name)], name), target, expansions.get(name))
        for name, target in targets.items()
    }


def is_own(names: Collection[str], targets: Mapping[str, Any]) -> bool:
    """True if at least half of the names are parameter paths."""
    own = targets.keys() | whole_targets(dict(targets)).keys()
    return 2 * len(own & set(names)) >= len(names)


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError(f"the weights do not fit the model, {len(problems)} mismatches:\n  {listed(sorted(problems))}")


def _leaf_problems(arrays: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
    """Problems in the values of leaves that were given, not made here from a dense weight."""
    problems = []
    for name, array in arrays.items():
        leaf = weight_of_leaf(name)
        is_here = getattr(array, "is_fully_addressable", True) and not isinstance(array, Leaf)
        if leaf is not None and name in wanted and is_here and array.dtype == wanted[name].dtype:
            try:
                check_leaf(leaf[1], np.asarray(array), name)
            except ValueError as error:
                problems.append(str(error))
    return problems


def _refuse_not_finite(dense: Mapping[str, Any]) -> None:
    """Raises ValueError for weights that are to be quantised and hold what no scale stands for."""
    bad = [name for name, array in dense.items() if not np.isfinite(np.asarray(array).astype(np.float32)).all()]
    _refuse([f"{name} has weights that are not finite, which no scale stands for" for name in bad])


def _is_live(array: Any) -> bool:
    return isinstance(array, jax.Array)


def _in_forms(arrays: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """The arrays, with the leaves of a form in the place of a dense one where the model wants them."""
    found, whole = dict(arrays), whole_targets(wanted)
    forms = {
        name: form
        for name, form in made_forms(wanted).items()
        if name in found and tuple(found[name].shape) == tuple(whole[name].shape)
    }
    _refuse([problem for name in forms if (problem := _not_made(name, wanted)) is not None])
    _refuse_not_finite({name: found[name] for name in forms})
    for name, form in forms.items():
        packed = quantised(name, np.asarray(found.pop(name)), form)
        found |= {f"{name}.{leaf}": packed.leaf(leaf) for leaf in packed.leaf_shapes}
    return found


def _not_made(name: str, wanted: Mapping[str, Any]) -> str | None:
    """Why a dense replacement is refused: old zeros, order or input scale would stay."""
    kept = [f"{name}.{leaf}" for leaf in ("zeros", "order", "input_scale") if f"{name}.{leaf}" in wanted]
    if not kept:
        return None
    return (
        f"{name} is dense, and the model keeps it with {', '.join(kept)}, which are not made from a dense weight; "
        f"give these with {name}.codes and {name}.scales"
    )


def _copier(
    sources: Sequence[Any], target: jax.ShapeDtypeStruct, expansion: Expansion | None
) -> Callable[[], jax.Array]:
    """From device to device, without a compile, if only the sharding may differ; otherwise through the host."""

    def copy() -> jax.Array:
        (array, *others) = sources
        if _is_live(array) and not others and expansion is None and array.shape == target.shape:
            return jax.device_put(array.astype(target.dtype), target.sharding, may_alias=False)
        return place([x if isinstance(x, Leaf) else np.array(x) for x in sources], target, expansion)

    return copy
