"""The record of a job in its report: all that it takes to compute its lines again, elsewhere and without the journal.

    record   format, input (path, rows, layout), names, created, settings, model, commit, fingerprint, output, loading
    digest   of the whole report, so that a report that was edited is seen

`fingerprint`, which every line carries too, digests settings and model; `output` digests all lines in their order.
`loading` says how the command loaded the model. It is no part of the identity, and may be gone or moved.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.job_folder import JobFolder
from ferrum_jax.batch.journal.job_identity import JobIdentity, fingerprint_of
from ferrum_jax.inputs.identity import digest_of
from ferrum_jax.io.error_text import quoted
from ferrum_jax.io.files.json_files import parse_json
from ferrum_jax.io.files.store import open_store, split
from ferrum_jax.io.paths import is_url

FORMAT = 1
_DIGEST = "digest"  # the report's entry
_LAST_SECOND = 253_402_300_799  # of the year 9999


def job_record(
    place: JobFolder, rows: Rows, job: JobIdentity, input_path: str, loading: Mapping[str, Any]
) -> dict[str, Any]:
    """The record as it stands now. input_path: of the rows, which `loading` may name otherwise, as `input`."""
    path = loading.get("input", input_path)
    return {
        "format": FORMAT,
        "input": {"path": path if is_url(path) else os.path.abspath(path), "rows": len(rows), "layout": rows.layout},
        "names": list(rows.names or ()),
        **job.record(),
        "output": place.digest(rows.layout),
        "loading": {name: value for name, value in loading.items() if name != "input"},
    }


def sealed(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report with its digest, as JSON has it."""
    plain = json.loads(json.dumps(report))
    return {**plain, _DIGEST: digest_of(plain)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A record as it was read from a report, with the report's counts of rows and its environments.

    settings: as `JobSettings.recorded` gives them. model: the identity of the model, None where no row was answered.
    commit: of a hub's model. changes: a sentence for each edit that the report itself shows.
    """

    input: Mapping[str, Any]
    names: Sequence[str]
    created: int
    settings: Mapping[str, Any]
    model: Mapping[str, Any] | None
    commit: str | None
    fingerprint: str | None
    output: str | None
    loading: Mapping[str, Any]
    counts: Mapping[str, Any]
    environments: Sequence[Mapping[str, str]]
    changes: Sequence[str]

    @property
    def name(self) -> str:
        """The model's name, which answers carry."""
        return self.settings["model"]

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.settings.get("adapters") or ())

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self.settings.get("defaults") or {}


def _is(kind: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and not isinstance(value, bool)


def _texts_in(kind: type, value: Any) -> bool:
    """Whether the value is a list of texts, or a dictionary whose values are texts."""
    return isinstance(value, kind) and all(
        isinstance(each, str) for each in (value.values() if isinstance(value, dict) else value)
    )


# the values that the entries of a record may have; an entry that is missing is None
_FITS: Mapping[str, Callable[[Any], bool]] = {
    **{f"input.{name}": _is(kind) for name, kind in (("path", str), ("rows", int), ("layout", str))},
    "names": lambda value: _texts_in(list, value),
    "created": lambda value: _is(int)(value) and 0 <= value <= _LAST_SECOND,
    **{f"settings.{name}": _is(kind) for name, kind in (("model", str), ("seed", int), ("defaults", dict | None))},
    "settings.adapters": lambda value: value is None or _texts_in(list, value),
    **{name: _is(str | None) for name in ("commit", "fingerprint", "output")},
    **{name: _is(dict | None) for name in ("model", "loading", "loading.config")},
    **{f"loading.{name}": _is(str | None) for name in ("model", "revision", "tokenizer")},
    "loading.adapters": lambda value: value is None or _texts_in(dict, value),
    "rows": _is(dict),
    "environments": lambda value: isinstance(value, list) and all(_texts_in(dict, each) for each in value),
}


def record_of(output: str, report_path: str | None) -> JobRecord:
    """The record of the job that wrote the output. Raises ValueError where no report has one that can be used."""
    path = report_path or f"{output}.report.json"
    folder, name = split(path)
    record = record_in(open_store(folder).read(name), path)
    if record.output is None:
        raise ValueError(f"{path} knows no finished output: end the job first, or give its last report with --report")
    return record


def record_in(content: bytes | None, path: str) -> JobRecord:
    """The record of the report at `path`. Raises ValueError where there is none, or one that is damaged."""
    report: Any = None
    if content is None:
        raise ValueError(
            f"{path} is not there, and without the job's report it is not known what answered; put it there, "
            "or name it to `ferrum-jax verify` with --report"
        )
    with contextlib.suppress(ValueError):
        report = parse_json(content)
    if not isinstance(report, dict):
        raise ValueError(f"{path} is no report: it holds no JSON object; name the job's own with --report")
    record = report.get("record")
    if record is None:
        raise ValueError(
            f"{path} has no record of the job, which reports have since `ferrum-jax verify` is there; start the job's "
            "command once more, which writes its report anew"
        )
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else record
        raise ValueError(f"{path}: its record has format {quoted(found)}, and this version reads {FORMAT}")
    whole = {**record, "rows": report.get("rows"), "environments": report.get("environments")}
    if wrong := [name for name, fits in _FITS.items() if not fits(_at(whole, name))]:
        raise ValueError(f"{path} is damaged: {', '.join(wrong)} of its record cannot be read; put the job's own back")
    named = {field.name: whole.get(field.name) for field in dataclasses.fields(JobRecord)}
    others = {"loading": whole.get("loading") or {}, "counts": whole["rows"], "changes": _changes(report, path)}
    return JobRecord(**{**named, **others})


def _at(whole: Any, name: str) -> Any:
    """The value at a path of names; None where there is none."""
    for part in name.split("."):
        whole = whole.get(part) if isinstance(whole, dict) else None
    return whole


def _changes(report: Mapping[str, Any], path: str) -> list[str]:
    """The edits that a report shows: by its digest, and by the fingerprint of its settings and its model."""
    record, changes = report["record"], []
    if report.get(_DIGEST) != digest_of({name: value for name, value in report.items() if name != _DIGEST}):
        changes.append(f"{path} is not as it was written: its digest is not that of what it says")
    own = None if record.get("model") is None else fingerprint_of(record["settings"], record["model"])
    if own != record.get("fingerprint"):
        changes.append(
            f"{path}: its settings and its model's identity have the fingerprint {own}, and it says "
            f"{record.get('fingerprint')}"
        )
    return changes
