"""From a Hugging Face folder to our own checkpoint folder, and back: tensor by tensor, in constant memory."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from checkpoints import huggingface, mxfp4, store
from checkpoints.fingerprint import fingerprint
from checkpoints.folder import check_space, copy_companions, read_json
from checkpoints.placement import place
from checkpoints.remote import RemoteFolder, is_url
from checkpoints.rules import BASE, Rule, Shape, Source, expand, of_base_model
from checkpoints.writer import describe, open_writer

_CHUNK = 1 << 20  # elements compared at a time
_OWN_DTYPES = ("float32", "bfloat16", "float16")  # weights of these stay as they are unless a dtype is asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class CastError:
    """What a cast did to the finite weights of one class of parameters, those of all layers together.

    largest: |written - source|. relative_rms: sqrt(Σ (written - source)² / Σ source²).
    """

    parameters: str
    largest: float
    relative_rms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertSummary:
    """What was written. max_cast_error: largest |written - source| over all finite weights, 0 without a cast.

    cast_errors: of the classes that were cast, the largest relative one first. num_resumed: groups of parameters that
    an interrupted conversion had written.
    """

    tensors: int
    parameters: int
    bytes: int
    dtype: str
    max_cast_error: float
    cast_errors: tuple[CastError, ...]
    source_digest: str
    num_resumed: int


def convert(
    hf_dir: str | Path,
    out_dir: str | Path,
    *,
    rules: Sequence[Rule],
    harmless: Iterable[str],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    dtype: str | None = None,
) -> ConvertSummary:
    """Writes `out_dir` from the Hugging Face folder `hf_dir`, or its URL; one that was interrupted goes on.

    targets: the model's parameters. dtype: what all of them are stored in; None takes that of their tensors.
    What is in memory at once is the largest parameter, or `writer.GROUP_BYTES`, and as much again while it is written:
    1.0 GB where 1.2 GB are written, and where 2.4 are.
    Raises ValueError when `out_dir` is there and not empty, when the weights do not fit the targets, and
    when a finite weight does not fit the dtype.
    """
    out = Path(out_dir)
    store.check_free(out)
    remote = RemoteFolder(str(hf_dir)) if is_url(str(hf_dir)) else None
    source = Path(hf_dir) if remote is None else remote.path
    config = read_json(source / "config.json")
    stored = huggingface.map_tensors(remote or source)
    tensors = mxfp4.join(stored)
    plan = huggingface.match_tensors(tensors, rules=rules, harmless=harmless, targets=targets)
    wanted = {
        name: jax.ShapeDtypeStruct(target.shape, dtype or _dtype_of(plan[name], tensors) or target.dtype)
        for name, target in targets.items()
    }
    used = {part.name for parts in plan.values() for part in parts}
    digest = fingerprint(json.dumps(config, sort_keys=True), "", stored)
    about = {
        "source_digest": digest,
        "source_shapes": {name: list(stored[name].shape) for name in sorted(used & stored.keys())},
    }
    errors: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    resumed = 0
    with open_writer(out, {n: describe(t.shape, t.dtype) for n, t in wanted.items()}, about) as writer:
        for group, names in enumerate(writer.groups):
            record = writer.record(group)
            resumed += record is not None
            if record is None:
                params, record = {}, {}
                for name in names:
                    sources = [part.of(tensors) for part in plan[name]]
                    params[name] = place(sources, wanted[name])
                    record[name] = _cast_error(name, sources, np.asarray(params[name]))
                writer.write(group, params, record)
            for name, (largest, error, size) in record.items():
                old = errors[re.sub(r"\.\d+\.", ".*.", name)]
                old[:] = max(old[0], largest), old[1] + error, old[2] + size
        writer.finish(source, {name: array for name, array in stored.items() if name not in used})
    found = [
        CastError(parameters=name, largest=largest, relative_rms=(error / size) ** 0.5 if size else 0.0)
        for name, (largest, error, size) in errors.items()
        if largest > 0
    ]
    return ConvertSummary(
        tensors=len(used),
        parameters=len(wanted),
        bytes=sum(t.size * np.dtype(t.dtype).itemsize for t in wanted.values()),
        dtype=store.read_description(out)["dtype"],
        max_cast_error=max((error.largest for error in found), default=0.0),
        cast_errors=tuple(sorted(found, key=lambda error: -error.relative_rms)),
        source_digest=digest,
        num_resumed=resumed,
    )


def to_huggingface(path: str | Path, out_dir: str | Path, *, rules: Sequence[Rule]) -> int:
    """Writes our checkpoint `path` as a Hugging Face folder, atomically; how many tensors that were.

    Tensors have the names and bits of the source, and its dtypes where the conversion did not cast; packed ones are
    those that the conversion kept. One parameter is in memory at a time. Raises ValueError when `out_dir` is there and
    not empty, for parameters that cannot go back (MXFP4 that an earlier version did not keep), and where the disk has
    too little room: a mapped file that does not fit ends the process.
    """
    source, out = Path(path), Path(out_dir)
    store.check_free(out)
    description = store.read_description(source)
    rules = of_base_model(rules, description.get("source_shapes") or [BASE])
    plan = expand(rules)
    stacked = {target for rule in rules if rule.experts for target, _ in rule.expand()}
    leftovers = huggingface.map_file(source / huggingface.LEFTOVERS) if _has_leftovers(source) else {}
    kept = [target for target, parts in plan.items() if all(mxfp4.is_packed(part.name, leftovers) for part in parts)]
    shapes = _source_tensors(plan, stacked, description, kept)
    shapes_of_all = shapes | {n: (a.shape, a.dtype) for n, a in leftovers.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    check_space(out.parent, sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes_of_all.values()))
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    try:
        copy_companions(source, temporary)
        views = huggingface.write_folder(temporary, shapes_of_all)
        for name, array in leftovers.items():
            views[name][...] = array
        for target, array in store.read_params(source, plan.keys() - kept):
            for part, rows in zip(plan[target], array if target in stacked else [array], strict=True):
                part.of(views)[...] = rows
        del views  # what is mapped is written when nobody holds it
        os.replace(temporary, out)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    return len(shapes_of_all)


def _source_tensors(
    plan: Mapping[str, tuple[Source, ...]], stacked: set[str], description: Mapping[str, dict], kept: Sequence[str]
) -> dict[str, tuple[Shape, np.dtype]]:
    """(shape, dtype) of every tensor that the parameters make, all but those whose tensors were kept."""
    known, found = description.get("source_shapes", {}), {}
    missing = [target for target in plan if target not in description["parameters"]]
    missing += [name for name in description["parameters"] if name not in plan]
    if missing:
        raise ValueError(f"the checkpoint's parameters are not those of its config.json: {sorted(missing)}")
    for target in plan.keys() - kept:
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


def _has_leftovers(path: Path) -> bool:
    return (path / huggingface.LEFTOVERS).is_file()


def _dtype_of(parts: Sequence[Source], tensors: Mapping[str, np.ndarray]) -> str | None:
    """The dtype of all tensors of a parameter, if they share one that weights are kept in."""
    dtypes = {np.dtype(part.of(tensors).dtype).name for part in parts}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= set(_OWN_DTYPES) else None


def _cast_error(name: str, sources: Sequence[np.ndarray], written: np.ndarray) -> tuple[float, float, float]:
    """Largest |written - source|, Σ (written - source)² and Σ source² of the finite weights, in float64.

    A chunk at a time. Raises ValueError when a weight became infinite.
    """
    if all(source.dtype == written.dtype for source in sources):
        return 0.0, 0.0, 0.0
    worst = error = size = 0.0
    for source, row in zip(sources, written.reshape(len(sources), -1), strict=True):
        flat = np.asarray(source).reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            before = flat[start : start + _CHUNK].astype(np.float64)
            after = row[start : start + _CHUNK].astype(np.float64)
            finite = np.isfinite(before)
            off = np.abs(after - before, where=finite, out=np.zeros_like(before))
            worst = max(worst, float(off.max(initial=0.0)))
            error += float(np.sum(off * off))
            size += float(np.sum(np.square(before, where=finite, out=np.zeros_like(before))))
    if not np.isfinite(worst):
        raise ValueError(f"{name} has weights beyond the range of {written.dtype}; convert to bfloat16 or float32")
    return worst, error, size
