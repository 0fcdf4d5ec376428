"""What a report says of its job, read and checked: enough to answer its rows again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrum_jax.batch.journal.job_identity import REQUIRE_VALID, fingerprint_of
from ferrum_jax.batch.journal.job_record import FORMAT, is_sealed
from ferrum_jax.batch.verify.findings import Findings
from ferrum_jax.io.error_text import quoted
from ferrum_jax.io.files.json_files import parse_json

_LAST_SECOND = 253_402_300_799  # of the year 9999


def _is(kind: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


# what the parts of a report must be; of those that may be missing None is one
_FITS: Mapping[str, Callable[[Any], bool]] = {
    **{f"record.input.{name}": _is(kind) for name, kind in (("path", str), ("rows", int), ("layout", str))},
    "record.names": _is(list),
    "record.created": lambda value: _is(int)(value) and 0 <= value <= _LAST_SECOND,
    **{f"record.settings.{name}": _is(kind) for name, kind in (("model", str), ("seed", int))},
    "record.settings.defaults": _is(dict | None),
    "record.settings.adapters": lambda value: value is None or (isinstance(value, list) and all(map(_is(str), value))),
    **{f"record.{name}": _is(str | None) for name in ("commit", "fingerprint", "output")},
    "record.model": _is(dict | None),
    "record.loading": _is(dict | None),
    **{f"record.loading.{name}": _is(str | None) for name in ("model", "revision", "tokenizer")},
    "record.loading.adapters": lambda value: value is None or _are_texts(value),
    "record.loading.config": _is(dict | None),
    "rows": _is(dict),
    "environments": lambda value: isinstance(value, list) and all(map(_are_texts, value)),
}


def _at(whole: Any, name: str) -> Any:
    """The value at a path of names; None where there is none."""
    for part in name.split("."):
        whole = whole.get(part) if isinstance(whole, dict) else None
    return whole


_OF_SETTINGS = ("model", "seed", "defaults", REQUIRE_VALID, "adapters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSaid:
    """The report's record. model: the identity of what answered, None where nothing did. commit: of a hub's model.

    rows, layout: of the input. output: the digest of it. counts: rows that are ok and failed. settings: as
    `JobSettings.recorded` gives them.
    """

    input_path: str
    rows: int
    layout: str
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

    @property
    def others(self) -> dict[str, Any]:
        """Settings of the caller."""
        return {name: value for name, value in self.settings.items() if name not in _OF_SETTINGS}


def said_of(content: bytes | None, path: str, findings: Findings) -> JobSaid:
    """What the report at `path` says. Raises ValueError where that is not enough; adds what was edited in it."""
    report: Any = None
    if content is None:
        raise ValueError(
            f"{path} is not there, and without the job's report it is not known what answered; name it with --report"
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
    said = _said(record, report, path)
    if not is_sealed(report):
        findings.add("report_changed", f"{path} is not as it was written: its digest is not that of what it says")
    own = None if said.model is None else fingerprint_of(said.settings, said.model)
    if own != said.fingerprint:
        findings.add(
            "report_changed",
            f"{path}: its settings and its model's identity have the fingerprint {own}, and it says {said.fingerprint}",
        )
    return said


def _said(record: Any, report: Mapping[str, Any], path: str) -> JobSaid:
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else record
        raise ValueError(f"{path}: its record has format {quoted(found)}, and this version reads {FORMAT}")
    whole = {"record": record, "rows": report.get("rows"), "environments": report.get("environments")}
    wrong = [name for name, fits in _FITS.items() if not fits(_at(whole, name))]
    if wrong:
        named = ", ".join(name.removeprefix("record.") for name in wrong)
        raise ValueError(f"{path} is damaged: {named} of its record cannot be read; put the job's own back")
    return JobSaid(
        input_path=record["input"]["path"],
        rows=record["input"]["rows"],
        layout=record["input"]["layout"],
        names=[str(name) for name in record["names"]],
        created=record["created"],
        settings=record["settings"],
        model=record.get("model"),
        commit=record.get("commit"),
        fingerprint=record.get("fingerprint"),
        output=record.get("output"),
        loading=record.get("loading") or {},
        counts=report["rows"],
        environments=report["environments"],
    )
