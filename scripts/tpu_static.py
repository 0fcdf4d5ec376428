"""How fast a Pallas TPU kernel would be, counted in the schedule that libtpu compiles for it; no TPU is involved.

    from scripts import tpu_static        # before jax compiles anything: it sets what libtpu reads when it loads
    result = tpu_static.measure(fn, [jax.ShapeDtypeStruct(...), ...], generation="v6e", trip_counts={"L1": 8})
    print(result.describe())

Counting, the regions L0, W0, ... and their counts are explained in `tpu_bundles`. With two kernels in fn, a count's
name is "kernel/L0". describe() shows the tree of regions; an error does where a loop's count is missing.
Give pools of at least 1 GiB, else XLA puts them in VMEM.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_FOLDER = pathlib.Path(tempfile.mkdtemp(prefix="tpu_static_"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["LIBTPU_INIT_ARGS"] = (
    f"--xla_jf_dump_to={_FOLDER} --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra|pre-delay|pre-finalize"
)
for _name, _value in {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}.items():
    os.environ.setdefault(_name, _value)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from pallas_kernels.target import Target  # noqa: E402
from scripts import tpu_bundles  # noqa: E402
from scripts.tpu_bundles import Schedule  # noqa: E402

_TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "TPU7x:2x2x1"}
GENERATIONS = tuple(_TOPOLOGIES)
_ALLOCATION = re.compile(r"space=(vmem|smem), size = 0x([0-9a-f]+).*?, scoped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelResult:
    """One kernel of a launch. Cycles are bundles times executions."""

    schedule: Schedule
    cycles: float  # of a whole launch
    fixed_cycles: float  # of them, outside all loops
    hot: str  # the region with most cycles of its own
    hot_cycles: float  # its own, over the whole launch
    utilization: dict[str, float]  # share of each unit's issue slots that the hot region's own bundles fill
    vector_spills: int  # registers written to VMEM and read back, as instructions in the program text
    scalar_spills: int
    vmem_bytes: int  # what the compiler allocated
    smem_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticResult:
    """A launch of fn on one device. outside: bundles, counted once, of the XLA operations around the kernels."""

    generation: str
    kernels: tuple[KernelResult, ...]
    outside: dict[str, int]
    hlo: str

    @property
    def target(self) -> Target:
        return Target.named(f"tpu:{self.generation}")

    @property
    def cycles(self) -> float:
        return sum(kernel.cycles for kernel in self.kernels)

    @property
    def fixed_cycles(self) -> float:
        return sum(kernel.fixed_cycles for kernel in self.kernels)

    @property
    def seconds(self) -> float:
        clock_hz = self.target.clock_hz
        assert clock_hz is not None, self.generation
        return self.cycles / clock_hz

    def bandwidth_share(self, num_bytes: float) -> float:
        """The share of HBM bandwidth that a launch moving num_bytes reaches if waits are hidden; at most 1."""
        return min(1.0, num_bytes / self.target.bandwidth_bytes_per_s / self.seconds)

    def describe(self) -> str:
        """Kernels, regions and the operations around them, for reading."""
        lines = []
        for kernel in self.kernels:
            used = ", ".join(f"{unit} {share:.0%}" for unit, share in kernel.utilization.items())
            lines += [
                f"{kernel.schedule.name} on {self.generation}: {kernel.cycles:.0f} cycles, {kernel.fixed_cycles:.0f} "
                f"fixed, {kernel.hot} has {kernel.hot_cycles:.0f} ({used})",
                f"spills: {kernel.vector_spills} vector, {kernel.scalar_spills} scalar; "
                f"VMEM {kernel.vmem_bytes}, SMEM {kernel.smem_bytes} bytes",
                kernel.schedule.describe(),
            ]
        return "\n".join([*lines, f"around: {self.outside}"])


def measure(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    generation: str,
    donate: Sequence[int] = (),
    trip_counts: Mapping[str, float] | None = None,
) -> StaticResult:
    """What fn costs on one device of a generation in GENERATIONS. args: pytrees of ShapeDtypeStruct.

    Raises ValueError where a count is missing or names no region, and what the compiler raises.
    """
    for path in _FOLDER.iterdir():
        path.unlink()
    hlo = compile_for(fn, args, generation=generation, donate=donate).as_text()
    dumps = _dumps()
    names = [name for name, passes in dumps.items() if "tpu_custom_call" in passes["schedule-analysis"]]
    counts = dict(trip_counts or {})
    kernels = []
    for name in names:
        short = re.sub(r"\.\d+$", "", name)
        own = {key.rpartition("/")[2]: n for key, n in counts.items() if len(names) == 1 or key.startswith(f"{short}/")}
        kernels.append(_kernel_result(short, dumps[name], generation, own))
    outside = {name: d["bundles"].count("\n") for name, d in dumps.items() if name not in names and "<" not in name}
    return StaticResult(generation=generation, kernels=tuple(kernels), outside=outside, hlo=hlo)


def compile_for(fn: Callable[..., Any], args: Sequence[Any], *, generation: str, donate: Sequence[int] = ()) -> Any:
    """The executable of jit(fn) for one device of a generation that need not be here."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=_TOPOLOGIES[generation])
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), list(args))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(fn, donate_argnums=tuple(donate)).trace(*placed).lower(lowering_platforms=("tpu",))
        return lowered.compile()


def _dumps() -> dict[str, dict[str, str]]:
    """The text of each pass of each operation, by the operation's name."""
    kinds = {
        "schedule-analysis": "schedule-analysis_packed-bundles-post-ra.txt",
        "bundles": "-packed-bundles-post-ra.txt",
        "utilization": "pre-delay_hlo-static-per-bundle-utilization.txt",
        "allocations": "pre-finalize-registers-and-allocations.txt",
    }
    found: dict[str, dict[str, str]] = {}
    for path in sorted(_FOLDER.iterdir()):
        parts = re.fullmatch(r"\d+-(.*)-\d\d-(.*)", path.name)
        if parts is None:
            continue
        for kind, ending in kinds.items():
            if ("-" + parts[2]).endswith(ending) and (kind != "bundles" or "analysis" not in parts[2]):
                found.setdefault(parts[1], dict.fromkeys(kinds, ""))[kind] = path.read_text()
    found.pop("TLP", None)  # the program that calls the others
    return found


def _kernel_result(name: str, dump: dict[str, str], generation: str, counts: Mapping[str, float]) -> KernelResult:
    schedule = tpu_bundles.read_schedule(name, dump["bundles"], dump["utilization"], generation, counts)
    runs, own = schedule.executions(), schedule.own_bundles()
    cycles = [n * bundles for n, bundles in zip(runs, own, strict=True)]
    hot = max(range(len(cycles)), key=cycles.__getitem__)
    in_loops = _inside_loops(schedule)
    sizes = {"vmem": 0, "smem": 0}
    for space, size in _ALLOCATION.findall(dump["allocations"]):
        sizes[space] += int(size, 16)
    spill = list(schedule.units).index("VSTORE:SPILL")
    return KernelResult(
        schedule=schedule,
        cycles=sum(cycles),
        fixed_cycles=sum(c for c, inside in zip(cycles, in_loops, strict=True) if not inside),
        hot=schedule.regions[hot].name,
        hot_cycles=cycles[hot],
        utilization=_utilization(schedule, hot),
        vector_spills=sum(row[spill] for row in schedule.used),
        scalar_spills=schedule.num_scalar_spills,
        vmem_bytes=sizes["vmem"],
        smem_bytes=sizes["smem"],
    )


def _inside_loops(schedule: Schedule) -> list[bool]:
    inside = [False]
    for region in schedule.regions[1:]:
        inside.append(inside[region.parent] or region.name[0] == "L")
    return inside


def _utilization(schedule: Schedule, region: int) -> dict[str, float]:
    span = schedule.regions[region]
    inner = [r for r in schedule.regions if r.parent == region]
    own = [i for i in range(span.first, span.end) if not any(r.first <= i < r.end for r in inner)]
    slots = {unit: n * len(own) for unit, n in schedule.units.items()}
    filled = {unit: sum(schedule.used[i][u] for i in own) for u, unit in enumerate(schedule.units)}
    return {unit: filled[unit] / slots[unit] for unit in schedule.units}
