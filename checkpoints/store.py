"""Our own checkpoint folder: Orbax arrays, the files beside them, and one description.

    config.json, generation_config.json, tokenizer files    as in the source, byte for byte
    ferrum_jax.json    format version, dtype, digest of the source, every parameter's shape and dtype,
                       and the length of every file of params/
    params/            Orbax (OCDBT, zstd), one entry per parameter, keyed by its dotted path

A folder appears whole or not at all: it is written beside its place and renamed. The only module that
knows Orbax; it is imported when first used, because a start from a Hugging Face folder does without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.folder import copy_companions, read_json
from checkpoints.placement import place, stored_targets
from checkpoints.rules import Stretch

FORMAT = 1
DESCRIPTION = "ferrum_jax.json"
PARAMS = "params"
_CHUNK_BYTES = 1 << 25  # what is compressed and read as one
_GROUPS = 100  # restored in about so many parts; what is in flight is two to three times one of them


def save(
    path: Path, params: Mapping[str, jax.Array | np.ndarray], *, companions: Path, source_digest: str = ""
) -> None:
    """Writes the checkpoint folder `path`, atomically.

    params: by dotted path. companions: the folder whose config.json, generation_config.json and tokenizer
    files are copied. source_digest: what the weights were made from, for the record.
    Raises ValueError when `path` is there and not empty, or when `companions` has no config.json.
    """
    check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    try:
        copy_companions(companions, temporary)
        with _checkpointer(max(array.nbytes for array in params.values())) as (checkpointer, ocp):
            how = dict.fromkeys(params, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
            checkpointer.save(temporary.absolute() / PARAMS, args=ocp.args.PyTreeSave(dict(params), save_args=how))
        _forget_place(temporary / PARAMS)
        description = _description(params, source_digest) | {"files": _file_sizes(temporary / PARAMS)}
        text = json.dumps(description, indent=1)
        (temporary / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def check_free(path: Path) -> None:
    """Raises ValueError unless `path` does not exist or is an empty folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an empty folder; name another output or remove it first")


def restore(
    path: Path,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    stretches: Mapping[str, Stretch] = MappingProxyType({}),
) -> dict[str, jax.Array]:
    """{parameter: array} with exactly the shapes, dtypes and shardings of `targets`, cast where dtypes differ.

    stretches: of targets that are longer than what is stored; those are read whole into host memory first.
    Raises one ValueError for all parameters missing, left over or of another shape, and a ValueError
    naming the folder when its data is damaged.
    """
    _check_parameters(path, stored_targets(targets, stretches))
    _check_files(path)
    nbytes = {name: int(np.prod(t.shape, dtype=np.int64)) * np.dtype(t.dtype).itemsize for name, t in targets.items()}
    default = jnp.zeros(()).sharding
    params: dict[str, jax.Array] = {}
    try:
        with _checkpointer(max(nbytes.values())) as (checkpointer, ocp):
            for names in _groups(nbytes):
                item = {n: jax.ShapeDtypeStruct(targets[n].shape, targets[n].dtype) for n in names}
                how = {
                    n: ocp.RestoreArgs(restore_type=np.ndarray)
                    if n in stretches
                    else ocp.ArrayRestoreArgs(sharding=targets[n].sharding or default, dtype=targets[n].dtype)
                    for n in names
                }
                part = ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
                params |= checkpointer.restore(path.absolute() / PARAMS, args=part)
                for n in stretches.keys() & set(names):
                    params[n] = place([np.asarray(params[n])], targets[n], stretches[n])
                jax.block_until_ready([params[n] for n in names])
    except Exception as error:  # what Orbax raises for damaged data is a bare Exception
        raise ValueError(f"{path / PARAMS} cannot be read ({error}); copy or convert the checkpoint again") from error
    return {name: params[name] for name in targets}


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays as a new Orbax folder; names may hold slashes."""
    with _checkpointer(max(array.nbytes for array in arrays.values())) as (checkpointer, ocp):
        how = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(dict(arrays), save_args=how))


def restore_arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of a folder that `save_arrays` wrote, on the host."""
    with _checkpointer(1) as (checkpointer, ocp):
        item = dict.fromkeys(names, 0)
        how = dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
        restored = checkpointer.restore(path.absolute(), args=ocp.args.PyTreeRestore(item, restore_args=how))
    return {name: np.asarray(restored[name]) for name in names}


def read_description(path: Path) -> dict[str, Any]:
    """ferrum_jax.json, checked: format, dtype, source_digest, parameters {name: {shape, dtype}}, files {name: size}."""
    description = read_json(path / DESCRIPTION)
    if description.get("format") != FORMAT:
        raise ValueError(f"{path} has checkpoint format {description.get('format')!r}, this version reads {FORMAT}")
    for field, kind in (("dtype", str), ("parameters", dict), ("files", dict)):
        if not isinstance(description.get(field), kind):
            raise ValueError(f"{path / DESCRIPTION} lacks `{field}`; copy or convert the checkpoint again")
    return description


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
            "(convert it again with this version, or check config.json):\n  " + "\n  ".join(sorted(problems))
        )


def _check_files(path: Path) -> None:
    """Raises ValueError naming files that are missing or of another length (a copy that was cut short)."""
    wanted, found = read_description(path)["files"], _file_sizes(path / PARAMS)
    damaged = sorted(name for name, size in wanted.items() if found.get(name) != size)
    if damaged:
        raise ValueError(f"{path / PARAMS} is damaged, missing or truncated are {damaged}; copy the checkpoint again")


def _forget_place(params: Path) -> None:
    """Orbax notes in this file where it wrote, an absolute path; that it is there is all that is read again."""
    marker = params / "commit_success.txt"
    if marker.exists():
        marker.write_text("Checkpoint commit was successful", encoding="utf-8")


def _file_sizes(folder: Path) -> dict[str, int]:
    return {f.relative_to(folder).as_posix(): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}


def _description(params: Mapping[str, jax.Array | np.ndarray], source_digest: str) -> dict[str, Any]:
    dtypes = [str(array.dtype) for array in params.values()]
    return {
        "format": FORMAT,
        "dtype": max(sorted(set(dtypes)), key=dtypes.count),
        "source_digest": source_digest,
        "parameters": {n: {"shape": list(a.shape), "dtype": str(a.dtype)} for n, a in sorted(params.items())},
    }


def _groups(nbytes: Mapping[str, int]) -> Iterator[list[str]]:
    """All names, largest first, in groups of at most the largest parameter or 1/_GROUPS of all bytes.

    Largest first: the buffers in flight are a few times the group, and then little else is there yet.
    """
    limit = max(max(nbytes.values()), sum(nbytes.values()) // _GROUPS)
    group: list[str] = []
    for name, size in sorted(nbytes.items(), key=lambda entry: -entry[1]):
        if group and sum(nbytes[n] for n in group) + size > limit:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


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
