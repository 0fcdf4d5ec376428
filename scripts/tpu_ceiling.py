"""Cycles of the TPU kernels beside the bound of each launch, counted in what libtpu compiles; no TPU is involved.

    python -m scripts.tpu_ceiling                                  every launch, counted anew: half an hour
    python -m scripts.tpu_ceiling llama_8b_decode_int8             some of them, for v5e, v6e and TPU7x
    python -m scripts.tpu_ceiling --generation v7x kda_decode_64   for some of these
    python -m scripts.tpu_ceiling --write                          keep the counts
    python -m scripts.tpu_ceiling --check gpt_oss                  fail where a count is 2 % worse than what is kept

A launch takes its cycles or, where that is longer, the time in which its bytes cross HBM. Its bound is the longer of
that time and of its operations at the matrix unit's peak; its share is the bound over what it takes. Cycles are bundles
of the kernels (`tpu_static`), and for what has no kernel the estimate of XLA's own cost model. Needs the `aot` extra.
"""

import argparse
import dataclasses
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from scripts import tpu_launches  # isort: skip  # before jax: it sets what libtpu reads

import jax
from rich.console import Console
from rich.table import Table

from ferrum_jax.cli.device_check.estimates import TPU_CEILINGS
from pallas_kernels.target import Target
from scripts import kept_counts, tpu_static
from scripts.tpu_counted import Counted, busiest
from scripts.tpu_launches import GENERATIONS, Launch
from scripts.xla_cycles import estimated_cycles


def count(launch: Launch, generation: str) -> Counted:
    """Raises what the compiler raises."""
    program, target = launch.program(generation), Target.named(f"tpu:{generation}")
    given: dict[str, Any] = {"generation": generation, "donate": program.donate}
    work: dict[str, Any] = {"hbm_bytes": program.hbm_bytes, "flops": program.flops, "peak": program.peak}
    if launch.counted_by == "estimate":
        hlo = tpu_static.compile_for(program.fn, program.args, **given).as_text()
        return Counted.of(target, **work, cycles=estimated_cycles(hlo, program.turns), around_cycles=0, unit="XLA")
    result = tpu_static.measure(program.fn, program.args, of_xla=launch.counted_by == "operations", **given)
    hot = max(result.kernels, key=lambda kernel: kernel.cycles)
    return Counted.of(
        target,
        **work,
        cycles=round(result.cycles),
        around_cycles=estimated_cycles(result.hlo, program.turns),
        unit=busiest(hot.utilization),
        vector_spills=sum(kernel.vector_spills for kernel in result.kernels),
        scalar_spills=sum(kernel.scalar_spills for kernel in result.kernels),
    )


def tools() -> dict[str, str]:
    """The compilers that the counts are of."""
    return {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}


def worse(before: Mapping[str, Any], found: Mapping[str, Counted]) -> list[str]:
    """What is worse by more than 2 % than a launch's counts before, and generations that had none."""
    old = {generation: Counted(**one).columns for generation, one in before.items()}
    return kept_counts.worse(old, {generation: one.columns for generation, one in found.items()})


def make_table(found: Mapping[str, Mapping[str, Counted]]) -> Table:
    """A row for each launch and generation."""
    table = Table(title="Cycles of a launch beside its bounds, nothing ran", pad_edge=False)
    names = ("launch", "generation", "cycles", "around", "HBM bytes", "HBM", "peak", "spills", "share", "binds")
    for column in names:
        table.add_column(column, justify="left" if column in (*names[:2], "binds") else "right")
    for name, generations in found.items():
        for generation, one in generations.items():
            numbers = (one.cycles, one.around_cycles, one.hbm_bytes, one.hbm_cycles, one.peak_cycles)
            spills = f"{one.vector_spills} + {one.scalar_spills}"
            table.add_row(name, generation, *(f"{n:,}" for n in numbers), spills, f"{one.share:.0%}", one.binds)
    return table


def count_all(names: Sequence[str], generations: Sequence[str]) -> dict[str, dict[str, Counted]]:
    """The counts of the launches of these names by generation."""
    found: dict[str, dict[str, Counted]] = {}
    for launch in tpu_launches.launches():
        for generation in (each for each in launch.generations if launch.name in names and each in generations):
            found.setdefault(launch.name, {})[generation] = count(launch, generation)
            print(f"{launch.name} {generation}: {found[launch.name][generation].cycles:,} cycles", file=sys.stderr)
    return found


def keep(before: Mapping[str, Any], found: Mapping[str, Mapping[str, Counted]]) -> None:
    """Writes the counts of the launches that there are, those found in place of those before."""
    merged: dict[str, dict[str, Any]] = {}
    for launch in tpu_launches.launches():
        new = {name: dataclasses.asdict(one) for name, one in found.get(launch.name, {}).items()}
        if parts := before.get(launch.name, {}) | new:
            merged[launch.name] = {each: parts[each] for each in launch.generations if each in parts}
    kept_counts.write(TPU_CEILINGS, tools(), merged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generation", action="append", choices=GENERATIONS, help="may be repeated; default: all")
    arguments = kept_counts.parse(parser, [launch.name for launch in tpu_launches.launches()], TPU_CEILINGS)
    before = kept_counts.read(TPU_CEILINGS)
    found = count_all(arguments.names, arguments.generation or GENERATIONS)
    Console(width=None if Console().is_terminal else 160).print(make_table(found))
    if arguments.check:
        lines = [
            f"{name} {line}" for name, one in found.items() for line in worse(before["launches"].get(name, {}), one)
        ]
        kept_counts.end_if(lines, tools(), TPU_CEILINGS)
    if arguments.write:
        keep(kept_counts.read(TPU_CEILINGS)["launches"], found)  # others may have written meanwhile


if __name__ == "__main__":
    main()
