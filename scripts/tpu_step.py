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

import argparse
import dataclasses
from collections.abc import Mapping

from scripts import tpu_static  # isort: skip  # before jax: it sets what libtpu reads

from rich.console import Console

from ferrum_jax.runtime.compile.topology import target_devices
from ferrum_jax.runtime.programs import StepPart, programs_of
from pallas_kernels.target import Target
from scripts import csv_tables, kept_counts
from scripts.step_estimates import FILE, Estimate, Walked, estimate, operations, step_rows, worse
from scripts.step_kernels import StepKernels
from scripts.step_ops import Walk, instructions_of
from scripts.tpu_ceiling import tools
from scripts.tpu_steps import STEPS, Step, laid_out, needed_bytes, parts_of

_SHOWN = 12


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


def keep(found: Mapping[str, Estimate]) -> None:
    """Writes the estimates of the steps that there are, those found in place of those before."""
    before = kept_counts.read(FILE)["launches"]
    merged = before | {name: {"step": dataclasses.asdict(one)} for name, one in found.items()}
    kept_counts.write(FILE, tools(), {step.name: merged[step.name] for step in STEPS if step.name in merged})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=_SHOWN, help="of a step that are shown")
    arguments = kept_counts.parse(parser, [step.name for step in STEPS], FILE)
    console = Console(width=None if Console().is_terminal else 140)
    found: dict[str, Estimate] = {}
    for step in (step for step in STEPS if step.name in arguments.names):
        walked = walk(step)
        target = Target.of_device(target_devices(step.target)[0])
        found[step.name] = estimate(step, walked, target, needed_bytes=needed_bytes(step))
        console.print(operations(step, walked, arguments.operations))
        if arguments.write:
            keep(found)
    print(csv_tables.as_markdown(step_rows(found)))
    if arguments.check:
        kept_counts.end_if(worse(kept_counts.read(FILE)["launches"], found), tools(), FILE)


if __name__ == "__main__":
    main()
