"""Estimates of whole decode steps: two depths of a model become all of its layers, and what is kept and shown of it.

`python -m scripts.tpu_step` makes them.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from pallas_kernels.target import Target
from scripts import kept_counts
from scripts.step_ops import Line, Walk
from scripts.tpu_steps import STEPS, Step

FILE = pathlib.Path(__file__).parent / "tpu_steps.json"
_LARGEST = 3  # operations that lose most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A step of all layers. bound_us: what HBM or the matrix unit takes of it at least. hbm_mb: that the program moves.

    largest: the operations that lose most: the microseconds that they take, and the share of these in which something
    binds. unknown: operations on arrays for which XLA has no estimate.
    """

    step_us: int
    bound_us: int
    hbm_mb: int
    tokens_per_s: int
    unknown: int
    largest: dict[str, tuple[int, float]]

    @property
    def columns(self) -> dict[str, int]:
        """What must not get worse."""
        return {"step_us": self.step_us}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walked:
    """Lines of all operations of a program, and what they move and multiply."""

    lines: Mapping[str, Line]
    hbm_bytes: float
    flops: float
    unknown: float

    @classmethod
    def of(cls, walk: Walk) -> Walked:
        return cls(lines=walk.lines, hbm_bytes=walk.hbm_bytes, flops=walk.flops, unknown=float(walk.unknown))

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines.values())

    def plus(self, other: Walked, times: float = 1.0) -> Walked:
        """Both, the other so many times."""
        numbers = {n: getattr(self, n) + times * getattr(other, n) for n in ("hbm_bytes", "flops", "unknown")}
        empty, lines = Line(), {}
        for label in dict.fromkeys((*self.lines, *other.lines)):
            one, more = self.lines.get(label, empty), other.lines.get(label, empty)
            fields = {n: getattr(one, n) + times * getattr(more, n) for n in ("count", "seconds", "bound")}
            lines[label] = Line(**fields)
        return Walked(lines=lines, **numbers)


def estimate(step: Step, walked: Walked, target: Target, *, needed_bytes: int) -> Estimate:
    """needed_bytes: of weights, keys and values, that must cross HBM of one device."""
    bound = max(needed_bytes / target.bandwidth_bytes_per_s, walked.flops / target.flops_per_s)
    largest = sorted(walked.lines.items(), key=lambda item: -item[1].lost)[:_LARGEST]
    return Estimate(
        step_us=round(walked.seconds * 1e6),
        bound_us=round(bound * 1e6),
        hbm_mb=round(walked.hbm_bytes / 1e6),
        tokens_per_s=round(step.tokens / walked.seconds),
        unknown=round(walked.unknown),
        largest={label: (round(line.seconds * 1e6), round(1 - line.lost / line.seconds, 2)) for label, line in largest},
    )


def worse(before: Mapping[str, Any], found: Mapping[str, Estimate]) -> list[str]:
    """What is worse by more than 2 % than the estimates before, and steps that had none."""
    old = {name: Estimate(**parts["step"]).columns for name, parts in before.items()}
    return kept_counts.worse(old, {name: one.columns for name, one in found.items()})


def operations(step: Step, walked: Walked, shown: int) -> Table:
    """The operations of a step that take most."""
    table = Table(title=f"{step.name}: operations by estimate, nothing ran", pad_edge=False)
    for name in ("operation", "times", "us", "of the step", "bound", "lost us"):
        table.add_column(name, justify="left" if name == "operation" else "right")
    for label, line in sorted(walked.lines.items(), key=lambda item: -item[1].seconds)[:shown]:
        share = 1 - line.lost / line.seconds if line.seconds else 1.0
        numbers = f"{line.count:.0f}", f"{line.seconds * 1e6:,.0f}", f"{line.seconds / walked.seconds:.1%}"
        table.add_row(label, *numbers, f"{share:.0%}", f"{line.lost * 1e6:,.0f}")
    return table


def step_rows(found: Mapping[str, Estimate]) -> list[list[str]]:
    """A table of decode steps by estimate: what they take, their bounds, and what others measured."""
    rows = [["step", "rows", "ms", "bound, ms", "share", "tokens/s", "loses most, us (share bound)", "published"]]
    for step in (each for each in STEPS if each.name in found):
        one = found[step.name]
        by_loss = sorted(one.largest.items(), key=lambda item: -item[1][0] * (1 - item[1][1]))
        lost = "; ".join(f"{label} {took:,} ({share:.0%})" for label, (took, share) in by_loss)
        published = "" if step.published is None else f"{step.published[0]:,} ({step.published[1]})"
        share, rate = f"{one.bound_us / one.step_us:.0%}", f"{one.tokens_per_s:,}"
        times = f"{one.step_us / 1e3:.2f}", f"{one.bound_us / 1e3:.2f}"
        rows.append([step.name, f"{step.tokens} of {step.context:,}", *times, share, rate, lost, published])
    return rows
