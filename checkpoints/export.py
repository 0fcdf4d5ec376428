"""From our own checkpoint folder to a Hugging Face one: tensors as in the source, quantised ones as published.

A dense parameter goes back into its tensor, or its part of one. Weights in forms are written as their format says
(`formats/written.py`): parameters that share tensors are read together and put together, a tensor at a time.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import huggingface, orbax_folder
from checkpoints.folder import check_space, copy_companions, new_folder
from checkpoints.formats import Leaf, PackedWeight, join, scheme_of, without_forms
from checkpoints.formats.packed import slices
from checkpoints.formats.written import block_rows, quantization_config, shapes_of, tensors_of
from checkpoints.rules import BASE, Rule, Shape, StoredTensor, as_stored, expand
from checkpoints.stored_weight import LEAVES, WeightForm, weight_of
from ferrum_jax.io.files.json_files import read_json

Plan = Mapping[str, tuple[StoredTensor, ...]]
Tensors = dict[str, tuple[Shape, np.dtype]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fused:
    """Parameters in one form that are made of the same tensors: parts of one, or of those of all experts.

    shapes: of the weights that the tensors stand for, by name. targets: the parameters, with what of each tensor they
    take. is_stack: a parameter has a row for each tensor.
    """

    form: WeightForm
    shapes: dict[str, Shape]
    targets: dict[str, tuple[StoredTensor, ...]]
    is_stack: bool


def to_huggingface(path: str | Path, out_dir: str | Path, *, rules: Sequence[Rule]) -> int:
    """Writes our checkpoint `path` as a Hugging Face folder, atomically. Returns the number of tensors.

    Dense tensors have the names and bits of the source, and its dtypes where the conversion did not cast. Weights in
    forms are compressed-tensors, MXFP4 as it was, and config.json says so. At most one tensor's parameters,
    or one layer's experts, are in memory. Raises ValueError when `out_dir` is there and not empty, for parameters that
    cannot go back, and where the disk has too little room: a mapped file that does not fit ends the process.
    """
    source, out = Path(path), Path(out_dir)
    orbax_folder.check_free(out)
    description = orbax_folder.read_description(source)
    rules = as_stored(rules, description.get("source_shapes") or [BASE])
    plan = expand(rules)
    stacked = {target for rule in rules if rule.experts for target, _ in rule.expand()}
    leftovers = huggingface.map_file(source / huggingface.LEFTOVERS) if _has_leftovers(source) else {}
    joined = list(_joined(plan, dict(orbax_folder.stored_forms(source)), stacked, description))
    rows = {name: block_rows(own.form, leaves["scales"]) for own in joined for name, leaves in _scales(source, own)}
    packed: Tensors = {}
    for own in joined:
        for name, shape in own.shapes.items():
            packed |= shapes_of(name, own.form, shape, rows.get(name, 1))
    done = {*_kept(plan, leftovers), *(target for own in joined for target in own.targets)}
    dense = _dense_tensors(plan, stacked, description, done)
    shapes = dense | packed | {name: (array.shape, array.dtype) for name, array in leftovers.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    check_space(out.parent, sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()))
    with new_folder(out) as temporary:
        copy_companions(source, temporary)
        _describe_forms(temporary / "config.json", joined, rows, dense)
        views = huggingface.write_folder(temporary, shapes)
        for name, array in leftovers.items():
            views[name][...] = array
        for target, array in orbax_folder.read_params(source, plan.keys() - done):
            for part, own in zip(plan[target], array if target in stacked else [array], strict=True):
                part.of(views)[...] = own
        for own in joined:
            for name, leaves in _leaves(own, _read(source, own)):
                for tensor, array in tensors_of(name, own.form, leaves, rows.get(name, 1)).items():
                    views[tensor][...] = array
        del views  # what is mapped is written when nobody holds it
    return len(shapes)


def _dense_tensors(plan: Plan, stacked: set[str], description: Mapping[str, dict], done: Collection[str]) -> Tensors:
    """(shape, dtype) of every tensor that the dense parameters make. done: parameters in other tensors."""
    known, found = description.get("source_shapes", {}), {}
    parameters = {weight_of(name) for name in description["parameters"]}
    missing = [*(plan.keys() - parameters), *(parameters - plan.keys())]
    if missing:
        raise ValueError(f"the checkpoint's parameters are not those of its config.json: {sorted(missing)}")
    for target in plan.keys() - done:
        entry, parts = description["parameters"][target], plan[target]
        shape = tuple(entry["shape"][1:] if target in stacked else entry["shape"])
        for part in parts:
            if part.name not in known and part.part is not None:
                raise ValueError(
                    f"{target} cannot go back into {part.name}, whose form is not known (MXFP4?); "
                    "convert the source again"
                )
            found[part.name] = (tuple(known.get(part.name, shape)), np.dtype(entry["dtype"]))
    return found


def _kept(plan: Plan, leftovers: Mapping[str, np.ndarray]) -> list[str]:
    """Weights whose MXFP4 tensors an earlier version kept beside the parameters, which it had decoded."""
    packed = join(leftovers, scheme_of({"quantization_config": {"quant_method": "mxfp4"}}))
    return [target for target, parts in plan.items() if all(_is_packed(packed.get(part.name)) for part in parts)]


def _is_packed(tensor: Any) -> bool:
    return isinstance(tensor, PackedWeight)


def _has_leftovers(path: Path) -> bool:
    return (path / huggingface.LEFTOVERS).is_file()


# -- weights in forms --------------------------------------------------------------------------------------


def _joined(
    plan: Plan, forms: Mapping[str, WeightForm], stacked: set[str], description: Mapping[str, dict]
) -> Iterator[_Fused]:
    """All parameters in forms. Raises ValueError where a tensor would be in one form only in part."""
    known = description.get("source_shapes", {})
    alike: dict[tuple[str, ...], dict[str, tuple[StoredTensor, ...]]] = collections.defaultdict(dict)
    for target, parts in plan.items():
        alike[tuple(part.name for part in parts)][target] = parts
    for names, targets in alike.items():
        own = {forms.get(target) for target in targets}
        if own == {None}:
            continue
        form = own.pop()
        unknown = [name for name in names if name not in known]
        if own or form is None or unknown:
            why = f"the shapes of {unknown} are not known" if unknown else f"{sorted(targets)} are in several forms"
            raise ValueError(f"{names[0]} cannot be written: {why}; convert the source again")
        parts = [part.part for sources in targets.values() for part in sources]
        if form.kind == "mxfp4" and not all(part is not None and part.transposed for part in parts):
            raise ValueError(f"{names[0]} is in MXFP4, which is published for the experts of gpt-oss alone")
        shapes = {name: tuple(known[name]) for name in names}
        yield _Fused(form=form, shapes=shapes, targets=targets, is_stack=next(iter(targets)) in stacked)


def _read(source: Path, own: _Fused, leaf: str | None = None) -> dict[str, np.ndarray]:
    """The stored leaves of these parameters, or one leaf of each."""
    wanted = {f"{target}.{name}" for target in own.targets for name in ([leaf] if leaf else LEAVES)}
    return dict(orbax_folder.read_params(source, wanted))


def _scales(source: Path, own: _Fused) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """(name, scales alone) of tensors that may have been in blocks of several outputs."""
    if own.form.kind == "fp8_e4m3" and own.form.group is not None:
        yield from _leaves(own, _read(source, own, "scales"))


def _leaves(own: _Fused, arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """(name, leaves) of each tensor, whose parts are put where they were. arrays: stored leaves, by parameter."""
    names = {name.rpartition(".")[2] for name in arrays}
    for i, (name, shape) in enumerate(own.shapes.items()):
        parts = [(sources[i], target) for target, sources in own.targets.items()]
        turned = any(part.part is not None and part.part.transposed for part, _ in parts)
        whole = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
        sizes = {leaf: size for leaf, size in own.form.leaves(whole).items() if leaf in names}
        found = {leaf: np.zeros(size, np.dtype(dtype)) for leaf, (size, dtype) in sizes.items()}
        places = PackedWeight(
            name, own.form, {leaf: _place(array) for leaf, array in found.items()}, outputs_last=turned
        )
        for part, target in parts:
            for leaf, array in found.items():
                stored = arrays[f"{target}.{leaf}"]
                array[slices(part.of({name: places}).leaf(leaf).ranges)] = stored[i] if own.is_stack else stored
        yield name, found


def _place(array: np.ndarray) -> Leaf:
    return Leaf(lambda ranges: array[slices(ranges)], array.shape, array.dtype)


def _describe_forms(file: Path, joined: Sequence[_Fused], rows: Mapping[str, int], dense: Tensors) -> None:
    """Has config.json say of forms what the tensors are. MXFP4 stands in it already."""
    modules = {
        name.removesuffix(".weight"): (own.form, rows.get(name, 1))
        for own in joined
        for name in own.shapes
        if own.form.kind != "mxfp4"
    }
    if modules:
        matrices = [name.removesuffix(".weight") for name, (shape, _) in dense.items() if len(shape) == 2]
        config = without_forms(read_json(file))
        config["quantization_config"] = quantization_config(modules, matrices)
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
