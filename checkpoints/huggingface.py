"""Hugging Face folders: config.json and one or several safetensors files.

`map_tensors` maps every file and gives each tensor as a NumPy view of its pages: nothing is read until it
is used, and what is read is the kernel's page cache, not our memory. `load` renames, takes apart, stacks and casts the
views into device arrays, one parameter after the other. Peak anonymous host memory is that of the device
arrays that live on the host, plus nothing but one parameter in flight.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from checkpoints import mxfp4
from checkpoints.folder import read_json
from checkpoints.mxfp4 import Mxfp4
from checkpoints.placement import place, stored_targets
from checkpoints.rules import Rule, Source, Stretch, match

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Source: the safetensors format's dtype names. Whole numbers are here because leftovers may have them.
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
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
    folder: Path,
    *,
    rules: Sequence[Rule],
    harmless: Iterable[str],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    stretches: Mapping[str, Stretch] = MappingProxyType({}),
) -> dict[str, jax.Array]:
    """{parameter: array} with exactly the shapes, dtypes and shardings of `targets`.

    stretches: of targets that are longer than their tensors.
    Raises one ValueError for all mismatches between tensors, rules and targets, before anything is loaded.
    """
    tensors = mxfp4.join(map_tensors(folder))
    stored = stored_targets(targets, stretches)
    plan = match_tensors(tensors, rules=rules, harmless=harmless, targets=stored)
    return {
        name: place([source.of(tensors) for source in plan[name]], target, stretches.get(name))
        for name, target in targets.items()
    }


def match_tensors(
    tensors: Mapping[str, np.ndarray | Mxfp4],
    *,
    rules: Sequence[Rule],
    harmless: Iterable[str],
    targets: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, tuple[Source, ...]]:
    """{parameter: its sources}. Raises ValueError as `rules.match` does, and for weights not floats."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    plan = match(rules, harmless, shapes, {name: target.shape for name, target in targets.items()})
    used = [source.name for sources in plan.values() for source in sources]
    whole = [f"{name} {tensors[name].dtype}" for name in dict.fromkeys(used) if not _is_float(tensors[name].dtype)]
    if whole:
        raise ValueError(f"weights must be floats, but these are not (a quantised checkpoint?): {', '.join(whole)}")
    return plan


def map_tensors(folder: Path) -> dict[str, np.ndarray]:
    """{tensor name: view of the mapped file} of all the folder's safetensors files.

    Raises ValueError naming the file that is missing, truncated, or that differs from the index.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}; save the model's weights as safetensors")
        return _map_file(folder / SINGLE)
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from tensor to file; copy the checkpoint again")
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(set(index.values())):
        found = _map_file(folder / file)
        listed = {name for name, holder in index.items() if holder == file}
        if listed != found.keys():
            raise ValueError(
                f"{folder / file} differs from {INDEX}: missing {sorted(listed - found.keys())}, "
                f"not listed {sorted(found.keys() - listed)}; copy the checkpoint again"
            )
        tensors |= found
    return tensors


def _map_file(path: Path) -> dict[str, np.ndarray]:
    try:
        with safetensors.safe_open(path, framework="numpy"):  # checks header, offsets and length
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is missing, truncated or damaged ({error}); copy the checkpoint again") from error
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        pages = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    header.pop("__metadata__", None)
    unknown = sorted(f"{name} {entry['dtype']}" for name, entry in header.items() if entry["dtype"] not in _DTYPES)
    if unknown:
        raise ValueError(f"{path} holds tensors of dtypes that are not supported: {', '.join(unknown)}")
    return {
        name: pages[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        .view(_DTYPES[entry["dtype"]])
        .reshape(entry["shape"])
        for name, entry in header.items()
    }


def _is_float(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)
