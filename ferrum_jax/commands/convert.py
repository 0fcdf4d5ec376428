"""`ferrum-jax convert`: a Hugging Face folder as an Orbax checkpoint."""

from __future__ import annotations

import argparse
import collections
from pathlib import Path
from typing import Any

from ferrum_jax.commands.parsers import new_command


def add(commands: Any) -> None:
    convert = new_command(
        commands, "convert", _run, "write a Hugging Face folder as an Orbax checkpoint", "--hf DIR --out DIR"
    )
    convert.add_argument(
        "--hf", type=Path, required=True, metavar="DIR", help="folder with config.json and safetensors"
    )
    convert.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write, new or empty")
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: the checkpoint's own)",
    )


def _run(args: argparse.Namespace) -> int:
    from checkpoints.convert import convert
    from checkpoints.folder import read_json
    from ferrum_jax.models import registry

    config = read_json(args.hf / "config.json")
    dtype = args.dtype or _main_dtype(args.hf)
    weights = registry.weights_of(config, dtype)
    summary = convert(args.hf, args.out, **weights._asdict(), dtype=dtype)
    print(
        f"{args.out}: {summary.parameters} parameters, {summary.bytes / 1e6:,.1f} MB in {summary.dtype}, "
        f"largest rounding {summary.max_cast_error:.3g}"
    )
    return 0


def _main_dtype(folder: Path) -> str:
    """The dtype of most of a folder's weights, which config.json need not tell right."""
    from checkpoints.huggingface import map_tensors

    sizes = collections.Counter()
    for tensor in map_tensors(folder).values():
        sizes[tensor.dtype.name] += tensor.size
    return sizes.most_common(1)[0][0] if sizes else "float32"
