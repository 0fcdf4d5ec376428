"""Ceilings of the Hopper kernels: the least that a launch takes, from the counts of machine code in ceilings.json.

A launch takes at least as long as its busiest unit, if the others work beside it and nobody waits. All units but HBM
run at the chip's highest clock. `python -m scripts.gpu_ceiling --write` makes the file; nothing in it ran on a GPU.
"""

import collections
import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("ceilings.json")
MULTIPROCESSORS = 132
CHIPS = {"h100": 14.5, "h200": 20.7}  # bytes of HBM a clock and multiprocessor at the data sheets' clock
_CLOCK_HZ, _SHEET_CLOCK_HZ = 1.98e9, 1.755e9  # the highest, and that of the data sheets' rates


class Ceiling(NamedTuple):
    """Seconds that a launch takes at least, and the unit that is busy so long."""

    seconds: float
    unit: str


def seconds_of(unit: str, amount: float, chip: str) -> float:
    """The least that a unit takes. amount: bytes for "hbm", else a multiprocessor's cycles."""
    return amount / (CHIPS[chip] * MULTIPROCESSORS * _SHEET_CLOCK_HZ if unit == "hbm" else _CLOCK_HZ)


def ceilings(chip: str, *, cached_bytes: int) -> dict[str, Ceiling]:
    """By launch; {} for a chip whose bandwidth is not here.

    A launch's kernels may run beside each other, so a unit has the cycles of them all. cached_bytes: fewer may come
    from a cache where a launch is repeated, and then "hbm" bounds nothing.
    """
    if chip not in CHIPS:
        return {}
    found = {}
    for launch, kernels in kept()["launches"].items():
        amounts = collections.Counter[str]()
        for one in kernels.values():
            amounts.update({"hbm": one["hbm_bytes"], **one["cycles"]})
        if amounts["hbm"] < cached_bytes:
            del amounts["hbm"]
        found[launch] = max(Ceiling(seconds_of(unit, amount, chip), unit) for unit, amount in amounts.items())
    return found


def kept() -> dict[str, Any]:
    """{"tools", "launches": {launch: {kernel: its counts}}} of the file."""
    return json.loads(FILE.read_text()) if FILE.exists() else {"tools": {}, "launches": {}}
