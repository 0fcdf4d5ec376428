"""Our own checkpoint folder: Orbax arrays, the files beside them, and one description.

    config.json, generation_config.json, tokenizer files    as in the source, byte for byte
    ferrum_jax.json          format version, dtype, digest of the source, every parameter's shape and dtype, the forms
                             of weights that are not dense, the groups of parameters, and the length of every file of
                             params/
    params/00000 ..          Orbax (OCDBT, zstd), one folder a group, one entry a parameter, keyed by its dotted path;
                             of format 1 params/ itself has all of them
    leftovers.safetensors    tensors that the model does not need and packed ones, kept for the way back

`writer.py` writes it. The only module that knows Orbax, which writes, and TensorStore, which is beneath it and reads,
slice by slice. Both are imported when first used, because a start from a Hugging Face folder does without them.
"""

import contextlib
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.file_names import name_inside
from checkpoints.formats.quantise import quantised
from checkpoints.names.problems import listed, shown
from checkpoints.placement import aligned_empty, leaves_of, made_forms, place, stored_targets, whole_targets
from checkpoints.rules import Expansion
from checkpoints.stored_weight import WeightForm, weight_of
from ferrum_jax.io.files.json_files import read_json

FORMAT = 2
DESCRIPTION = "ferrum_jax.json"
PARAMS = "params"
_CHUNK_BYTES = 1 << 25  # what is compressed and read as one
_MAX_IN_FLIGHT = 8  # chunks that are read at once


def check_free(path: Path) -> None:
    """Raises ValueError unless `path` does not exist or is an empty folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an empty folder; name another output or remove it first")


def restore(
    path: Path,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    expansions: Mapping[str, Expansion] = MappingProxyType({}),
) -> dict[str, jax.Array]:
    """{parameter: array} with exactly the shapes, dtypes and shardings of `targets`, cast where dtypes differ.

    expansions: of targets that are longer than what is stored. Dense weights are quantised where the targets are leaves
    of a form. One shard at a time is in host memory, and a few chunks.
    Raises one ValueError for all parameters missing, left over or of another shape, and a ValueError
    naming the folder when its data is damaged.
    """
    wanted = stored_targets(targets, expansions)
    dense = {name: form for name, form in made_forms(wanted).items() if name in read_description(path)["parameters"]}
    whole = {name: target for name, target in whole_targets(wanted).items() if name in dense}
    kept = {name: target for name, target in wanted.items() if weight_of(name) not in dense}
    _check_parameters(path, kept | whole)
    leaves: dict[str, list[str]] = {}
    for name in targets:
        leaves.setdefault(weight_of(name) if weight_of(name) in dense else name, []).append(name)
    found = {}
    for stored_name, stored in _open(path, {name: target.dtype for name, target in (kept | whole).items()}):
        source = quantised(stored_name, stored, dense[stored_name]) if stored_name in dense else None
        for name in leaves[stored_name]:
            own = [stored] if source is None else leaves_of([source], name)
            found[name] = place(own, targets[name], expansions.get(name))
    return {name: found[name] for name in targets}


def stored_forms(path: Path) -> tuple[tuple[str, WeightForm], ...]:
    """(parameter, form) of those that are not dense, as the description has them."""
    description = read_description(path)
    try:
        return tuple((name, WeightForm(**fields)) for name, fields in sorted(description.get("forms", {}).items()))
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path / DESCRIPTION} has forms that are none ({error}); convert the source again") from error


def read_params(path: Path, wanted: Container[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array on the host) of every parameter as it is stored, one at a time.

    wanted: of these names alone; None is all. Raises ValueError naming the folder when its data is damaged.
    """
    entries = read_description(path)["parameters"]
    dtypes = {name: np.dtype(entry["dtype"]) for name, entry in entries.items() if wanted is None or name in wanted}
    yield from ((name, stored[...]) for name, stored in _open(path, dtypes))


class _Stored:
    """A parameter on disk; a slice of it is read into memory of its own, cast to `dtype`."""

    def __init__(self, folder: Path, array: Any, dtype: np.dtype) -> None:
        self._folder, self._array, self.dtype = folder, array, dtype
        self.shape: tuple[int, ...] = array.shape

    def __getitem__(self, index: Any) -> np.ndarray:
        import tensorstore as ts

        part = self._array[index]
        out = aligned_empty(part.shape, self.dtype)
        with _damage_named(self._folder):  # chunk after chunk is cast to its place, so nothing is there twice
            ts.array(out).write(ts.cast(part[ts.d[:].translate_to[0]], self.dtype)).result()
        return out


def _open(path: Path, dtypes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, _Stored) of these parameters, in turn. Raises ValueError naming the folder when its data is damaged."""
    import tensorstore as ts

    _check_files(path)
    limits = {"data_copy_concurrency": {"limit": min(os.cpu_count() or 1, _MAX_IN_FLIGHT)}}
    context = ts.Context(limits | {"cache_pool": {"total_bytes_limit": 0}})
    entries = read_description(path)["parameters"]
    for folder, members in _folders(path):
        base = {"driver": "file", "path": f"{folder.resolve()}/"}
        for name in members:
            if name in dtypes:
                place_of = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
                with _damage_named(folder):
                    array = ts.open({"driver": "zarr", "kvstore": place_of}, read=True, context=context).result()
                entry, found = entries[name], (list(array.shape), array.dtype.name)
                if found != (entry["shape"], entry["dtype"]):
                    raise ValueError(
                        f"{folder} has {name} as {found[1]} {found[0]}, and {DESCRIPTION} says {entry['dtype']} "
                        f"{entry['shape']}; copy or convert the checkpoint again"
                    )
                yield name, _Stored(folder, array, np.dtype(dtypes[name]))


def _folders(path: Path) -> Iterator[tuple[Path, Sequence[str]]]:
    """(Orbax folder, parameters in it); format 1 has one for all."""
    description = read_description(path)
    if description["format"] == 1:
        yield path / PARAMS, list(description["parameters"])
        return
    for group, names in enumerate(description["groups"]):
        yield path / PARAMS / group_folder(group), names


@contextlib.contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """Raises ValueError naming the folder for what TensorStore finds wrong with it."""
    try:
        yield
    except Exception as error:  # of many kinds
        raise ValueError(f"{folder} cannot be read ({error}); copy or convert the checkpoint again") from error


def save_arrays(path: Path, arrays: Mapping[str, jax.Array | np.ndarray]) -> None:
    """Writes the arrays as a new Orbax folder; names may hold slashes."""
    with _checkpointer(max(array.nbytes for array in arrays.values())) as (checkpointer, ocp):
        how = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
        checkpointer.save(path.resolve(), args=ocp.args.PyTreeSave(dict(arrays), save_args=how))
    _forget_place(path)


def restore_arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of a folder that `save_arrays` wrote, on the host."""
    with _checkpointer(1) as (checkpointer, ocp):
        item = dict.fromkeys(names, 0)
        how = dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
        restored = checkpointer.restore(path.resolve(), args=ocp.args.PyTreeRestore(item, restore_args=how))
    return {name: np.asarray(restored[name]) for name in names}


def read_description(path: Path) -> dict[str, Any]:
    """ferrum_jax.json, checked: format, dtype, source_digest, parameters {name: {shape, dtype}}, files {name: size}."""
    description = read_json(path / DESCRIPTION)
    if description.get("format") not in (1, FORMAT):
        raise ValueError(
            f"{path} has checkpoint format {description.get('format')!r}, this one reads 1 and {FORMAT}; convert its "
            "source again with this version"
        )
    groups = (("groups", list),) if description["format"] == FORMAT else ()
    for field, kind in (("dtype", str), ("parameters", dict), ("files", dict), *groups):
        if not isinstance(description.get(field), kind):
            raise ValueError(f"{path / DESCRIPTION} lacks `{field}`; copy or convert the checkpoint again")
    for name in (*description["parameters"], *description["files"]):
        name_inside(name, path / DESCRIPTION)
    odd = sorted(name for name, entry in description["parameters"].items() if not _is_parameter(entry))
    if odd:
        raise ValueError(
            f"{path / DESCRIPTION} has no shape or no known dtype of {shown(odd)}; convert the checkpoint again"
        )
    if groups and not _are_groups(description["groups"], description["parameters"]):
        raise ValueError(
            f"{path / DESCRIPTION} has groups that do not name each parameter once; convert the checkpoint again"
        )
    return description


def _is_parameter(entry: Any) -> bool:
    try:
        dtype = np.dtype(entry["dtype"])
        whole = isinstance(entry["shape"], list) and all(type(size) is int and size >= 0 for size in entry["shape"])
        return whole and dtype.name == entry["dtype"] and jnp.issubdtype(dtype, jnp.number)
    except (TypeError, KeyError):
        return False


def _are_groups(groups: list[Any], parameters: Mapping[str, Any]) -> bool:
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in groups):
        return False
    return sorted(name for names in groups for name in names) == sorted(parameters)


def _check_parameters(path: Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    stored = read_description(path)["parameters"]
    problems = [f"{name} is missing" for name in targets if name not in stored]
    problems += [f"{name} is left over: the model has no such parameter" for name in stored if name not in targets]
    for name in stored.keys() & targets.keys():
        have, want = stored[name]["shape"], list(targets[name].shape)
        if have != want:
            problems.append(f"{name} is {have}; the model wants {want}")
    if problems:
        raise ValueError(
            f"{path} does not fit the model, {len(problems)} mismatches "
            "(convert it again with this version, or check config.json):\n  " + listed(sorted(problems))
        )


def _check_files(path: Path) -> None:
    """Raises ValueError naming files that are missing or of another length (a copy that was cut short)."""
    wanted, found = read_description(path)["files"], file_sizes(path / PARAMS)
    damaged = sorted(name for name, size in wanted.items() if found.get(name) != size)
    if damaged:
        raise ValueError(
            f"{path / PARAMS} is damaged, missing or truncated are {shown(damaged)}; copy the checkpoint again"
        )


def _forget_place(params: Path) -> None:
    """Orbax notes in this file where it wrote, an absolute path; that it is there is all that is read again."""
    marker = params / "commit_success.txt"
    if marker.exists():
        marker.write_text("Checkpoint commit was successful", encoding="utf-8")


def file_sizes(folder: Path) -> dict[str, int]:
    return {f.relative_to(folder).as_posix(): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}


def group_folder(group: int) -> str:
    """The name of a group's folder in params/."""
    return f"{group:05d}"


@contextlib.contextmanager
def _checkpointer(largest_bytes: int) -> Iterator[tuple[Any, Any]]:
    """(an Orbax checkpointer of one tree of arrays, the orbax.checkpoint module); what is in flight is bounded by 1 GiB
    or by the largest array, the least that Orbax accepts."""
    import orbax.checkpoint as ocp

    limit = 1 + largest_bytes // 2**30
    handler = ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=limit, save_device_host_concurrent_gb=limit, restore_concurrent_gb=limit
    )
    with ocp.Checkpointer(handler) as checkpointer:
        yield checkpointer, ocp
