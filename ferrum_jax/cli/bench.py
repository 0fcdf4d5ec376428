"""`ferrum-jax bench`: measures a workload and prints one JSON line."""

import argparse
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ferrum_jax.cli.model import add_model, chosen_config, open_llm
from ferrum_jax.cli.model_names import model_names
from ferrum_jax.cli.parsers import new_command


def add(commands: Any) -> None:
    bench = new_command(
        commands,
        "bench",
        _run,
        "measure offline throughput, or the error of a KV dtype or of quantised weights, and print one JSON line",
        "--model DIR --workload NAME",
        examples=(
            "--model checkpoints/demo --workload decode",
            "--model checkpoints/demo --workload kv_error --kv-dtype int8",
        ),
        common="model workload kv_dtype text",
    )
    bench.add_argument(
        "--workload",
        required=True,
        choices=("decode", "single", "shared_prefix", "ragged", "streams", "kv_error", "weights_error"),
        help="what to run; kv_error and weights_error measure what --kv-dtype, or each form of --weights, does "
        "to the logits",
    )
    bench.add_argument(
        "--text", type=Path, metavar="FILE", help="with weights_error, the text to predict (default: a few lines)"
    )
    add_model(bench)


def _run(args: argparse.Namespace) -> int:
    if args.text is not None and args.workload != "weights_error":
        raise ValueError(f"--text is for --workload weights_error; {args.workload} draws its own tokens")
    text = None if args.text is None else args.text.read_text(encoding="utf-8")
    with contextlib.ExitStack() as stack:
        alone = {"mesh": "tp=1"} if args.workload == "weights_error" else {}  # which is measured on one device
        given = argparse.Namespace(**{"ready": "all", **alone, **vars(args)})  # what is measured has nothing beside it
        llm = open_llm(given, chosen_config(given), stack)
        from ferrum_jax.cli.benchmarks.workloads import measure

        found = {"model": model_names(args.model, ())[0], **measure(llm, args.workload, text)}
        _show(found)
        print(json.dumps(found))
    return 0


def _show(found: Mapping[str, Any]) -> None:
    """The numbers as a table on stderr; stdout has them as JSON."""
    from rich.table import Table

    from ferrum_jax.core.progress import plain_console

    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in found.items():
        if not isinstance(value, dict | list):
            table.add_row(name.replace("_", " "), f"{value:,}" if type(value) in (int, float) else str(value))
    plain_console(stderr=True).print(table)
