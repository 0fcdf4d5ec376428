"""Static speed of the TPU kernels, for each case and generation, beside jax's own ragged paged attention.

    python -m scripts.bench_tpu_static                                     cases of real sizes, v5e, v6e and v7x
    python -m scripts.bench_tpu_static --case llama_8b_decode_c16 --generation v6e --regions

Needs libtpu (pip install ferrum-jax[aot]) and no TPU: nothing runs, cycles are counted in the schedules that libtpu
compiles (see `tpu_static`). jax's kernel does not write K and V; it is taken with the better of two tile sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from scripts import tpu_static  # isort: skip  # before jax: it sets what libtpu reads

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from rich.console import Console
from rich.table import Table

from pallas_kernels.paged_attention import TpuConfig, make_schedule, paged_attention
from pallas_kernels.paged_attention.cases import REAL_CASES, Case, make_batch, make_shapes
from pallas_kernels.target import Target
from scripts.tpu_static import StaticResult

_BASELINE_TILES_KV = (256, 2048)  # tokens; the larger is better where it fits
_BASELINE_TILE_Q = 32  # of all entries of its table of tuned sizes for these shapes
_UNITS = ("MXU", "VALU", "XLU", "EUP", "VLOAD", "VSTORE", "SALU")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a case asks for, whatever the kernel."""

    kv_tokens: int  # that a row or, in prefill, a row's chunk must read
    flops: int  # of visible query-key pairs
    kv_bytes: int  # of these tokens in the pool, as the kernels keep them

    @classmethod
    def of(cls, case: Case) -> Work:
        """Counted from the rows."""
        pool = make_shapes(case).pool
        per_token = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pool)) // pool.values.shape[0]
        tokens = pairs = 0
        for start, count in case.rows:
            last = start + count
            oldest = 0 if case.window is None else max(0, start - case.window + 1)
            tokens += last - oldest
            for position in range(start, last):
                behind = position + 1 if case.window is None else min(position + 1, case.window)
                pairs += behind if case.causal else last
        return cls(
            kv_tokens=tokens,
            flops=4 * pairs * case.num_heads * case.head_dim,
            kv_bytes=tokens * per_token // case.block_size,
        )


def launch(case: Case, target: Target) -> tuple[Callable[..., Any], list[Any]]:
    """One layer's attention and its arguments: shapes, and the schedule that the step made of the case's rows."""
    shapes = make_shapes(case)
    tables = shapes.batch.block_tables.shape
    blocks = 1 + np.arange(np.prod(tables), dtype=np.int32).reshape(tables)  # to the null block nothing is written
    schedule = make_schedule(
        make_batch(case, blocks),
        num_tokens=case.num_tokens,
        block_size=case.block_size,
        config=choose_config(case, target),
        window=case.window,
        causal=case.causal,
        implementation="mosaic_tpu",
    )
    fn = functools.partial(paged_attention, **case.attention, implementation="mosaic_tpu")
    args = [shapes.q, shapes.k, shapes.v, shapes.pool, schedule]
    if case.has_sinks:
        return lambda *a: fn(*a[:-1], sinks=a[-1]), [*args, shapes.sinks]
    return fn, args


def choose_config(case: Case, target: Target) -> TpuConfig:
    """The tiles that an engine's step of these shapes would have."""
    return TpuConfig.choose(
        num_tokens=case.num_tokens,
        num_rows=case.num_rows,
        max_blocks=case.max_blocks,
        num_heads=case.num_heads,
        dtype=jnp.dtype(case.dtype),
        pool=make_shapes(case).pool,
        decode_only=case.decode_only,
        target=target,
    )


def measure_ours(case: Case, generation: str) -> StaticResult:
    """The case through the public function, its pool donated."""
    fn, args = launch(case, Target.named(f"tpu:{generation}"))
    return tpu_static.measure(fn, args, generation=generation, donate=(3,))


def has_baseline(case: Case) -> bool:
    """Whether jax's kernel can do the case."""
    is_plain = case.kv_dtype == case.dtype == "bfloat16" and case.causal and not case.has_sinks
    return is_plain and case.head_dim == 128


def measure_baseline(case: Case, generation: str) -> StaticResult | None:
    """jax's kernel on the same shapes, the fastest of its tile sizes that fit; None where none does."""
    results = [_measure_baseline(case, generation, tile) for tile in _BASELINE_TILES_KV]
    return min((r for r in results if r is not None), key=lambda r: r.cycles, default=None)


def _measure_baseline(case: Case, generation: str, tile_kv: int) -> StaticResult | None:
    shapes = make_shapes(case)
    tile_q = min(_BASELINE_TILE_Q, case.num_tokens)
    pages = min(max(1, tile_kv // case.block_size), case.max_blocks)
    tables = np.zeros((case.num_rows, case.max_blocks), np.int32)
    batch = make_batch(case, tables)
    ends = np.cumsum(batch.counts, dtype=np.int32)
    contexts = np.asarray(batch.starts + batch.counts, np.int32)
    args = [shapes.q, shapes.pool.values, contexts, tables, np.array([0, *ends], np.int32)]
    fn = functools.partial(
        ragged_paged_attention,
        sm_scale=case.softmax_scale,
        sliding_window=case.window,
        soft_cap=case.soft_cap,
        num_kv_pages_per_block=pages,
        num_queries_per_block=tile_q,
    )
    try:
        return tpu_static.measure(fn, [*args, np.array([len(case.rows)], np.int32)], generation=generation)
    except jax.errors.JaxRuntimeError as error:
        if "vmem" not in str(error):
            raise
        return None


def _cells(case: Case, work: Work, result: StaticResult | None) -> list[str]:
    """Cycles per KV token, share of HBM bandwidth and of peak flops."""
    if result is None:
        return ["does not fit", "", ""]
    share = work.flops / result.seconds / result.target.flops_per_s
    hbm = "" if any(count > 1 for _, count in case.rows) else f"{result.bandwidth_share(work.kv_bytes):.0%}"
    return [f"{result.cycles / work.kv_tokens:.2f}", hbm, f"{share:.0%}"]


def make_table(
    generation: str, rows: list[tuple[Case, StaticResult, StaticResult | None]], *, compares: bool = True
) -> Table:
    """One generation's table. Units: of the loop that takes most cycles. fixed: cycles outside all loops."""
    table = Table(title=f"{generation}: static estimate, nothing ran", pad_edge=False)
    for name in ("case", "cycles / KV token", "HBM", "peak", "jax: cycles", "HBM", "peak"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for name in (*_UNITS, "spills", "fixed", "VMEM KiB"):
        table.add_column(name, justify="right")
    for case, ours, baseline in rows:
        work, hot = Work.of(case), max(ours.kernels, key=lambda kernel: kernel.cycles)
        theirs = _cells(case, work, baseline) if compares and has_baseline(case) else ["-", "", ""]
        spills = f"{sum(k.vector_spills for k in ours.kernels)} + {sum(k.scalar_spills for k in ours.kernels)}"
        used = [f"{hot.utilization[unit]:.0%}" for unit in _UNITS]
        table.add_row(
            case.name,
            *_cells(case, work, ours),
            *theirs,
            *used,
            spills,
            f"{ours.fixed_cycles:.0f}",
            f"{max(k.vmem_bytes for k in ours.kernels) // 1024}",
        )
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in REAL_CASES]
    parser.add_argument("--case", action="append", choices=names, help="may be repeated; default: all")
    parser.add_argument("--generation", action="append", choices=tpu_static.GENERATIONS, help="may be repeated")
    parser.add_argument("--no-baseline", action="store_true", help="leave out jax's kernel, which compiles longest")
    parser.add_argument("--regions", action="store_true", help="also print each kernel's regions and their counts")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=None if Console().is_terminal else 200)
    cases = [case for case in REAL_CASES if not arguments.case or case.name in arguments.case]
    for generation in arguments.generation or ("v5e", "v6e", "v7x"):
        rows: list[tuple[Case, Any, Any]] = []
        for case in cases:
            if case.kv_dtype.startswith("fp8") and not Target.named(f"tpu:{generation}").has_fp8:
                continue
            ours = measure_ours(case, generation)
            compares = has_baseline(case) and not arguments.no_baseline
            rows.append((case, ours, measure_baseline(case, generation) if compares else None))
            if arguments.regions:
                console.print(ours.describe(), highlight=False)
        console.print(make_table(generation, rows, compares=not arguments.no_baseline))


if __name__ == "__main__":
    main()
