"""Static estimate of products with weights in a form, of the kernel alone: no TPU is involved.

    python -m scripts.bench_products_static                                H = 4,096 to 14,336 and back: half an hour
    python -m scripts.bench_products_static --form int4-g128 --generation v6e --rows 16 --inputs 4096

Needs libtpu and no TPU: nothing runs, cycles are counted in the schedules that libtpu compiles (see `tpu_static`).
HBM: the share of its bandwidth at which codes, scales and zero points are read if waits are hidden. peak: the share of
the matrix units' bfloat16 rate, which int8 by int8 may exceed.
"""

from __future__ import annotations

import argparse
from typing import Any

from scripts import tpu_static  # isort: skip  # before jax: it sets what libtpu reads

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from checkpoints.stored_weight import WeightForm, made_form
from pallas_kernels.quantized_matmul import QuantizedWeight, quantized_matmul
from pallas_kernels.target import Target
from scripts.tpu_static import StaticResult

_SIZE = 4096 * 14336
FORMS: dict[str, WeightForm] = {
    **{name: form for name in ("int8", "int8-a16", "fp8-a16", "int4-g128") if (form := made_form(name)) is not None},
    "fp8-blocks": WeightForm(kind="fp8_e4m3", group=128),
    "mxfp4": WeightForm(kind="mxfp4", group=32, scale_dtype="uint8"),
}


def form_weight(form: WeightForm, shape: tuple[int, ...], target: Target) -> QuantizedWeight:
    """The shapes of a weight [.., O, I]."""
    leaves: dict[str, Any] = {
        leaf: jax.ShapeDtypeStruct(size, jnp.dtype(dtype)) for leaf, (size, dtype) in form.leaves(shape).items()
    }
    return QuantizedWeight(kind=form.kind, activations=form.activations, kernels=target, **leaves)


def measure(weight: QuantizedWeight, num_rows: int, generation: str) -> StaticResult:
    """x [num_rows, I] bfloat16 times the weight."""
    x = jax.ShapeDtypeStruct((num_rows, weight.shape[1]), jnp.bfloat16)
    return tpu_static.measure(quantized_matmul, [x, weight], generation=generation)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", action="append", choices=list(FORMS), help="may be repeated; default: all")
    parser.add_argument("--generation", action="append", choices=tpu_static.GENERATIONS, help="may be repeated")
    parser.add_argument("--rows", action="append", type=int, help="may be repeated; default: 16, 64 and 512")
    parser.add_argument("--inputs", action="append", type=int, choices=(4096, 14336), help="may be repeated")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    table = Table(title="static estimate, nothing ran", pad_edge=False)
    for name in ("form", "generation", "inputs", "rows", "cycles", "HBM", "peak", "spills", "VMEM KiB"):
        table.add_column(name, justify="left" if name in ("form", "generation") else "right")
    for generation in arguments.generation or ("v5e", "v6e", "v7x"):
        for name in arguments.form or FORMS:
            for inputs in arguments.inputs or (4096, 14336):
                for rows in arguments.rows or (16, 64, 512):
                    table.add_row(
                        name, generation, f"{inputs}", f"{rows}", *_cells(FORMS[name], inputs, rows, generation)
                    )
    Console(width=120).print(table)


def _cells(form: WeightForm, inputs: int, rows: int, generation: str) -> list[str]:
    target = Target.named(f"tpu:{generation}")
    weight = form_weight(form, (_SIZE // inputs, inputs), target)
    try:
        result = measure(weight, rows, generation)
    except ValueError as error:
        return [str(error).partition("'xla': ")[2] or str(error), "", "", "", ""]
    share = result.bandwidth_share(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight)))
    peak = 2 * rows * _SIZE / result.seconds / target.flops_per_s
    spills, vmem = (sum(getattr(k, name) for k in result.kernels) for name in ("vector_spills", "vmem_bytes"))
    return [f"{result.cycles:,.0f}", f"{share:.0%}", f"{peak:.0%}", f"{spills}", f"{vmem // 1024}"]


if __name__ == "__main__":
    main()
