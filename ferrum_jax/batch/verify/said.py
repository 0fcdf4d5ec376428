"""What a report says of its job, read and checked: enough to answer its rows again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.batch.journal.job_identity import REQUIRE_VALID, fingerprint_of, object_in
from ferrum_jax.batch.journal.job_record import FORMAT, is_sealed
from ferrum_jax.batch.verify.findings import Findings
from ferrum_jax.quoting import quoted

_OF_SETTINGS = ("model", "seed", "defaults", REQUIRE_VALID, "adapters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSaid:
    """The report's record. model: the identity of what answered, None where nothing did. output: the digest of it.

    rows, layout: of the input. counts: rows that are ok and failed. settings: as `JobSettings.recorded` gives them.
    """

    input_path: str
    rows: int
    layout: str
    names: Sequence[str]
    created: int
    settings: Mapping[str, Any]
    model: Mapping[str, Any] | None
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
        return tuple(self.settings.get("adapters", ()))

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self.settings.get("defaults", {})

    @property
    def others(self) -> dict[str, Any]:
        """Settings of the caller."""
        return {name: value for name, value in self.settings.items() if name not in _OF_SETTINGS}


def said_of(content: bytes | None, path: str, findings: Findings) -> JobSaid:
    """What the report at `path` says. Raises ValueError where that is not enough; adds what was edited in it."""
    if content is None:
        raise ValueError(
            f"{path} is not there, and without the job's report it is not known what answered; name it with --report"
        )
    report = object_in(content)
    if report is None:
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
    kinds = {"input": dict, "names": list, "created": int, "settings": dict, "loading": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]
    source, settings = record.get("input"), record.get("settings")
    if isinstance(source, dict):
        asked = {"path": str, "rows": int, "layout": str}
        wrong += [f"input.{name}" for name, kind in asked.items() if not isinstance(source.get(name), kind)]
    if isinstance(settings, dict):
        fits = {"model": str, "seed": int}
        wrong += [f"settings.{name}" for name, kind in fits.items() if not isinstance(settings.get(name), kind)]
        optional = {"defaults": dict, "adapters": list}
        wrong += [
            f"settings.{name}" for name, kind in optional.items() if not isinstance(settings.get(name, kind()), kind)
        ]
    texts = {"fingerprint": str, "output": str, "model": dict}
    wrong += [name for name, kind in texts.items() if not isinstance(record.get(name), kind | None)]
    counts, environments = report.get("rows"), report.get("environments")
    wrong += [] if isinstance(counts, dict) else ["rows"]
    wrong += (
        [] if isinstance(environments, list) and all(isinstance(e, dict) for e in environments) else ["environments"]
    )
    if wrong:
        raise ValueError(f"{path} is damaged: {', '.join(wrong)} of its record cannot be read; put the job's own back")
    return JobSaid(
        input_path=record["input"]["path"],
        rows=record["input"]["rows"],
        layout=record["input"]["layout"],
        names=[str(name) for name in record["names"]],
        created=record["created"],
        settings=record["settings"],
        model=record.get("model"),
        fingerprint=record.get("fingerprint"),
        output=record.get("output"),
        loading=record["loading"],
        counts=report["rows"],
        environments=report["environments"],
    )
