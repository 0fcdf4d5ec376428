"""Ceilings of the Hopper kernels, counted in their machine code; no GPU is involved, and none of it is a forecast.

    python -m scripts.gpu_ceiling                           every launch, counted anew
    python -m scripts.gpu_ceiling llama_8b_decode_c16       some of them
    python -m scripts.gpu_ceiling --write                   keep the counts
    python -m scripts.gpu_ceiling --check oss_decode        fail where a count is 2 % worse than the one that is kept

A launch takes at least as long as its busiest unit, if the others work beside it and nobody waits: a scheduler's issue
slots, one warp's own instructions with their fixed stalls, wgmma, MUFU, shared memory, HBM. All but HBM run at the
chip's highest clock. Needs the `aot` extra.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import multiprocessing
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from scripts import gpu_launches  # isort: skip  # before jax: it sets what the compilers read

import jax
from rich.console import Console
from rich.table import Table

from pallas_kernels.paged_attention.gpu.ceilings import CHIPS, FILE, MULTIPROCESSORS, kept, seconds_of
from pallas_kernels.paged_attention.gpu.config import LANES
from scripts import kept_counts
from scripts.gpu_launches import Launch, Part
from scripts.gpu_sass import Count, Kernel, read_kernels

_OPERATIONS, _MUFU, _SHARED_BYTES, _SCHEDULERS = 4096, 16, 128, 4  # a clock and multiprocessor
_WARPS, _GROUP_THREADS = 4, 128  # of a warpgroup
_FEW_COLUMNS = 32  # where no product has more, they are heads and its rows tokens
_REGISTERS, _THREADS, _SMEM_BYTES = 65536, 2048, 228 * 1024  # of a multiprocessor
_KERNEL_OUTPUT = re.compile(
    r"^\.visible \.entry .*?^\.maxntid (?P<threads>\d+).*?(?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<code>.*?)(?=^\.visible \.entry |\Z)",
    re.MULTILINE | re.DOTALL,
)


def tool(name: str) -> pathlib.Path:
    """The path of one of NVIDIA's tools, in its package or on PATH. Raises FileNotFoundError with what to install."""
    spec = importlib.util.find_spec("nvidia")
    places = [pathlib.Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = [path for place in places for path in sorted(place.glob(f"*/bin/{name}"))]
    if not found and (path := shutil.which(name)) is not None:
        found = [pathlib.Path(path).resolve()]
    if not found:
        raise FileNotFoundError(f"{name} is not here; pip install -c constraints.txt nvidia-cuda-{name}")
    return found[0]


def tools() -> dict[str, str]:
    """The compilers that the counts are of."""
    ptxas = shutil.which("ptxas")
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout if ptxas else ""
    version = re.search(r"V([\d.]+)", said)
    return {"jax": jax.__version__, "ptxas": version[1] if version else "not on PATH"}


@contextlib.contextmanager
def disassembled() -> Iterator[None]:
    """Has kernels that are compiled meanwhile printed as PTX and, with control codes, as machine code."""
    root = str(tool("nvdisasm").parents[1])
    dumps = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_SASS_CTRL": "1"}
    with mock.patch.dict(os.environ, {**dumps, "MOSAIC_GPU_CUDA_ROOT": root, "CUDA_ROOT": root}):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """What is counted of one kernel. spill_bytes: of a thread, stored and loaded. blocks: that share a multiprocessor.

    compute, fetch: one trip of the main loop of a warp that multiplies, and of one that fetches. arms: what such loops
    have beside it, each for one consumer. cycles: of a multiprocessor in the whole launch, by unit; none of kernels
    that do not multiply. hbm_bytes: of the whole launch.
    """

    registers: int
    spill_bytes: int
    threads: int
    blocks: int
    compute: Count | None = None
    arms: Count | None = None
    fetch: Count | None = None
    cycles: dict[str, int] = dataclasses.field(default_factory=dict)
    hbm_bytes: int = 0

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Counted:
        """What `dataclasses.asdict` made a dictionary of."""
        counts = {name: Count(**kept[name]) for name in ("compute", "arms", "fetch") if kept[name] is not None}
        return cls(**{**kept, **counts})

    def seconds(self, unit: str, chip: str) -> float:
        """The least that a unit, or "hbm", takes for the launch."""
        return seconds_of(unit, self.hbm_bytes if unit == "hbm" else self.cycles[unit], chip)

    def bound(self, chip: str) -> str:
        """The unit that is busy longest."""
        return max((*self.cycles, "hbm"), key=lambda unit: self.seconds(unit, chip))

    def ceiling(self, chip: str) -> float:
        """Seconds that the launch takes at least."""
        return self.seconds(self.bound(chip), chip)


def count(launch: Launch) -> dict[str, Counted]:
    """The launch's kernels by name. A process must not have compiled them before: they would not be printed again."""
    with disassembled():
        compiled = launch.compile()
    found = list(_KERNEL_OUTPUT.finditer(compiled.output))
    codes = [read_kernels(one["code"])[0] for one in found]
    parts = list(launch.parts)
    counted: dict[str, Counted] = {}
    for one, code in zip(found, codes, strict=True):
        part = _take(parts, launch.name, int(one["threads"])) if code.innermost(multiplies=True) else None
        name = part.name if part else f"other {1 + sum(name.startswith('other') for name in counted)}"
        threads, registers = int(one["threads"]), int(one["registers"])
        shared = compiled.shared_bytes if part else 0
        own = Counted(
            registers=registers,
            spill_bytes=int(one["stores"]) + int(one["loads"]),
            threads=threads,
            blocks=resident_blocks(registers, threads, shared),
        )
        counted[name] = own if part is None else count_part(own, part, code, launch.has_roles)
    if parts:
        raise ValueError(
            f"{launch.name}: no kernel multiplies for {[part.name for part in parts]}; see gpu_launches.py"
        )
    return counted


def _take(parts: list[Part], launch: str, threads: int) -> Part:
    """Takes the first part with this number of threads out of the parts."""
    for part in parts:
        if (part.consumers + 1) * _GROUP_THREADS == threads:
            parts.remove(part)
            return part
    raise ValueError(f"{launch}: a kernel of {threads} threads multiplies and is none of {parts}; see gpu_launches.py")


def resident_blocks(registers: int, threads: int, shared_bytes: int) -> int:
    """Blocks that share a multiprocessor: registers are given by 8 a thread, shared memory with 1 KiB beside it."""
    by_registers = _REGISTERS // (-(-registers // 8) * 8 * threads)
    return min(by_registers, _THREADS // threads, _SMEM_BYTES // (shared_bytes + 1024), 32)


def count_part(own: Counted, part: Part, code: Kernel, has_roles: bool) -> Counted:
    """The kernel with its main loops and what they come to for the part's work.

    Among the loops that multiply, as for full and for masked tiles, the one that issues least for its operations counts
    for all of the work; likewise among those that fetch.
    """
    counts = {loop: code.count(loop.path) for loop in code.innermost(multiplies=True)}
    loop = min(counts, key=lambda one: counts[one].instructions / _operations(counts[one]))
    compute, arms = counts[loop], code.count(loop.arms if has_roles else ())
    fetches = [code.count(loop.path) for loop in code.innermost(multiplies=False)]
    fetch = max(fetches, key=lambda one: one.announced / one.instructions, default=None)
    cycles = _cycles(part, compute, arms, fetch, own.blocks)
    return dataclasses.replace(
        own,
        compute=compute,
        arms=arms if has_roles else None,
        fetch=fetch,
        cycles={unit: round(value) for unit, value in cycles.items()},
        hbm_bytes=round(part.hbm_bytes),
    )


def _operations(count: Count) -> int:
    """Multiplications and additions of a warpgroup."""
    return count.group_operations + _WARPS * count.operations


def _filled(part: Part, compute: Count) -> float:
    """How much more is multiplied than the part's lanes hold."""
    if part.lanes is None:
        return 1
    step = compute.columns if 0 < compute.columns <= _FEW_COLUMNS else LANES
    return -(-part.lanes // step) * step / part.lanes


def _cycles(part: Part, compute: Count, arms: Count, fetch: Count | None, blocks: int) -> dict[str, float]:
    """Cycles of a multiprocessor for its share of the part's work, by unit."""
    trips = part.operations * _filled(part, compute) / MULTIPROCESSORS / _operations(compute)  # of all its consumers
    stages = trips / part.consumers
    fetched = (part.fetched_bytes or 0) / MULTIPROCESSORS
    bytes_a_trip = fetch.announced * _GROUP_THREADS if fetch else 0
    fetches = fetched / bytes_a_trip if bytes_a_trip else 0
    fetching = fetch or dataclasses.replace(arms, instructions=0, stalls=0)
    issued = trips * compute.instructions + stages * arms.instructions + fetches * fetching.instructions
    shared = trips * (compute.group_shared_bytes + _WARPS * compute.shared_bytes) + stages * _WARPS * arms.shared_bytes
    rate = _OPERATIONS * (2 if compute.has_bytes else 1)
    return {
        "issue": issued * _WARPS / _SCHEDULERS,
        "warp": max(stages * (compute.stalls + arms.stalls / part.consumers), fetches * fetching.stalls) / blocks,
        "wgmma": trips * _operations(compute) / rate,
        "mufu": (trips * compute.mufu + stages * arms.mufu) * _WARPS * 32 / _MUFU,
        "shared": (shared + fetched) / _SHARED_BYTES,
    }


def keep(counts: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the counts of the launches that there are."""
    names = sorted(counts.keys() & {launch.name for launch in gpu_launches.launches()})
    kept_counts.write(FILE, tools(), {name: dict(sorted(counts[name].items())) for name in names})


def worse(before: Mapping[str, Any], counted: Mapping[str, Counted]) -> list[str]:
    """What is worse by more than 2 % than a launch's counts before, and kernels that had none."""
    old = {name: columns(Counted.of(one)) for name, one in before.items()}
    return kept_counts.worse(old, {name: columns(one) for name, one in counted.items()})


def columns(one: Counted) -> dict[str, int]:
    """What must not get worse."""
    return {"registers": one.registers, "spill_bytes": one.spill_bytes, **one.cycles}


def make_table(counted: Mapping[str, Mapping[str, Counted]]) -> Table:
    """A row for each kernel that multiplies; units in microseconds of the launch."""
    table = Table(title="Ceilings: what a launch takes at least, nothing ran", pad_edge=False)
    columns = ("launch", "kernel", "registers (spilled)", "blocks", "trip: instructions, stalls, waits, barriers")
    units = ("issue", "warp", "wgmma", "mufu", "shared", "hbm")
    for column in (*columns, *units, *CHIPS):
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for launch, kernels in counted.items():
        for name, one in kernels.items():
            if one.compute is None or not one.hbm_bytes:
                continue
            trip = (one.compute.instructions, one.compute.stalls, one.compute.waits, one.compute.barriers)
            table.add_row(
                launch,
                name,
                f"{one.registers} ({one.spill_bytes})",
                str(one.blocks),
                ", ".join(map(str, trip)),
                *(f"{one.seconds(unit, 'h200') * 1e6:.1f}" for unit in units),
                *(f"{one.ceiling(chip) * 1e6:.1f} {one.bound(chip)}" for chip in CHIPS),
            )
    return table


def count_named(name: str) -> dict[str, Counted]:
    """The counts of the launch of that name."""
    return count(next(launch for launch in gpu_launches.launches() if launch.name == name))


def count_all(names: Sequence[str]) -> dict[str, dict[str, Counted]]:
    """The counts of launches by name, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        return dict(zip(names, pool.map(count_named, names), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = kept_counts.parse(parser, [launch.name for launch in gpu_launches.launches()], FILE)
    try:
        tool("nvdisasm")
    except FileNotFoundError as error:
        sys.exit(str(error))
    before, counted = kept(), count_all(arguments.names)
    Console(width=None if Console().is_terminal else 200).print(make_table(counted))
    if arguments.check:
        found = [
            f"{name} {line}" for name, one in counted.items() for line in worse(before["launches"].get(name, {}), one)
        ]
        kept_counts.end_if(found, tools(), FILE)
    if arguments.write:
        new = {
            launch: {name: dataclasses.asdict(one) for name, one in found.items()} for launch, found in counted.items()
        }
        keep(before["launches"] | new)


if __name__ == "__main__":
    main()
