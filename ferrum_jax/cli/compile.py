"""`ferrum-jax compile`: makes the executables of an engine, on any machine, without reading weights."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ferrum_jax.cli.flags import add_engine_flags, engine_config
from ferrum_jax.cli.model import add_source
from ferrum_jax.cli.parsers import new_command, number

if TYPE_CHECKING:
    from ferrum_jax.planning.offline.bundle_order import BundleOrder

_WITHOUT_DEVICE = {  # plugins read it when they are loaded; without it they look for their device, libtpu for minutes
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def add(commands: Any) -> None:
    compile = new_command(
        commands,
        "compile",
        _run,
        "make the executables of an engine, for a device that need not be here",
        "--model DIR --target TARGET --out BUNDLE",
        examples=(
            "--model checkpoints/demo --target cpu --max-num-seqs 16 --out demo_bundle",
            "--model Qwen/Qwen3-8B --target v6e-8 --mesh tp=8 --out bundle",
        ),
        common="processes kv_dtype",
    )
    add_target(compile)
    compile.add_argument(
        "--out", required=True, metavar="BUNDLE", help="folder to write; one that was begun is continued"
    )
    compile.add_argument(
        "--processes",
        type=number("a number of processes, 1 or more", int, 1),
        default=os.cpu_count() or 1,
        metavar="INT",
        help="how many compile at once, some gigabytes each for large models (default: one a core)",
    )
    add_engine_flags(compile)


def add_target(parser: argparse.ArgumentParser) -> None:
    """The model and what it would run on."""
    add_source(parser, "a folder with a config.json, or a model of the hub as ORG/NAME; weights are not read")
    parser.add_argument(
        "--target", required=True, metavar="TARGET", help="device: cpu, v6e-8, v6e:8x8, h200, h100:8 and the like"
    )


def order_of(args: argparse.Namespace) -> BundleOrder:
    """The order that the flags give; the description of a hub's model is fetched first."""
    from checkpoints.hub import model_folder
    from ferrum_jax.planning.offline.bundle_order import BundleOrder

    folder = model_folder(args.model, args.revision, weights=False)
    return BundleOrder(model=folder, target=args.target, config=engine_config(args))


def without_device(target: str) -> None:
    """Tells the plugins of a target, which are yet to be loaded, that its devices are not here."""
    if target != "cpu":
        os.environ |= _WITHOUT_DEVICE


def time_left(seconds: float | None) -> str:
    """How long it still takes, in words; nothing where that is not known, or at the end."""
    if not seconds:
        return ""
    return f"about {seconds / 60:.0f} minutes left" if seconds >= 90 else f"about {seconds:.0f} s left"


def _run(args: argparse.Namespace) -> int:
    without_device(args.target)
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ferrum_jax.core.progress import plain_console, plain_lines
    from ferrum_jax.planning.offline.make_bundle import Progress as Done
    from ferrum_jax.planning.offline.make_bundle import make_bundle

    order = order_of(args)
    console = plain_console(stderr=True)
    columns = TextColumn("compiling"), BarColumn(), TextColumn("{task.fields[parts]}"), TimeElapsedColumn()
    bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=console, disable=not console.is_terminal)
    parts = left = mesh = ""

    def say() -> str:
        return f"compiling for {args.target}{parts and f': {parts} executables'}{left and f', {left}'}"

    with bar, plain_lines(console, say):
        task = bar.add_task("compiling", total=None, parts=parts, left=left)

        def show(found: Done) -> None:
            nonlocal parts, left
            parts, left = f"{found.done}/{found.total}", time_left(found.left_s)
            bar.update(task, total=1.0, completed=found.share, parts=parts, left=left)

        def say_mesh(settled: BundleOrder) -> None:
            nonlocal mesh
            mesh = str(settled.config.mesh)
            if settled.why_mesh:
                console.print(settled.why_mesh, highlight=False, soft_wrap=True)

        summary = make_bundle(order, args.out, num_processes=args.processes, on_done=show, on_mesh=say_mesh)
    print(
        f"{args.out}: {summary.num_compiled + summary.num_kept} executables for {args.target} ({mesh}), "
        f"{summary.num_bytes / 1e6:,.1f} MB; {summary.num_kept} were there already"
    )
    return 0
