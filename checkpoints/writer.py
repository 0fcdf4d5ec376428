"""Writing our own checkpoint folder, group by group, so that an interrupted conversion goes on.

While it is written the folder is .NAME.part beside its place:

    plan.json       what is being written: equal plans go on, another one begins anew
    params/00007    a group of parameters, an Orbax folder, renamed here when it is whole
    done/00007      its record, JSON; a group without one is written again

`Writer.finish` adds companions and description and renames the folder: it appears whole or not at all.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.folder import check_space, copy_companions
from checkpoints.orbax_folder import DESCRIPTION, FORMAT, PARAMS, check_free, file_sizes, group_folder, save_arrays
from checkpoints.stored_weight import weight_of_leaf
from ferrum_jax.io.files.json_files import read_json
from ferrum_jax.io.files.whole_files import write_whole

GROUP_BYTES = 1 << 29  # what is in memory at once, unless a single parameter is larger
Params = Mapping[str, jax.Array | np.ndarray]


def save(path: Path, params: Params, *, companions: Path, source_digest: str = "") -> None:
    """Writes the checkpoint folder `path`, atomically.

    params: by dotted path. companions: the folder whose config.json, generation_config.json, tokenizer files and the
    like are copied. source_digest: what the weights were made from, for the record.
    Raises ValueError when `path` is there and not empty, or when `companions` has no config.json.
    """
    described = {name: describe(array.shape, array.dtype) for name, array in params.items()}
    with open_writer(path, described, {"source_digest": source_digest}) as writer:
        for group, names in enumerate(writer.groups):
            if writer.record(group) is None:
                writer.write(group, {name: params[name] for name in names}, {})
        writer.finish(companions)


def describe(shape: Sequence[int], dtype: Any) -> dict[str, Any]:
    """A parameter or tensor as ferrum_jax.json has it."""
    return {"shape": list(shape), "dtype": np.dtype(dtype).name}


class Writer:
    """A folder in the making. groups: names of the parameters that are written together."""

    def __init__(self, path: Path, part: Path, plan: Mapping[str, Any]) -> None:
        self.groups: list[list[str]] = plan["groups"]
        self._path = path
        self._part = part
        self._plan = plan

    def record(self, group: int) -> dict[str, Any] | None:
        """The record that `write` was given with a group, or None where the group is not whole."""
        file = self._done(group)
        return read_json(file) if file.exists() else None

    def write(self, group: int, params: Params, record: Mapping[str, Any]) -> None:
        """Writes a group; after this a kill of the process does not lose it."""
        folder = self._part / PARAMS / group_folder(group)
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed before its record
        save_arrays(folder, params)
        write_whole(self._done(group), json.dumps(record).encode(), lasts=False)

    def finish(self, companions: Path, leftovers: Mapping[str, np.ndarray] | None = None) -> None:
        """Puts the folder in its place. leftovers: tensors of the source that the parameters do not say."""
        from checkpoints.huggingface import LEFTOVERS, write_tensors

        copy_companions(companions, self._part)
        if leftovers:
            views = write_tensors(self._part / LEFTOVERS, {n: (a.shape, a.dtype) for n, a in leftovers.items()})
            for name, array in leftovers.items():
                views[name][...] = array
        parameters = self._plan["parameters"]
        dense = [entry["dtype"] for name, entry in parameters.items() if weight_of_leaf(name) is None]
        dtypes = dense or [entry["dtype"] for entry in parameters.values()]
        description = {
            **self._plan,
            "format": FORMAT,
            "dtype": max(sorted(set(dtypes)), key=dtypes.count),
            "files": file_sizes(self._part / PARAMS),
        }
        text = json.dumps(description, indent=1)
        (self._part / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        (self._part / "plan.json").unlink()
        shutil.rmtree(self._part / "done")
        os.replace(self._part, self._path)

    def _done(self, group: int) -> Path:
        return self._part / "done" / f"{group_folder(group)}.json"


@contextlib.contextmanager
def open_writer(path: Path, parameters: Mapping[str, Mapping[str, Any]], source: Mapping[str, Any]) -> Iterator[Writer]:
    """A Writer of these parameters; an error leaves nothing behind, a kill what is done.

    parameters: as `describe` gives them. source: what else decides every byte that is written; it goes into the
    description. Raises ValueError when `path` is there and not empty, when another process is writing it, and when the
    disk has too little room; nothing is written then.
    """
    check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f".{path.name}.part"
    plan = {
        "parameters": dict(sorted(parameters.items())),
        "groups": list(_grouped(_sizes(parameters), GROUP_BYTES)),
        **source,
    }
    with _locked(part.with_suffix(".lock")):
        if not (part / "plan.json").exists() or read_json(part / "plan.json") != plan:
            shutil.rmtree(part, ignore_errors=True)
        writer, sizes = Writer(path, part, plan), _sizes(parameters)
        left = [names for group, names in enumerate(writer.groups) if writer.record(group) is None]
        check_space(path.parent, sum(sizes[name] for names in left for name in names))
        if not part.exists():
            for folder in (PARAMS, "done"):
                (part / folder).mkdir(parents=True)
            (part / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        try:
            yield writer
        except Exception:
            shutil.rmtree(part)
            raise


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(file, "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process holds {file}: it is writing this checkpoint") from error
        try:
            yield
        finally:
            file.unlink()


def _sizes(parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Bytes of each parameter, as a description has them."""
    return {
        name: int(np.prod(entry["shape"], dtype=np.int64)) * np.dtype(entry["dtype"]).itemsize
        for name, entry in parameters.items()
    }


def _grouped(nbytes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """All names, largest first, in groups of at most the largest parameter or `limit` bytes."""
    limit = max([limit, *nbytes.values()])
    group: list[str] = []
    for name, size in sorted(nbytes.items(), key=lambda entry: -entry[1]):
        if group and sum(nbytes[n] for n in group) + size > limit:
            yield group
            group = []
        group.append(name)
    if group:
        yield group
