"""`ferrum-jax convert`: a Hugging Face folder as a checkpoint of ours, and back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_jax.cli.model import add_revision
from ferrum_jax.cli.parsers import new_command

if TYPE_CHECKING:
    from checkpoints import CastError


def add(commands: Any) -> None:
    convert = new_command(
        commands,
        "convert",
        _run,
        "write a Hugging Face folder as an Orbax checkpoint, or one back; started again, it continues where it stopped",
        "(--hf DIR --out DIR | --orbax DIR --to-hf DIR)",
        examples=("--hf checkpoints/demo --out demo_orbax", "--orbax demo_orbax --to-hf demo_hf"),
    )
    source = convert.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--hf",
        metavar="DIR",
        help="folder with config.json and safetensors, its URL (gs://), or a model of the hub as ORG/NAME",
    )
    source.add_argument("--orbax", type=Path, metavar="DIR", help="folder that convert wrote")
    add_revision(convert)
    convert.add_argument("--out", type=Path, metavar="DIR", help="with --hf, the folder to write, new or empty")
    convert.add_argument("--to-hf", type=Path, metavar="DIR", help="with --orbax, the folder to write, new or empty")
    convert.add_argument(
        "--weights",
        default="auto",
        metavar="FORM",
        help="with --hf, how dense layers are quantised: int8 or fp8 (with -a16: activations stay in 16 bits), "
        "mxfp4, int4 or int4-gN (a scale for each N inputs), such as int4-g32 (default: auto, as they are stored)",
    )
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: each keeps its own); the rounding error is printed",
    )
    convert.add_argument(
        "--adapter", metavar="DIR", help="with --hf, a LoRA that PEFT saved, or its URL; it is merged into the weights"
    )


def _run(args: argparse.Namespace) -> int:
    if args.hf is not None:
        if args.out is None or args.to_hf is not None:
            raise ValueError("--hf wants --out, the folder to write")
        if args.adapter is not None and args.weights != "auto":
            raise ValueError(
                f"--weights {args.weights} and --adapter do not go together: merge the adapter first, write the result "
                "with --to-hf, and quantise that folder"
            )
        return _from_hf(args.hf, args.revision, args.out, args.dtype, args.weights, args.adapter)
    alone = args.out is args.dtype is args.revision is args.adapter is None
    if args.to_hf is None or not alone or args.weights != "auto":
        raise ValueError("--orbax wants --to-hf, the folder to write, and nothing else")
    return _to_hf(args.orbax, args.to_hf)


def _from_hf(hf: str, revision: str | None, out: Path, dtype: str | None, form: str, adapter: str | None) -> int:
    from checkpoints import convert, open_checkpoint, read_adapter
    from checkpoints.hub import model_folder
    from checkpoints.placement import weight_shapes
    from ferrum_jax.core.progress import plain_console, status
    from ferrum_jax.models.families import registry

    hf = model_folder(hf, revision)
    checkpoint = open_checkpoint(hf)
    weights = registry.weights_of(
        checkpoint.config, has_head=lambda: checkpoint.has_head, stored=checkpoint.stored_forms, weights=form
    )
    lora = adapter and read_adapter(adapter, rules=weights.rules, weights=weight_shapes(weights.targets))
    with status(plain_console(stderr=True), f"converting {hf}"):
        summary = convert(hf, out, **weights._asdict(), dtype=dtype, adapter=lora or None)
    print(
        f"{out}: {summary.parameters} parameters, {summary.bytes / 1e6:,.1f} MB in {summary.dtype}, "
        f"largest rounding {summary.max_cast_error:.3g}"
    )
    if summary.num_resumed:
        print(f"{summary.num_resumed} groups of parameters were there already")
    if summary.cast_errors:
        _print_errors(summary.cast_errors)
    return 0


def _print_errors(errors: tuple[CastError, ...]) -> None:
    from rich.table import Table

    from ferrum_jax.core.progress import plain_console

    table = Table("parameters", "largest error", "relative RMS", title="what the cast changed")
    for error in errors:
        table.add_row(error.parameters, f"{error.largest:.3g}", f"{error.relative_rms:.3g}")
    plain_console().print(table)


def _to_hf(source: Path, out: Path) -> int:
    from checkpoints import open_checkpoint, to_huggingface
    from ferrum_jax.core.progress import plain_console, status
    from ferrum_jax.models.families import registry

    checkpoint = open_checkpoint(source)
    weights = registry.weights_of(
        checkpoint.config, has_head=lambda: checkpoint.has_head, stored=checkpoint.stored_forms
    )
    with status(plain_console(stderr=True), f"converting {source}"):
        count = to_huggingface(source, out, rules=weights.rules)
    print(f"{out}: {count} tensors")
    return 0
