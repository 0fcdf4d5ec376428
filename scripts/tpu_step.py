"""What a whole decode step of a published model takes on TPUs that are not here: an estimate, nothing ran.

    python -m scripts.tpu_step                                    every step, compiled anew
    python -m scripts.tpu_step llama_8b_v6e_1 --operations 20     one of them, with the operations that take most
    python -m scripts.tpu_step --write                            keep the estimates
    python -m scripts.tpu_step --check llama_8b_v6e_1             fail where one is 2 % worse than what is kept

Two depths of the model are compiled, forward and sampling; each layer that the model has more takes what the second has
more. Operations are estimated by `step_ops`, kernels by the bundles that libtpu made for this step. The bound is the
time of weights, keys and values over HBM, or of all operations of the matrix units. Left out: the host, gaps between
programs, waits of links for each other and how long a message takes to begin, clocks, and operations that XLA does not
estimate, but for their bytes. Needs the `aot` extra.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from scripts import tpu_static  # isort: skip  # before jax: they set what libtpu reads

from rich.console import Console
from rich.table import Table

from ferrum_jax.runtime.programs import StepPart, programs_of
from pallas_kernels.target import Target
from scripts import kept_counts
from scripts.step_kernels import StepKernels
from scripts.step_ops import Line, Walk, instructions_of
from scripts.tpu_ceiling import tools
from scripts.tpu_steps import STEPS, Step, laid_out, needed_bytes, parts_of

FILE = pathlib.Path(__file__).parent / "tpu_steps.json"
_SHOWN = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A step of all layers. seconds, bound_s, tokens_per_s: a step's, and what HBM or the matrix unit binds.

    largest: the operations that lose most: what they take and which share of it something binds. unknown: operations of
    a step on arrays for which XLA has no estimate.
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


def walk(step: Step) -> Walked:
    """The step of all layers, from the forwards of its two depths and what samples, to which layers are nothing."""
    (few, sampled), (more, _) = (_walk(step, layers, samples=layers == step.layers[0]) for layers in step.layers)
    layers = (step.num_layers - step.layers[0]) / (step.layers[1] - step.layers[0])
    return few.plus(more.plus(few, -1), layers).plus(sampled)


def _walk(step: Step, layers: int, *, samples: bool) -> tuple[Walked, Walked]:
    """The forward with so many layers, and what samples or nothing."""
    layout = laid_out(step, layers)
    target = Target.of_device(layout.mesh.devices.flat[0])
    forward, sample = parts_of(layout, step)
    kernels = StepKernels(step=step, layout=layout, target=target, width=forward.table_width)

    def walked(part: StepPart) -> Walked:
        tpu_static.forget()
        hlo = programs_of(layout)[part].compile().as_text()
        kernels.learn(instructions_of(hlo))
        return Walked.of(Walk(target=target, kernel=kernels.work, turns=kernels.turns).through(hlo))

    return walked(forward), walked(sample) if samples else Walked.of(Walk(target=target, kernel=kernels.work))


def estimate(step: Step, walked: Walked) -> Estimate:
    target = Target.of_device(laid_out(step, step.layers[0]).mesh.devices.flat[0])
    bound = max(needed_bytes(step) / target.bandwidth_bytes_per_s, walked.flops / target.flops_per_s)
    largest = sorted(walked.lines.items(), key=lambda item: -item[1].lost)[:3]
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


def summary(found: Mapping[str, Estimate]) -> Table:
    """A row for each step."""
    table = Table(title="Decode steps by estimate, nothing ran", pad_edge=False)
    for name in ("step", "rows", "ms", "bound ms", "share", "tokens/s", "unknown", "published"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for step in (each for each in STEPS if each.name in found):
        one = found[step.name]
        table.add_row(
            step.name,
            f"{step.tokens} of {step.context:,}",
            f"{one.step_us / 1e3:.2f}",
            f"{one.bound_us / 1e3:.2f}",
            f"{one.bound_us / one.step_us:.0%}",
            f"{one.tokens_per_s:,}",
            f"{one.unknown}",
            "" if step.published is None else f"{step.published[0]:,}",
        )
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [step.name for step in STEPS]
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--operations", type=int, default=_SHOWN, help="of a step that are shown")
    parser.add_argument("--write", action="store_true", help=f"keep the estimates in {FILE.name}")
    parser.add_argument(
        "--check", action="store_true", help="fail where an estimate is worse than the one that is kept"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.steps) - set(known):
        parser.error(f"no step is called {sorted(unknown)}; see --help")
    return arguments


def keep(found: Mapping[str, Estimate]) -> None:
    """Writes the estimates of the steps that there are, those found in place of those before."""
    before = kept_counts.read(FILE)["launches"]
    merged = before | {name: {"step": dataclasses.asdict(one)} for name, one in found.items()}
    kept_counts.write(FILE, tools(), {step.name: merged[step.name] for step in STEPS if step.name in merged})


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=None if Console().is_terminal else 140)
    found: dict[str, Estimate] = {}
    for step in STEPS:
        if not arguments.steps or step.name in arguments.steps:
            walked = walk(step)
            found[step.name] = estimate(step, walked)
            console.print(operations(step, walked, arguments.operations))
            if arguments.write:
                keep(found)
    console.print(summary(found))
    if arguments.check and (lines := worse(kept_counts.read(FILE)["launches"], found)):
        sys.exit("\n".join([*lines, f"estimated with {tools()}; --write keeps the new"]))


if __name__ == "__main__":
    main()
