"""Counted times, to set beside a chip's and kept as data: of the TPU's kernels the cycles of their compiled schedules,
of Hopper's the least that a launch takes. None of them ran on a chip.

`python -m scripts.tpu_ceiling --write` and `python -m scripts.gpu_ceiling --write` write the files.
"""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pallas_kernels
from pallas_kernels.paged_attention.cases import REAL_CASES, Work
from pallas_kernels.paged_attention.gpu.ceilings import Ceiling, ceilings
from pallas_kernels.quantized_matmul.cases import REAL_CASES as PRODUCT_CASES
from pallas_kernels.target import Target

_RIGHT = 1.25  # times an estimate, or one over it
_FORMS = {"w8a16": "int8_a16", "w8a8": "int8", "w4a16": "int4_g128", "fp8_weights": "fp8_a16"}  # of a check, as counted
_COUNTED_WEIGHTS = 14336 * 4096  # of a product that was counted
NO_CACHE_BYTES = 2**28  # fewer may come from a cache, faster than from memory
TPU_CEILINGS = Path(pallas_kernels.__file__).parent / "paged_attention" / "tpu" / "ceilings.json"


def with_estimates(lines: Iterable[dict[str, Any]], generation: str | None) -> list[dict[str, Any]]:
    """The lines of a check; those of kernels that were counted for the generation with "predicted_s" on a TPU, and on a
    GPU with "ceiling_s", the "ceiling_unit" that is busy so long, and "of_ceiling" where a time was measured."""
    known = _of_attention(generation) | _of_products(generation) if generation else {}
    least = ceilings(generation, cached_bytes=NO_CACHE_BYTES) if generation else {}
    found = []
    for line in lines:
        case, implementation = line["case"], line["implementation"]
        if implementation == "mosaic_tpu" and case in known:
            line = line | {"predicted_s": known[case]}
        if implementation == "mosaic_gpu" and case in least:
            line = line | _beside_ceiling(line.get("median_s"), least[case])
        found.append(line)
    return found


def _beside_ceiling(median_s: float | None, ceiling: Ceiling) -> dict[str, Any]:
    share = None if median_s is None else ceiling.seconds / median_s
    return {"ceiling_s": ceiling.seconds, "ceiling_unit": ceiling.unit, "of_ceiling": share}


def said_of_ceilings(lines: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """(case, sentence) of how ceilings stood: one of all of them, then of each that a kernel beat; [] without any."""
    shares = {line["case"]: line["of_ceiling"] for line in lines if line.get("of_ceiling")}
    if not shares:
        return []
    beaten = {case: share for case, share in shares.items() if share > 1}
    ordered = sorted(shares, key=shares.__getitem__)
    near, far = ordered[-1], ordered[0]
    return [
        (
            "all",
            f"{len(shares) - len(beaten)} of {len(shares)} held; {near} reached {shares[near]:.0%} of its ceiling, the "
            f"most, and {far} {shares[far]:.0%}, the least. A ceiling is the time of a launch's busiest unit, counted "
            "in its machine code, if nothing waits",
        ),
        *(
            (case, f"{share:.2f} times as fast as its ceiling allows: the ruler is wrong, so please report it")
            for case, share in beaten.items()
        ),
    ]


def beside_estimates(lines: Iterable[dict[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    """(case, measured, estimate, times, how it stood) of each time that an estimate stands beside, the furthest first,
    below a row that counts them; [] without any. Times are in microseconds; an estimate is right within a quarter."""
    found = {
        line["case"]: (line["median_s"], line["predicted_s"])
        for line in lines
        if line.get("predicted_s") and line.get("median_s")
    }
    if not found:
        return []
    times = {case: measured / predicted for case, (measured, predicted) in found.items()}
    ordered = sorted(times, key=lambda case: -max(times[case], 1 / times[case]))
    wrong = [case for case in ordered if not 1 / _RIGHT <= times[case] <= _RIGHT]
    far = f"; {ordered[0]} is the furthest, {times[ordered[0]]:.2f} times" if wrong else ""
    rows = [("all", "", "", "", f"{len(found) - len(wrong)} of {len(found)} estimates right within a quarter{far}")]
    for case in ordered:
        measured, predicted = (f"{seconds * 1e6:,.1f} us" for seconds in found[case])
        rows.append((case, measured, predicted, f"{times[case]:.2f}", _stood(times[case])))
    return rows


def _stood(times: float) -> str:
    if times > _RIGHT:
        return f"wrong: it takes {times:.2f} times as long as was counted"
    if times < 1 / _RIGHT:
        return f"wrong: it takes {times:.2f} of what was counted, so please report the ruler"
    return "right"


def _of_products(generation: str) -> dict[str, float]:
    """Seconds of the products that a check times, by case: of what was counted the share that their outputs are."""
    found, counted = {}, _launches().get(generation, {})
    if not counted:
        return {}
    clock_hz = Target.named(f"tpu:{generation}").clock_hz
    assert clock_hz is not None, generation
    for case in PRODUCT_CASES:
        form = case.name.removesuffix(f"_{case.num_tokens}_rows")
        one = counted.get(f"product_{_FORMS.get(form)}_{case.num_tokens}")
        if one is not None:
            share = case.num_outputs * case.num_inputs / _COUNTED_WEIGHTS
            found[case.name] = share * (max(one["cycles"], one["hbm_cycles"]) + one["around_cycles"]) / clock_hz
    return found


def _of_attention(generation: str) -> dict[str, float]:
    """Seconds of each real case that was counted for the generation.

    A launch takes its cycles or, where that is longer, the time in which its K and V come from memory; and what XLA
    does around it.
    """
    found, counted = {}, _launches().get(generation, {})
    if not counted:
        return {}
    target = Target.named(f"tpu:{generation}")
    assert target.clock_hz is not None, generation
    for case in REAL_CASES:
        if (one := counted.get(case.name)) is not None:
            seconds = max(one["cycles"] / target.clock_hz, Work.of(case).kv_bytes / target.bandwidth_bytes_per_s)
            found[case.name] = seconds + one["around_cycles"] / target.clock_hz
    return found


@functools.cache
def _launches() -> dict[str, dict[str, dict[str, Any]]]:
    """The counts of each launch by generation and name."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for launch, generations in json.loads(TPU_CEILINGS.read_text())["launches"].items():
        for generation, one in generations.items():
            found.setdefault(generation, {})[launch] = one
    return found
