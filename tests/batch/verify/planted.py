"""A job to plant changes in: its three files, how they are edited, and how a forger makes their digests anew."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ferrum_jax.batch.batch_llm import BatchLLM
from ferrum_jax.batch.input.formats import Row, parse_line
from ferrum_jax.batch.job import JobOptions, JobStart
from ferrum_jax.batch.journal.job_identity import fingerprint_of
from ferrum_jax.batch.journal.job_record import record_of, sealed
from ferrum_jax.batch.journal.line_record import OutputDigest, recorded_response
from ferrum_jax.batch.verify.output_lines import line_in
from ferrum_jax.batch.verify.verify_job import Options, Verified, verify_job
from tests.batch.fake_llm import json_lines
from tests.batch.running import run_rows


@dataclasses.dataclass(kw_only=True)
class Written:
    """The files of a job as objects. A test edits them and writes them back."""

    rows: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    report: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Written:
        rows, lines = (
            [json.loads(line) for line in (folder / name).read_bytes().splitlines()]
            for name in ("in.jsonl", "out.jsonl")
        )
        return cls(rows=rows, lines=lines, report=json.loads((folder / "out.jsonl.report.json").read_bytes()))

    def write(self, folder: Path) -> None:
        (folder / "in.jsonl").write_bytes(json_lines(self.rows))
        (folder / "out.jsonl").write_bytes(json_lines(self.lines))
        (folder / "out.jsonl.report.json").write_text(json.dumps(self.report))

    @property
    def record(self) -> dict[str, Any]:
        return self.report["record"]

    def line(self, custom_id: str) -> dict[str, Any]:
        return next(line for line in self.lines if line["custom_id"] == custom_id)

    def row(self, custom_id: str) -> dict[str, Any]:
        return next(row for row in self.rows if row["custom_id"] == custom_id)

    def body(self, custom_id: str) -> dict[str, Any]:
        return self.line(custom_id)["response"]["body"]

    def choice(self, custom_id: str, place: int = 0) -> dict[str, Any]:
        return self.body(custom_id)["choices"][place]

    def ask_anew(self, custom_id: str, **fields: Any) -> None:
        """Edits a row of the input, and gives its line the ids of the row that this makes."""
        self.row(custom_id).update(fields)
        row = parse_line(
            json.dumps(self.row(custom_id)).encode(), 1, seed=self.record["settings"]["seed"],
            defaults=self.record["settings"].get("defaults", {}),
        )  # fmt: skip
        assert isinstance(row, Row), row
        line = self.line(custom_id)
        old = line["id"].removeprefix("batch_req_")
        self.lines[self.lines.index(line)] = json.loads(json.dumps(line).replace(old, row.id))
        if row.seeds:
            self.line(custom_id)["response"]["record"]["seed"] = row.seeds[0]

    def forge(self) -> None:
        """Every digest made anew, so that nothing but an answer can tell."""
        record, digest = self.record, OutputDigest()
        record["fingerprint"] = fingerprint_of(record["settings"], record["model"])
        for index, line in enumerate(self.lines):
            if line["response"] is not None:
                body, said = line["response"]["body"], line["response"]["record"]
                if "system_fingerprint" in body:
                    body["system_fingerprint"] = record["fingerprint"]
                del said["line"]
                id = line["id"].removeprefix("batch_req_")
                line["response"] = json.loads(recorded_response(id, line["custom_id"], body, said))
            digest.add(index, line_in(json.dumps(line).encode()).as_written)
        record["output"] = digest.text
        record["input"].update(rows=len(self.rows), layout=_layout(self.rows, record))
        del self.report["digest"]
        self.report = sealed(self.report)


def _layout(rows: Iterable[Mapping[str, Any]], record: Mapping[str, Any]) -> str:
    from ferrum_jax.batch.input.rows import Rows

    settings = record["settings"]
    return Rows(
        io.BytesIO(json_lines(rows)),
        settings["seed"],
        record["names"],
        defaults=settings.get("defaults", {}),
        adapters=settings.get("adapters", ()),
    ).layout


def write_job(
    folder: Path,
    rows: Iterable[Mapping[str, Any]],
    make: Callable[[JobStart], Any],
    options: JobOptions | None = None,
    output: str = "out.jsonl",
    **settings: Any,
) -> int:
    (folder / "in.jsonl").write_bytes(json_lines(rows))
    return run_rows(folder, make, output, options=options, **settings)


def verified(
    folder: Path, make: Callable[[], Any], sample: int | None = None, output: str = "out.jsonl", **options: Any
) -> Verified:
    """What verifying the folder's job finds. make: the model here."""

    def load(start: JobStart, check: Callable[[Any], None]) -> BatchLLM:
        return make()

    asked = Options(sample=sample, input_path=str(folder / "in.jsonl"), **options)
    path = str(folder / output)
    return verify_job(load, path, record_of(path, asked.report_path), asked)
