"""What the compiler makes of a Mosaic GPU kernel for Hopper: registers, spills and shared memory; no GPU is involved.

Needs the `aot` extra. What a kernel would take in time, no compiler says.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # who tests on a GPU imports this too
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu import lowering
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ferrum_jax.runtime.compile.topology import target_devices
from pallas_kernels.paged_attention import GpuConfig, make_schedule, paged_attention
from pallas_kernels.paged_attention.cases import Case, make_shapes
from pallas_kernels.paged_attention.run_case import choose_config
from scripts.hopper_cases import TARGET

_KERNEL = re.compile(
    r"bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s+ptxas info\s*: Used (\d+) registers"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """registers: of a thread, before warpgroups divide them anew. spill_bytes: of a thread, stored and loaded."""

    registers: int
    spill_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """kernels: in the order in which they were compiled. shared_bytes: the most that one takes of a multiprocessor.

    output: what the compilers printed meanwhile.
    """

    executable: jax.stages.Compiled
    kernels: list[Kernel]
    shared_bytes: int
    output: str


def h200s(count: int = 1) -> list[Any]:
    """Devices of one host that is not here."""
    return list(target_devices(f"gpu:h200:{count}"))


def compile_for_h200(
    function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = (), options: dict[str, Any] | None = None
) -> Compiled:
    """The function, compiled for one H200 that is not here. options: of XLA."""
    where = NamedSharding(Mesh(np.array(h200s()), ("tp",)), PartitionSpec())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), shapes)
    jitted = jax.jit(function, donate_argnums=donate, compiler_options=options)
    return compile_traced(lambda: jitted.trace(*placed))


def compile_traced(trace: Callable[[], jax.stages.Traced]) -> Compiled:
    """What was traced for such devices, compiled; it is traced here, since that is when kernels are laid out."""
    with _shared_memory() as shared, _output() as output:
        executable = trace().lower(lowering_platforms=("cuda",)).compile()
        printed = output.read_text()
    kernels = [
        Kernel(registers=int(registers), spill_bytes=int(stores) + int(loads))
        for stores, loads, registers in _KERNEL.findall(printed)
    ]
    return Compiled(executable=executable, kernels=kernels, shared_bytes=max(shared, default=0), output=printed)


@contextlib.contextmanager
def _shared_memory() -> Iterator[list[int]]:
    """The shared memory that each part of the kernels that are lowered meanwhile asks for."""
    found: list[int] = []
    estimate = lowering._estimate_resources

    def recording(*arguments: Any) -> Any:
        resources = estimate(*arguments)
        found.append(resources.smem_scratch_bytes)
        return resources

    lowering._estimate_resources = recording
    try:
        yield found
    finally:
        lowering._estimate_resources = estimate


@contextlib.contextmanager
def _output() -> Iterator[pathlib.Path]:
    """A file with what is written to the standard output meanwhile, by compilers too."""
    with tempfile.NamedTemporaryFile(delete=False) as file:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield pathlib.Path(file.name)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            os.unlink(file.name)


def config_of(case: Case) -> GpuConfig:
    """The tiles that an engine would take for a case."""
    config = choose_config(case, "mosaic_gpu", TARGET, make_shapes(case, "mosaic_gpu").pool)
    assert isinstance(config, GpuConfig)
    return config


def compile_case(case: Case) -> Compiled:
    """A case of paged attention; its pool is donated."""
    a, config = make_shapes(case, "mosaic_gpu"), config_of(case)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, pool: Any, batch: Any, sinks: Any) -> Any:
        schedule = make_schedule(batch, **case.step, config=config, implementation="mosaic_gpu")
        return paged_attention(
            q,
            k,
            v,
            pool,
            schedule,
            **case.attention,
            sinks=sinks,
            implementation="mosaic_gpu",
        )

    return compile_for_h200(attend, a.q, a.k, a.v, a.pool, a.batch, a.sinks, donate=(3,))
