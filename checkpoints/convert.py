"""From a Hugging Face folder to our own checkpoint folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from checkpoints import huggingface, mxfp4, store
from checkpoints.fingerprint import fingerprint
from checkpoints.folder import read_json
from checkpoints.placement import place
from checkpoints.rules import Rule

_CHUNK = 1 << 20  # elements compared at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertSummary:
    """What was written. max_cast_error: largest |written - source| over all finite weights, 0 without a cast."""

    tensors: int
    parameters: int
    bytes: int
    dtype: str
    max_cast_error: float
    source_digest: str


def convert(
    hf_dir: str | Path,
    out_dir: str | Path,
    *,
    rules: Sequence[Rule],
    harmless: Iterable[str],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    dtype: str | None = None,
) -> ConvertSummary:
    """Writes `out_dir` from the Hugging Face folder `hf_dir`, atomically.

    targets: the model's parameters. dtype: what all of them are stored in; None takes each target's own.
    Raises ValueError when `out_dir` is there and not empty, when the weights do not fit the targets, and
    when a finite weight does not fit the dtype.
    """
    source, out = Path(hf_dir), Path(out_dir)
    store.check_free(out)
    config = read_json(source / "config.json")
    wanted = {name: jax.ShapeDtypeStruct(t.shape, dtype or t.dtype, sharding=t.sharding) for name, t in targets.items()}
    stored = huggingface.map_tensors(source)
    tensors = mxfp4.join(stored)
    plan = huggingface.match_tensors(tensors, rules=rules, harmless=harmless, targets=wanted)
    params: dict[str, jax.Array] = {}
    error = 0.0
    for name, target in wanted.items():
        sources = [source.of(tensors) for source in plan[name]]
        params[name] = place(sources, target)
        error = max(error, _cast_error(name, sources, np.asarray(params[name])))
    digest = fingerprint(json.dumps(config, sort_keys=True), "", stored)
    store.save(out, params, companions=source, source_digest=digest)
    return ConvertSummary(
        tensors=len({source.name for sources in plan.values() for source in sources}),
        parameters=len(params),
        bytes=sum(array.nbytes for array in params.values()),
        dtype=store.read_description(out)["dtype"],
        max_cast_error=error,
        source_digest=digest,
    )


def _cast_error(name: str, sources: Sequence[np.ndarray], written: np.ndarray) -> float:
    """Largest |written - source|, in float64, a chunk at a time. Raises ValueError when a weight became infinite."""
    if all(source.dtype == written.dtype for source in sources):
        return 0.0
    worst = 0.0
    for source, row in zip(sources, written.reshape(len(sources), -1), strict=True):
        flat = np.asarray(source).reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            before = flat[start : start + _CHUNK].astype(np.float64)
            after = row[start : start + _CHUNK].astype(np.float64)
            finite = np.isfinite(before)
            worst = max(worst, float(np.max(np.abs(after - before), where=finite, initial=0.0)))
    if not np.isfinite(worst):
        raise ValueError(f"{name} has weights beyond the range of {written.dtype}; convert to bfloat16 or float32")
    return worst
