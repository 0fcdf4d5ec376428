"""Hugging Face folders: config.json and one or several safetensors files.

`map_tensors` maps every file and gives each tensor as a NumPy view of its pages: nothing is read until it
is used, and what is read is the kernel's page cache, not our memory. `load` renames, takes apart, stacks and casts the
views into device arrays. Peak anonymous host memory is that of the device arrays that live on the host, plus
nothing but two parameters in flight.
"""

import glob
import json
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from checkpoints.file_names import name_inside
from checkpoints.fingerprints import check_copies_of_head
from checkpoints.formats import Scheme, join
from checkpoints.formats.quantise import quantised
from checkpoints.names.problems import listed, shown
from checkpoints.placement import form_problems, made_forms, place_all, stored_targets, whole_targets
from checkpoints.remote import RemoteArray, RemoteFolder
from checkpoints.rules import Expansion, Rule, Shape, StoredTensor, as_stored, match
from ferrum_jax.io.files.json_files import parse_json, read_json

INDEX = "model.safetensors.index.json"
LEFTOVERS = "leftovers.safetensors"  # in our own folder: tensors that its parameters do not say
SHARD_BYTES = 5 * 10**9  # of a file that is written
SINGLE = "model.safetensors"
_MAX_AXES, _LONGEST_NAME = 32, 1024
_LONGEST_HEADER = 8 + 100_000_000  # bytes; the format's own limit

# Source: the safetensors format's dtype names. Whole numbers are here because leftovers may have them.
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def load(
    folder: Path | RemoteFolder,
    *,
    rules: Sequence[Rule],
    harmless: Iterable[str],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    expansions: Mapping[str, Expansion] = MappingProxyType({}),
    scheme: Scheme | None = None,
) -> dict[str, jax.Array]:
    """{parameter: array} with exactly the shapes, dtypes and shardings of `targets`.

    expansions: of targets that are longer than their tensors. scheme: of quantised tensors.
    Raises one ValueError for all mismatches between tensors, rules and targets, before anything is loaded.
    """
    found = map_tensors(folder)
    sources = sources_of(
        join(found, scheme),
        rules=rules,
        harmless=(*harmless, *_unlisted(folder, found)),
        targets=stored_targets(targets, expansions),
        has_scheme=scheme is not None,
    )
    return place_all(sources, targets, expansions)


def sources_of(
    tensors: Mapping[str, Any],
    *,
    rules: Sequence[Rule],
    harmless: Iterable[str],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    has_scheme: bool,
) -> dict[str, list[Any]]:
    """{weight: what it is read from}, of all targets. has_scheme: config.json says of forms; else dense weights are
    quantised to those of the targets. Raises ValueError as `match_tensors` and `check_copies_of_head`, and where forms
    differ."""
    harmless = tuple(harmless)
    plan = match_tensors(tensors, rules=rules, harmless=harmless, targets=whole_targets(targets))
    check_copies_of_head(tensors, harmless, plan)
    sources = {name: [part.of(tensors) for part in parts] for name, parts in plan.items()}
    if not has_scheme:
        for name, form in made_forms(targets).items():
            sources[name] = [quantised(name, source, form) for source in sources[name]]
    problems = form_problems(sources, targets, "config.json")
    if problems:
        raise ValueError(
            f"the checkpoint's weights are not in the form of its config.json, {len(problems)} mismatches:\n  "
            + listed(problems)
        )
    return sources


def match_tensors(
    tensors: Mapping[str, Any],
    *,
    rules: Sequence[Rule],
    harmless: Iterable[str],
    targets: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, tuple[StoredTensor, ...]]:
    """{parameter: its sources}. Raises ValueError as `rules.match` does, and for weights not floats."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    plan = match(as_stored(rules, tensors), harmless, shapes, {name: target.shape for name, target in targets.items()})
    used = [source.name for sources in plan.values() for source in sources]
    whole = [f"{name} {tensors[name].dtype}" for name in dict.fromkeys(used) if not _is_float(tensors[name].dtype)]
    if whole:
        raise ValueError(f"weights must be floats, but these are not (a quantised checkpoint?): {listed(whole)}")
    return plan


def map_tensors(folder: Path | RemoteFolder) -> dict[str, Any]:
    """{tensor name: view of the mapped file, or RemoteArray} of all the folder's safetensors files.

    A tensor that the index lists is that of the file it names; what it does not list comes from the last file that has
    it. Raises ValueError naming a file that is missing, truncated, or lacks what the index says of it.
    """
    local = folder if isinstance(folder, Path) else folder.path

    def open_file(name: str) -> dict[str, Any]:
        return map_file(folder / name) if isinstance(folder, Path) else map_remote_file(folder, name)

    if not (local / INDEX).is_file():
        if not ((folder / SINGLE).is_file() if isinstance(folder, Path) else SINGLE in folder.sizes):
            raise ValueError(f"{local} has neither {SINGLE} nor {INDEX}; save the model's weights as safetensors")
        return open_file(SINGLE)
    index = _weight_map(local)
    tensors: dict[str, Any] = {}
    for file in weight_files(local):
        found = open_file(file)
        missing = {name for name, holder in index.items() if holder == file} - found.keys()
        if missing:
            unlisted = shown(sorted(found.keys() - index.keys()))
            raise ValueError(
                f"{file} differs from {local / INDEX}: missing {shown(sorted(missing))}, not listed {unlisted}; copy "
                "the checkpoint again"
            )
        tensors |= {name: tensor for name, tensor in found.items() if index.get(name, file) == file}
    return tensors


def _unlisted(folder: Path | RemoteFolder, tensors: Iterable[str]) -> list[str]:
    """Patterns of the tensors that the index leaves out: no model needs to read them."""
    local = folder if isinstance(folder, Path) else folder.path
    index = _weight_map(local) if (local / INDEX).is_file() else None
    return [] if index is None else [glob.escape(name) for name in tensors if name not in index]


def has_weights(folder: Path) -> bool:
    """Whether all files of the weights are there, and not a config.json alone."""
    return all((folder / name).is_file() for name in weight_files(folder))


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that make up the weights: those of the index, or the single one without it.

    Raises ValueError for an index that is damaged or leads out of the folder.
    """
    if not (folder / INDEX).is_file():
        return [SINGLE]
    return [name_inside(file, folder / INDEX) for file in sorted(set(_weight_map(folder).values()))]


def _weight_map(folder: Path) -> dict[str, str]:
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from tensor to file; copy the checkpoint again")
    return index


def map_file(path: Path) -> dict[str, np.ndarray]:
    """{tensor name: view} of one file. Raises ValueError naming it when it is missing, truncated or damaged."""
    try:
        with safetensors.safe_open(path, framework="numpy"):  # checks header, offsets and length
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is missing, truncated or damaged ({error}); copy the checkpoint again") from error
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        pages = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    entries = _entries(header, path)
    return {
        name: pages[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        .view(_DTYPES[entry["dtype"]])
        .reshape(entry["shape"])
        for name, entry in entries.items()
    }


def _entries(header: dict[str, Any], file: Path | str) -> dict[str, dict[str, Any]]:
    """Dtype, shape and place of each tensor. Raises ValueError for dtypes that are not supported."""
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    unknown = sorted(f"{name} {entry['dtype']}" for name, entry in entries.items() if entry["dtype"] not in _DTYPES)
    if unknown:
        raise ValueError(f"{file} holds tensors of dtypes that are not supported: {shown(unknown)}")
    if odd := [name for name, entry in entries.items() if len(entry["shape"]) > _MAX_AXES or len(name) > _LONGEST_NAME]:
        raise ValueError(
            f"{file} holds tensors of more than {_MAX_AXES} axes, or with names of more than {_LONGEST_NAME} "
            f"characters: {shown(odd)}; copy the checkpoint again"
        )
    return entries


def map_remote_file(folder: RemoteFolder, name: str) -> dict[str, RemoteArray]:
    """The tensors of a remote file; only its header is read."""
    file = f"{folder.url}/{name}"
    if name not in folder.sizes:
        raise ValueError(f"{file} is missing; copy the checkpoint again")
    try:
        start = 8 + int.from_bytes(folder.read(name, 0, 8), "little")
        if start > min(folder.sizes[name], _LONGEST_HEADER):
            raise ValueError("its header ends beyond it, or is longer than the format allows")
        entries = _entries(parse_json(folder.read(name, 8, start)), file)
        for entry in entries.values():
            _check_entry(entry)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is truncated or damaged ({error}); copy the checkpoint again") from error
    if start + max((entry["data_offsets"][1] for entry in entries.values()), default=0) != folder.sizes[name]:
        raise ValueError(f"{file} is truncated: its length is not what its header says; copy the checkpoint again")
    read = folder.reader(name)
    return {
        tensor: RemoteArray(read, start + entry["data_offsets"][0], _DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for tensor, entry in entries.items()
    }


def _check_entry(entry: dict[str, Any]) -> None:
    """Raises ValueError for a tensor whose place in a file is not as long as its shape and dtype say."""
    begin, end = entry["data_offsets"]
    whole = all(type(number) is int and number >= 0 for number in (begin, end, *entry["shape"]))
    if not whole or end - begin != math.prod(entry["shape"]) * np.dtype(_DTYPES[entry["dtype"]]).itemsize:
        raise ValueError("its header names places that do not fit the shapes")


def write_folder(folder: Path, tensors: Mapping[str, tuple[Shape, np.dtype]]) -> dict[str, np.ndarray]:
    """{name: view of a mapped file}, zeros to be filled, of new safetensors files in the folder, with their index."""
    shards: list[dict[str, tuple[Shape, np.dtype]]] = [{}]
    filled = 0
    for name, (shape, dtype) in sorted(tensors.items()):
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if filled and filled + size > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = (shape, dtype)
        filled += size
    if len(shards) == 1:
        return write_tensors(folder / SINGLE, shards[0])
    views: dict[str, np.ndarray] = {}
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        views |= write_tensors(folder / file, shard)
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": sum(view.nbytes for view in views.values())}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return views


def write_tensors(file: Path, tensors: Mapping[str, tuple[Shape, np.dtype]]) -> dict[str, np.ndarray]:
    """Arrays mapped from a new file of these tensors. Source: the safetensors format: header's length, header, data."""
    spelled = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, dtype) in tensors.items():
        end = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": spelled[np.dtype(dtype)], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8
    start = 8 + len(text)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(start + offset)
    if not offset:
        return {name: np.empty(shape, dtype) for name, (shape, dtype) in tensors.items()}
    pages = np.memmap(file, np.uint8, mode="r+", offset=0)
    return {
        name: pages[start + header[name]["data_offsets"][0] : start + header[name]["data_offsets"][1]]
        .view(dtype)
        .reshape(shape)
        for name, (shape, dtype) in tensors.items()
    }


def _is_float(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)
