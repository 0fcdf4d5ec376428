"""`ferrum-jax plan`: the memory of an engine and the bounds of its speed, for a device that need not be here."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from ferrum_jax.commands.compile import add_target, without_device
from ferrum_jax.commands.parsers import new_command
from ferrum_jax.flags import add_engine_flags, engine_config

if TYPE_CHECKING:
    from ferrum_jax.bundling import BundleOrder
    from ferrum_jax.forecast import Forecast
    from ferrum_jax.runtime.layout import Layout


def add(commands: Any) -> None:
    plan = new_command(
        commands,
        "plan",
        _run,
        "say what fits a device that need not be here, and how fast it can be at most",
        "--model DIR --target TARGET",
    )
    add_target(plan)
    plan.add_argument("--tokens-in", type=int, default=1024, metavar="INT", help="prompt of a request (default 1024)")
    plan.add_argument("--tokens-out", type=int, default=256, metavar="INT", help="its output (default 256)")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(plan)


def _run(args: argparse.Namespace) -> int:
    without_device(args.target)
    from rich.console import Console

    from ferrum_jax.bundling import BundleOrder
    from ferrum_jax.forecast import forecast, refuse_length
    from ferrum_jax.progress import status
    from ferrum_jax.runtime.fit import refuse_overfull, temporaries_bytes, with_temporaries

    order = BundleOrder(model=args.model, target=args.target, config=engine_config(args))

    def ask(layout: Layout) -> int:
        refuse_length(args.tokens_in, args.tokens_out, layout.max_model_len)  # before minutes of compiling
        return temporaries_bytes(layout, None)

    with status(Console(stderr=True), f"compiling the largest steps for {args.target}"):
        layout = order.lay_out(ask)
        if layout.ledger.temporaries_bytes == 0:  # the config names the pool
            layout = with_temporaries(layout, ask(layout))
            refuse_overfull(layout)
    found = forecast(layout, layout.options.target, tokens_in=args.tokens_in, tokens_out=args.tokens_out)
    if args.json:
        print(json.dumps(_as_json(order, layout, found)))
    else:
        _print(order, layout, found)
    return 0


def _as_json(order: BundleOrder, layout: Layout, found: Forecast) -> dict[str, Any]:
    from ferrum_jax.runtime.fit import scalar_bytes

    return {
        "target": order.target,
        "mesh": order.config.mesh,
        "ledger": dataclasses.asdict(layout.ledger),
        "kv_tokens": layout.ledger.kv_tokens,
        "scalar_bytes": scalar_bytes(layout),
        "executables": len(layout.ladder.buckets),
        "forecast": dataclasses.asdict(found) | {"output_tokens_per_s": found.output_tokens_per_s},
    }


def _print(order: BundleOrder, layout: Layout, found: Forecast) -> None:
    from rich.console import Console
    from rich.table import Table

    from ferrum_jax.cache.budget import RESERVED_BYTES
    from ferrum_jax.runtime.block_copies import BlockCopies
    from ferrum_jax.runtime.compile import parts_of
    from ferrum_jax.runtime.fit import scalar_bytes

    ledger, console = layout.ledger, Console()
    console.print(f"Memory of one device of {order.target}, mesh {order.config.mesh}:", highlight=False)
    memory = Table()
    memory.add_column("what")
    unit, size = ("GiB", 2**30) if ledger.used_bytes >= 2**30 else ("MiB", 2**20)
    memory.add_column(unit, justify="right")
    memory.add_column("")
    rows = [
        ("weights", ledger.weights_bytes, layout.dtype.name),
        ("KV pool", ledger.kv_bytes, _pool_text(layout)),
        ("recurrent states", ledger.states_bytes, f"{ledger.num_states} states"),
        ("slots of rows", ledger.slots_bytes, "token ids and sampling parameters"),
        ("cached prompts", ledger.prompts_bytes, "last hidden states"),
        ("largest step", ledger.temporaries_bytes, "beside what is listed above"),
    ]
    target = layout.options.target
    if target.platform != "cpu":  # of the CPU's memory the pool takes what is free, by its own rule
        left = target.memory_bytes - ledger.used_bytes - RESERVED_BYTES
        rows.append(("reserve", RESERVED_BYTES, "runtime and programs"))
        rows.append(("left", left, f"of {target.memory_bytes / size:,.1f}"))
    for what, count, text in rows:
        if count:
            memory.add_row(what, f"{count / size:,.2f}", text)
    console.print(memory)
    scalars = scalar_bytes(layout)
    if scalars is not None:
        taken, there = scalars
        console.print(f"scalar memory of the largest step: {taken:,} of {there:,} bytes", highlight=False)
    decode = sum(bucket.decode_only for bucket in layout.ladder.buckets)
    mixed = len(layout.ladder.buckets) - decode
    beside = len(parts_of(layout)[1]) + len(BlockCopies(layout, None).parts())
    console.print(
        f"executables: steps of {decode} decode and {mixed} mixed buckets, and {beside} small ones", highlight=False
    )
    console.print()
    for line in (
        f"{found.tokens_in} tokens in, {found.tokens_out} out: {found.num_rows} requests at once",
        f"a decode step of them: at least {found.decode_step_s * 1e3:.2f} ms, bound by {found.decode_bound_by}",
        f"prefill: at most {found.prefill_tokens_per_s:,.0f} tokens/s",
        f"output of all together: at most {found.output_tokens_per_s:,.0f} tokens/s",
        "These are bounds from the data sheet, not measurements: collectives and launches are not in them.",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    _print_meshes(order, layout)


def _pool_text(layout: Layout) -> str:
    ledger = layout.ledger
    counts = "; ".join(
        f"{blocks.num_blocks:,} blocks" + (f" for windows of {group.window:,}" if group.window else "")
        for group, blocks in zip(layout.options.spec.kv_groups, ledger.groups, strict=True)
    )
    text = f"{counts} of {ledger.block_size}: {ledger.kv_tokens:,} tokens in {layout.kv_dtype}"
    return text if ledger.head_copies == 1 else f"{text}; each KV head on {ledger.head_copies} devices"


def _print_meshes(order: BundleOrder, layout: Layout) -> None:
    from rich.console import Console
    from rich.table import Table

    from ferrum_jax.meshes import meshes_of

    meshes = meshes_of(order, layout)
    if len(meshes) < 2:  # the one of a single device is the one above
        return
    console = Console()
    console.print(f"\nMeshes of {order.target}, each with the step that was compiled:", highlight=False)
    table = Table()
    table.add_column("mesh")
    table.add_column("weights, GiB", justify="right")
    table.add_column("KV tokens", justify="right")
    for mesh in meshes:
        weights = "" if mesh.weights_bytes is None else f"{mesh.weights_bytes / 2**30:.2f}"
        table.add_row(mesh.mesh, weights, mesh.problem or f"{mesh.kv_tokens:,}")
    console.print(table)
