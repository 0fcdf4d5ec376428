"""How fast a Pallas TPU kernel would be, counted in the schedule that libtpu compiles for it; no TPU is involved.

    from scripts import tpu_static        # before jax compiles anything: it sets what libtpu reads when it loads
    result = tpu_static.measure(fn, [jax.ShapeDtypeStruct(...), schedule], generation="v6e")

The arguments that decide loops are arrays, and the others shapes: how often each part runs is found by running the
scalar half of each kernel (`tpu_trace`). Give pools of at least 1 GiB, else XLA puts them in VMEM.
"""

from __future__ import annotations

import atexit
import collections
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
from jax.experimental.layout import Format, Layout  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from pallas_kernels.kv_pool import KVPool  # noqa: E402
from pallas_kernels.quantized_matmul import QuantizedWeight  # noqa: E402
from scripts import tpu_bundles, tpu_prefetch, tpu_trace  # noqa: E402
from scripts.tpu_bundles import Schedule  # noqa: E402

_TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "TPU7x:2x2x1"}
GENERATIONS = tuple(_TOPOLOGIES)
_MOST_OPERANDS = 64  # of an operation of XLA
_CALL = re.compile(
    r"^ *(?:ROOT )?%(\S+) = .* custom-call\(.*custom_call_target=\"tpu_custom_call\".*\"body\":\"([^\"]*)\"", re.M
)
_ALLOCATION = re.compile(r"space=(vmem|smem), size = 0x([0-9a-f]+).*?, scoped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelResult:
    """One kernel of a launch. Cycles are bundles times executions and raise ValueError where a count lacks."""

    schedule: Schedule
    vmem_bytes: int  # what the compiler allocated
    smem_bytes: int
    num_calls: int = 1  # of equal kernels, which are compiled once

    def with_counts(self, counts: Mapping[str, float]) -> KernelResult:
        """The same with these regions' counts."""
        return dataclasses.replace(self, schedule=self.schedule.with_counts(counts))

    @property
    def region_cycles(self) -> list[float]:
        """Cycles of each region outside its inner regions, over the whole launch and all calls."""
        runs = self.schedule.executions()
        return [self.num_calls * n * own for n, own in zip(runs, self.schedule.own_bundles(), strict=True)]

    @property
    def cycles(self) -> float:
        """Cycles of a whole launch, of all calls."""
        return sum(self.region_cycles)

    @property
    def hot(self) -> int:
        """Index of the region with most cycles of its own."""
        cycles = self.region_cycles
        return max(range(len(cycles)), key=cycles.__getitem__)

    @property
    def utilization(self) -> dict[str, float]:
        """Share of each unit's issue slots that the hot region's own bundles fill."""
        return self.schedule.utilization(self.hot)

    @property
    def vector_spills(self) -> int:
        """Stores of vector registers for lack of registers, in the program text."""
        spill = list(self.schedule.units).index("VSTORE:SPILL")
        return sum(row[spill] for row in self.schedule.used)

    @property
    def scalar_spills(self) -> int:
        return self.schedule.num_scalar_spills


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticResult:
    """A launch of fn on one device."""

    compiled: Any  # jax.stages.Compiled
    kernels: tuple[KernelResult, ...]

    @property
    def hlo(self) -> str:
        return self.compiled.as_text()

    @property
    def cycles(self) -> float:
        return sum(kernel.cycles for kernel in self.kernels)


def measure(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    generation: str,
    donate: Sequence[int] = (),
    counts: bool = True,
    of_xla: bool = False,
) -> StaticResult:
    """What fn costs on one device of a generation in GENERATIONS. args: pytrees of arrays and ShapeDtypeStructs.

    counts: False to compile alone. of_xla: XLA's own operations are counted like kernels; those in loops of the program
    as if they ran once. Raises ValueError where a scalar that a kernel reads first depends on an argument without a
    value and runs are counted, and what the compiler raises.
    """
    forget()
    compiled = compile_for(fn, args, generation=generation, donate=donate)
    dumps = {name: passes for name, passes in _dumps().items() if "<" not in name}
    names = [name for name, passes in dumps.items() if of_xla or _is_kernel(passes)]
    scalars = tpu_prefetch.known_operands(fn, args) if counts else []
    calls = _calls(compiled.as_text())
    kernels = []
    for name in names:
        short = re.sub(r"\.\d+$", "", name)
        kernel = dataclasses.replace(_kernel_result(short, dumps[name], generation), num_calls=calls.get(name, 1))
        named = (values for called, values in scalars if called in (short, tpu_prefetch.NAMELESS))
        operands = next(named, [None] * _MOST_OPERANDS)
        runs = kernel.schedule.counts_of(_runs(dumps[name], generation, operands)) if counts else {}
        kernels.append(kernel.with_counts(runs))
    return StaticResult(compiled=compiled, kernels=tuple(kernels))


def forget() -> None:
    """Before a compile: what the last one printed is no longer of interest."""
    for path in _FOLDER.iterdir():
        path.unlink()


def printed_kernels(
    generation: str, operands: Callable[[str], Sequence[np.ndarray | None] | None]
) -> dict[str, KernelResult]:
    """The kernels of what was compiled since `forget`, by the name of the call of the first of equal ones.

    operands: of a kernel by its name, None where no scalar decides a loop. A kernel that the process compiled before is
    not printed again.
    """
    found = {}
    for name, passes in _dumps().items():
        if _is_kernel(passes):
            short = re.sub(r"\.\d+$", "", name)
            kernel = _kernel_result(short, passes, generation)
            runs = _runs(passes, generation, operands(short) or [None] * _MOST_OPERANDS)
            found[name] = kernel.with_counts(kernel.schedule.counts_of(runs))
    return found


def compile_for(fn: Callable[..., Any], args: Sequence[Any], *, generation: str, donate: Sequence[int] = ()) -> Any:
    """The executable of jit(fn) for one device of a generation that need not be here.

    Arguments and results lie as an engine's pools do, row by row, and of latents token by token: XLA would copy others
    for a kernel. Weights in a form lie as XLA puts them.
    """
    topology = topologies.get_topology_desc(platform="tpu", topology_name=_TOPOLOGIES[generation])
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(given: Any) -> Any:
        latents = isinstance(given, KVPool) and given.is_latent

        def of_array(array: Any) -> jax.ShapeDtypeStruct:
            if isinstance(given, QuantizedWeight):
                return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
            order = (0, 2, 1, 3) if latents and len(array.shape) == 4 else tuple(range(len(array.shape)))
            layout = Format(Layout(major_to_minor=order), sharding)
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=layout)

        return jax.tree.map(of_array, given)

    def placed_all(tree: Any) -> Any:
        return jax.tree.map(place, tree, is_leaf=lambda leaf: isinstance(leaf, KVPool | QuantizedWeight))

    placed = placed_all(list(args))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        results = jax.tree.map(lambda array: array.format, placed_all(jax.eval_shape(fn, *args)))
        jitted = jax.jit(fn, donate_argnums=tuple(donate), out_shardings=results)
        return jitted.trace(*placed).lower(lowering_platforms=("tpu",)).compile()


def _calls(hlo: str) -> dict[str, int]:
    """How often the program calls each kernel or its equals, by the name of each call."""
    bodies = dict(_CALL.findall(hlo))
    counts = collections.Counter(bodies.values())
    return {name: counts[body] for name, body in bodies.items()}


def _is_kernel(passes: Mapping[str, str]) -> bool:
    return "tpu_custom_call" in passes["schedule-analysis"]


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


def _runs(dump: dict[str, str], generation: str, operands: Sequence[np.ndarray | None]) -> np.ndarray:
    texts = tpu_bundles.bundle_texts(dump["bundles"])
    return tpu_trace.count_runs(texts, dump["allocations"], tpu_bundles.DELAY_SLOTS[generation], operands)


def _kernel_result(name: str, dump: dict[str, str], generation: str) -> KernelResult:
    sizes = {"vmem": 0, "smem": 0}
    for space, size in _ALLOCATION.findall(dump["allocations"]):
        sizes[space] += int(size, 16)
    schedule = tpu_bundles.read_schedule(name, dump["bundles"], dump["utilization"], generation)
    return KernelResult(schedule=schedule, vmem_bytes=sizes["vmem"], smem_bytes=sizes["smem"])
