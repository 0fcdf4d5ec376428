"""Counted times of the TPU's kernels, to set beside a chip's: cycles of their compiled schedules, kept as data.

`python -m scripts.bench_tpu_static --json` writes the file; nothing in it ran on a chip.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pallas_kernels
from pallas_kernels.paged_attention.cases import REAL_CASES
from pallas_kernels.paged_attention.work import Work
from pallas_kernels.target import Target

_FILE = Path(pallas_kernels.__file__).parent / "paged_attention" / "tpu" / "static_cycles.json"


def with_estimates(lines: Iterable[dict[str, Any]], generation: str | None) -> list[dict[str, Any]]:
    """The lines of a check; those of a TPU's kernel with "predicted_s" where cycles were counted for the generation."""
    known = {point["case"]: point["predicted_s"] for point in estimates(generation)} if generation else {}
    return [
        line | {"predicted_s": known[line["case"]]}
        if line["implementation"] == "mosaic_tpu" and line["case"] in known
        else line
        for line in lines
    ]


def estimates(generation: str) -> list[dict[str, Any]]:
    """{"case", "num_bytes", "flops", "predicted_s"} of each real case counted for a generation, [] where none was.

    A launch takes its cycles or, where that is longer, the time in which its K and V come from memory.
    """
    cycles = _cycles().get(generation, {})
    if not cycles:
        return []
    target = Target.named(f"tpu:{generation}")
    assert target.clock_hz is not None, generation
    found = []
    for case in REAL_CASES:
        if case.name in cycles:
            work = Work.of(case)
            seconds = max(cycles[case.name] / target.clock_hz, work.kv_bytes / target.bandwidth_bytes_per_s)
            found.append({"case": case.name, "num_bytes": work.kv_bytes, "flops": work.flops, "predicted_s": seconds})
    return found


@functools.cache
def _cycles() -> dict[str, dict[str, int]]:
    """By generation and case."""
    return json.loads(_FILE.read_text()) if _FILE.is_file() else {}
