"""Static speed of the TPU kernels for each case and generation, compared to jax's own ragged paged attention.

    python -m scripts.bench_tpu_static                                     cases of real sizes, v5e, v6e and v7x
    python -m scripts.bench_tpu_static --case llama_8b_decode_c16 --generation v6e --regions

Needs libtpu (pip install -e '.[aot]') but no TPU: nothing runs, cycles are counted in the schedules that libtpu
compiles (see `tpu_static`). jax's kernel does not write K and V; the better of two tile sizes is shown.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from scripts import tpu_static  # isort: skip  # before jax: it sets environment variables for libtpu

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from rich.console import Console
from rich.table import Table

from pallas_kernels.paged_attention import LatentConfig, TpuConfig, make_schedule, paged_attention, run_case
from pallas_kernels.paged_attention.cases import REAL_CASES, Case, make_batch, make_shapes
from pallas_kernels.paged_attention.work import Work
from pallas_kernels.target import Target
from scripts.tpu_static import StaticResult

BASELINE_TILES_KV = (256, 2048)  # tokens; the larger is better where it fits
_BASELINE_TILE_Q = 32  # the same in all entries of its tuning table for these shapes
_UNITS = ("MXU", "VALU", "XLU", "EUP", "VLOAD", "VSTORE", "SALU")


def launch(
    case: Case, target: Target, config: TpuConfig | LatentConfig | None = None
) -> tuple[Callable[..., Any], list[Any]]:
    """One layer's attention and its arguments: shapes, and the schedule that the step made of the case's rows."""
    shapes = make_shapes(case)
    tables = shapes.batch.block_tables.shape
    blocks = 1 + np.arange(np.prod(tables), dtype=np.int32).reshape(tables)  # none null: that is not written
    schedule = make_schedule(
        make_batch(case, blocks),
        **case.step,
        config=config or choose_config(case, target),
        implementation="mosaic_tpu",
    )
    fn = functools.partial(paged_attention, **case.attention, implementation="mosaic_tpu")
    args = [shapes.q, shapes.k, shapes.v, shapes.pool, schedule]
    if case.has_sinks:
        return lambda *a: fn(*a[:-1], sinks=a[-1]), [*args, shapes.sinks]
    return fn, args


def choose_config(case: Case, target: Target) -> TpuConfig | LatentConfig:
    """The tiles that an engine would choose for a step of these shapes."""
    config = run_case.choose_config(case, "mosaic_tpu", target, make_shapes(case).pool)
    assert isinstance(config, TpuConfig | LatentConfig)
    return config


def measure_ours(case: Case, generation: str, config: TpuConfig | LatentConfig | None = None) -> StaticResult:
    """The case through the public function, its pool donated. config: None is what an engine's step would have."""
    fn, args = launch(case, Target.named(f"tpu:{generation}"), config)
    return tpu_static.measure(fn, args, generation=generation, donate=(3,))


def has_baseline(case: Case) -> bool:
    """Whether jax's kernel can do the case."""
    is_plain = case.kv_dtype == case.dtype == "bfloat16" and case.causal and not case.has_sinks
    return is_plain and case.head_dim == 128 and case.rope_dim is None


def measure_baseline(case: Case, generation: str) -> StaticResult | None:
    """jax's kernel on the same shapes, the fastest of its tile sizes that fit; None where none does."""
    results = [_measure_baseline(case, generation, tile) for tile in BASELINE_TILES_KV]
    return min((r for r in results if r is not None), key=lambda r: r.cycles, default=None)


def _measure_baseline(case: Case, generation: str, tile_kv: int) -> StaticResult | None:
    fn, args = baseline_launch(case, tile_kv)
    try:
        return tpu_static.measure(fn, args, generation=generation)
    except jax.errors.JaxRuntimeError as error:
        if "vmem" not in str(error):
            raise
        return None


def baseline_launch(case: Case, tile_kv: int) -> tuple[Callable[..., Any], list[Any]]:
    """jax's kernel and its arguments, as `launch` has ours."""
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
    return fn, [*args, np.array([len(case.rows)], np.int32)]


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
    """One generation's table. Columns of units: their use in the loop with most cycles. fixed: cycles outside loops."""
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
