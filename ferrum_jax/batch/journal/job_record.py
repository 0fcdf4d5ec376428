"""The record of a job in its report: all that it takes to compute its lines again, elsewhere and without the journal.

    record   format, input (path, rows, layout), names, created, settings, model, commit, fingerprint, output, loading
    digest   of the whole report, so that a report that was edited is seen

`fingerprint`, which every line carries too, digests settings and model; `output` digests all lines in their order.
`loading` says how the command loaded the model. It is no part of the identity, and may be gone or moved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.job_folder import JobFolder
from ferrum_jax.batch.journal.job_identity import JobIdentity
from ferrum_jax.inputs.identity import digest_of
from ferrum_jax.io.paths import is_url

FORMAT = 1
_DIGEST = "digest"  # the report's entry


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


def is_sealed(report: Mapping[str, Any]) -> bool:
    """Whether the report is as it was written."""
    return report.get(_DIGEST) == digest_of({name: value for name, value in report.items() if name != _DIGEST})
