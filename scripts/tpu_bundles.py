"""The control flow of a TPU kernel, read from its final schedule, and what it costs.

A TPU core issues one bundle a cycle. The pass `packed-bundles-post-ra` still holds the empty bundles that cover
latencies, so bundles that run are cycles; only waits for transfers are not in it. Branches make a tree of regions:

    L0, L1, ...  loops, in program order: from the branch's target to the last of its delay slots
    W0, W1, ...  code that a forward branch may jump over (`pl.when`, guards of loops that may be empty)

A count says how often a region runs for each time that it is reached: a loop's trips, a W's share between 0 and 1.
Counts come from `tpu_trace`, which runs the scalar half of the schedule, or from the caller. Else a loop whose exit
test compares with a constant has that count, a W has 1, and after an unconditional branch (the other arm of an if) one
minus the first arm's. All other loops are data.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

_BUNDLE = re.compile(r"^ *(?:0x([0-9a-f]+)|(0)) +(?:[A-Z]{2})? *: [> ]*\{", re.M)
_BRANCH = re.compile(r"\bsbr\.rel (?:\(!?%(p\w+)\) )?target bundleno = (\d+)")
_EXIT = re.compile(r"%(p\w+) = scmp\.ge\.s32\.totalorder %(s\w+), (\d+) /\* loop exit test")
DELAY_SLOTS = {"v5e": 4, "v5p": 4, "v6e": 4, "v7x": 6}  # bundles after a branch that run in any case
_STARTS = re.compile(r"= dma\.\w+_to_(?:vmem|hbm|smem)\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """Bundles first .. end - 1. count is None where it is data that nobody gave."""

    name: str
    first: int
    end: int
    parent: int  # index of the enclosing region; -1 for the kernel itself
    count: float | None
    first_arm: int  # index of the W whose other arm this is, else -1
    num_dma_starts: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """One kernel. units: issue slots of a bundle by unit. used: what each bundle fills of them."""

    name: str
    regions: tuple[Region, ...]  # the first is the whole kernel
    units: dict[str, int]
    used: tuple[tuple[int, ...], ...]  # [bundles][units]
    num_scalar_spills: int

    def with_counts(self, counts: Mapping[str, float]) -> Schedule:
        """The same with these regions' counts. Raises ValueError for a count that names no region."""
        unknown = set(counts) - {region.name for region in self.regions}
        if unknown:
            raise ValueError(f"{self.name}: no region is called {sorted(unknown)}:\n{self.describe()}")
        regions: list[Region] = []
        for region in self.regions:
            count = counts.get(region.name, region.count)
            if region.first_arm >= 0 and region.name not in counts:
                count = 1.0 - (regions[region.first_arm].count or 0.0)
            regions.append(dataclasses.replace(region, count=count))
        return dataclasses.replace(self, regions=tuple(regions))

    def counts_of(self, runs: Sequence[int] | np.ndarray) -> dict[str, float]:
        """Each region's count where bundle i ran runs[i] times."""
        entered: list[int] = []
        for region in self.regions:
            times = int(runs[region.first])  # where a W begins with a loop, the loop's turns as well
            entered.append(min(times, entered[region.parent]) if region.name[0] == "W" else times)
        return {r.name: n / max(1, entered[r.parent]) for r, n in zip(self.regions[1:], entered[1:], strict=True)}

    def executions(self) -> list[float]:  # one for each region
        """How often each region runs in a launch. Raises ValueError where a loop's count is data and not given."""
        unknown = [r.name for r in self.regions if r.count is None]
        if unknown:
            raise ValueError(f"{self.name}: what was counted lacks {unknown}, whose trips are data:\n{self.describe()}")
        runs = [1.0]
        for region in self.regions[1:]:
            assert region.count is not None
            runs.append(runs[region.parent] * region.count)
        return runs

    def own_bundles(self) -> list[int]:
        """Bundles of each region that lie in none of its inner regions."""
        own = [r.end - r.first for r in self.regions]
        for region in self.regions[1:]:
            own[region.parent] -= region.end - region.first
        return own

    def utilization(self, region: int) -> dict[str, float]:
        """The share of each unit's issue slots that the region's own bundles fill."""
        span = self.regions[region]
        inner = [r for r in self.regions if r.parent == region]
        own = [i for i in range(span.first, span.end) if not any(r.first <= i < r.end for r in inner)]
        return {
            unit: sum(self.used[i][u] for i in own) / (slots * max(1, len(own)))
            for u, (unit, slots) in enumerate(self.units.items())
        }

    def describe(self) -> str:
        """The tree of regions, a line each."""
        depths = {-1: -1}
        lines = []
        for i, (region, own) in enumerate(zip(self.regions, self.own_bundles(), strict=True)):
            depths[i] = depths[region.parent] + 1
            count = "count is data" if region.count is None else f"x {region.count:g}"
            lines.append(
                f"{'  ' * depths[i]}{region.name} {count}: bundles {region.first:#x}..{region.end:#x}, "
                f"{own} of its own, {region.num_dma_starts} transfers started"
            )
        return "\n".join(lines)


def bundle_texts(bundles: str) -> list[str]:
    """The text of each bundle of a dump of `packed-bundles-post-ra`."""
    starts = [match.start() for match in _BUNDLE.finditer(bundles)]
    return [bundles[a:b] for a, b in zip(starts, [*starts[1:], len(bundles)], strict=True)]


def read_schedule(name: str, bundles: str, utilization: str, generation: str) -> Schedule:
    """The kernel whose dumps of `packed-bundles-post-ra` and of the per-bundle utilization are given."""
    texts = bundle_texts(bundles)
    header, rows = utilization.split("== UTILIZATION:")
    names, capacities = header.strip().splitlines()[1:3]
    units = dict(zip(names.split(", "), map(int, capacities.split()), strict=True))
    used = tuple(tuple(map(int, row.split())) for row in rows.strip().splitlines())
    assert len(used) == len(texts), f"{name}: {len(texts)} bundles, but utilization of {len(used)}"
    return Schedule(
        name=name,
        regions=_regions(texts, DELAY_SLOTS[generation]),
        units=units,
        used=used,
        num_scalar_spills=sum(text.count("_spill]] %s") for text in texts),
    )


def _regions(texts: Sequence[str], delay: int) -> tuple[Region, ...]:
    spans: list[tuple[int, int, str, str | None]] = []  # first, end, letter, predicate
    for at, text in enumerate(texts):
        for match in _BRANCH.finditer(text):
            after, target = at + 1 + delay, int(match[2])
            if target <= at:
                spans.append((target, min(after, len(texts)), "L", match[1]))
            elif target > after:
                spans.append((after, target, "W", match[1]))
    spans.sort(key=lambda span: (span[0], -span[1], span[2] == "L"))
    regions = [_region("kernel", 0, len(texts), -1, 1.0, -1, texts)]
    numbers = {"L": 0, "W": 0}
    for first, end, letter, predicate in spans:
        parent = max(i for i, r in enumerate(regions) if r.first <= first and end <= r.end)
        label = f"{letter}{numbers[letter]}"
        numbers[letter] += 1
        arms = [i for i, r in enumerate(regions) if r.end == first and r.parent == parent and r.name[0] == "W"]
        first_arm = arms[-1] if letter == "W" and predicate is None and arms else -1
        count = _constant_trips(texts[first:end], predicate) if letter == "L" else float(first_arm < 0)
        regions.append(_region(label, first, end, parent, count, first_arm, texts))
    return tuple(regions)


def _region(
    name: str, first: int, end: int, parent: int, count: float | None, first_arm: int, texts: Sequence[str]
) -> Region:
    started = sum(len(_STARTS.findall(text)) for text in texts[first:end])
    return Region(
        name=name, first=first, end=end, parent=parent, count=count, first_arm=first_arm, num_dma_starts=started
    )


def _constant_trips(texts: Sequence[str], predicate: str | None) -> float | None:
    """Trips of a loop that counts from 0 by 1 to a constant and whose last branch is on that test, else None."""
    for text in texts:
        for match in _EXIT.finditer(text):
            step = re.compile(rf"%{match[2]} = sadd\.s32 1, ")
            if match[1] == predicate and any(step.search(other) for other in texts):
                return float(match[3])
    return None
