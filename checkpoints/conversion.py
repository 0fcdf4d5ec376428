"""From a Hugging Face folder to our own checkpoint folder: tensor by tensor, in constant memory."""

import collections
import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from checkpoints import huggingface, orbax_folder
from checkpoints.adapters.lora import HEAD_PART, Adapter, merged
from checkpoints.fingerprints import fingerprint
from checkpoints.formats import PackedWeight, Scheme, join, scheme_of, stored_scale_dtype
from checkpoints.placement import leaves_of, place
from checkpoints.remote import RemoteFolder
from checkpoints.rules import Rule, as_stored, expand
from checkpoints.stored_weight import WeightForm, weight_of
from checkpoints.writer import Writer, describe, open_writer
from ferrum_jax.io.files.json_files import read_json
from ferrum_jax.io.paths import is_url

_CHUNK = 1 << 20  # elements compared at a time
_OWN_DTYPES = ("float32", "bfloat16", "float16")  # weights of these stay as they are unless a dtype is asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class CastError:
    """Rounding errors of a cast over the finite weights of one class of parameters in all layers.

    largest: |written - source|. relative_rms: sqrt(Σ (written - source)² / Σ source²).
    """

    parameters: str
    largest: float
    relative_rms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertSummary:
    """Sizes and errors of a conversion. max_cast_error: largest |written - source|, 0 without a cast.

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
    forms: Mapping[str, WeightForm] = MappingProxyType({}),
    dtype: str | None = None,
    adapter: Adapter | None = None,
) -> ConvertSummary:
    """Writes `out_dir` from the Hugging Face folder `hf_dir`, or its URL; one that was interrupted goes on.

    targets: the model's parameters; dense weights are quantised where these are leaves of a form. forms: all that is
    known of those forms; where none is given, what the tensors say. dtype: what dense parameters are stored in; None
    takes that of their tensors. adapter: is added to the weights, in float32, before they are rounded.
    Peak memory: twice the larger of the largest parameter and `writer.GROUP_BYTES`.
    Raises ValueError when `out_dir` is there and not empty, when the weights do not fit the targets, and
    when a finite weight does not fit the dtype.
    """
    out = Path(out_dir)
    orbax_folder.check_free(out)
    remote = RemoteFolder(str(hf_dir)) if is_url(str(hf_dir)) else None
    source = Path(hf_dir) if remote is None else remote.path
    config = read_json(source / "config.json")
    stored = huggingface.map_tensors(remote or source)
    scheme = scheme_of(config, stored_scale_dtype({name: x.dtype.name for name, x in stored.items()}))
    tensors = join(stored, scheme)
    sources = huggingface.sources_of(
        tensors, rules=rules, harmless=harmless, targets=targets, has_scheme=scheme is not None
    )
    if adapter is not None:
        _refuse_merge(adapter, sources)
    wanted = _wanted(targets, sources, dtype)
    parts = expand(as_stored(rules, tensors))
    used = {part.name for name in sources for part in parts[name]}
    about_config = json.dumps(config, sort_keys=True) + ("" if adapter is None else f" {adapter.digest}")
    about = {
        "source_digest": fingerprint(about_config, "", stored),
        "source_shapes": {name: list(tensors[name].shape) for name in sorted(used)},
        "forms": {
            name: dataclasses.asdict(forms.get(name, own[0].form)) for name, own in sources.items() if _is_packed(own)
        },
    }
    with open_writer(out, {n: describe(t.shape, t.dtype) for n, t in wanted.items()}, about) as writer:
        errors, resumed = _write(writer, sources, wanted, adapter)
        said = used | _packed_tensors(used, tensors, scheme)
        writer.finish(source, {name: array for name, array in stored.items() if name not in said})
    return ConvertSummary(
        tensors=len(used),
        parameters=len(wanted),
        bytes=sum(t.size * np.dtype(t.dtype).itemsize for t in wanted.values()),
        dtype=orbax_folder.read_description(out)["dtype"],
        max_cast_error=max((error.largest for error in errors), default=0.0),
        cast_errors=tuple(sorted(errors, key=lambda error: -error.relative_rms)),
        source_digest=about["source_digest"],
        num_resumed=resumed,
    )


def _wanted(
    targets: Mapping[str, jax.ShapeDtypeStruct], sources: Mapping[str, Sequence[Any]], dtype: str | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The parameters as they are stored; those of a form keep their numbers."""
    return {
        name: jax.ShapeDtypeStruct(target.shape, dtype or _dtype_of(sources[name]) or target.dtype)
        if name in sources
        else target
        for name, target in targets.items()
    }


def _write(
    writer: Writer,
    sources: Mapping[str, Sequence[Any]],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    adapter: Adapter | None,
) -> tuple[list[CastError], int]:
    """Rounding errors of each class of parameters, and the number of groups that were there already."""
    errors: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    resumed = 0
    for group, names in enumerate(writer.groups):
        record = writer.record(group)
        resumed += record is not None
        if record is None:
            params, record = {}, {}
            for name in names:
                own = leaves_of(sources[weight_of(name)], name)
                own = own if adapter is None else merged(adapter, name, own)
                params[name] = place(own, wanted[name])
                record[name] = _cast_error(name, own, np.asarray(params[name]))
            writer.write(group, params, record)
        for name, (largest, error, size) in record.items():
            old = errors[re.sub(r"\.\d+\.", ".*.", name)]
            old[:] = max(old[0], largest), old[1] + error, old[2] + size
    found = [
        CastError(parameters=name, largest=largest, relative_rms=(error / size) ** 0.5 if size else 0.0)
        for name, (largest, error, size) in errors.items()
        if largest > 0
    ]
    return found, resumed


def _refuse_merge(adapter: Adapter, sources: Mapping[str, Sequence[Any]]) -> None:
    """Raises ValueError where the base has a weight that the adapter cannot be added to."""
    names = [*adapter.parts, *([] if adapter.head is None else [HEAD_PART])]
    if packed := [name for name in names if name in sources and _is_packed(sources[name])]:
        raise ValueError(
            f"{packed[0]} is quantised, and nothing can be added to its codes; serve the adapter beside the base"
        )
    if HEAD_PART in names and HEAD_PART not in sources:
        raise ValueError(
            "the adapter is of the head, which this model shares with its embedding: they cannot be merged"
        )


def _packed_tensors(used: Collection[str], tensors: Mapping[str, Any], scheme: Scheme | None) -> set[str]:
    """Names of what the quantised ones among these weights are stored as."""
    if scheme is None:
        return set()
    bases = [name.removesuffix(scheme.stands_for) for name in used if isinstance(tensors[name], PackedWeight)]
    return {base + end for base in bases for end in (*scheme.marks, *scheme.others)}


def _is_packed(sources: Sequence[Any]) -> bool:
    return isinstance(sources[0], PackedWeight)


def _dtype_of(sources: Sequence[Any]) -> str | None:
    """The dtype of all tensors of a parameter, if they share one that weights are kept in."""
    dtypes = {np.dtype(source.dtype).name for source in sources}
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
