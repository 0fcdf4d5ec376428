"""`ferrum-jax plan`: the memory of an engine and the bounds of its speed, for a device that need not be here."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_jax.commands.compile import add_target, order_of, without_device
from ferrum_jax.commands.flags import add_engine_flags
from ferrum_jax.commands.parsers import new_command

if TYPE_CHECKING:
    from ferrum_jax.embeddings.encoder_runtime import EncoderLayout
    from ferrum_jax.meshes.choices import Lengths, MeshFit
    from ferrum_jax.offline.bundle_order import BundleOrder
    from ferrum_jax.runtime.layout import Layout


def add(commands: Any) -> None:
    plan = new_command(
        commands,
        "plan",
        _run,
        "say what fits a device that need not be here, and how fast it can be at most",
        "--model DIR --target TARGET",
        examples=("--model checkpoints/demo --target cpu", "--model Qwen/Qwen3-8B --target v6e-8 --mesh tp=8"),
        common="tokens_in tokens_out compile kv_dtype json",
    )
    add_target(plan)
    plan.add_argument(
        "--tokens-in", type=int, metavar="INT", help="prompt of a request (default: 1024 where the model has room)"
    )
    plan.add_argument("--tokens-out", type=int, metavar="INT", help="its output (default: 256 where it has room)")
    plan.add_argument(
        "--compile",
        action="store_true",
        help="compile the largest steps of the mesh, which takes minutes, and count what they need",
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw memory and speed of each mesh (needs matplotlib)"
    )
    add_engine_flags(plan, planned=True)


def _run(args: argparse.Namespace) -> int:
    without_device(args.target)
    from ferrum_jax.meshes.choices import Lengths
    from ferrum_jax.paths import require_plot

    if args.plot is not None:
        require_plot(args.plot)
    order, lengths = order_of(args), Lengths(tokens_in=args.tokens_in, tokens_out=args.tokens_out)
    if order.is_encoder:
        return _plan_encoder(args, order, lengths)
    return _plan_engine(args, order, lengths)


def _plan_engine(args: argparse.Namespace, order: BundleOrder, lengths: Lengths) -> int:
    from ferrum_jax.commands.plan_tables import print_bounds, print_choices, print_memory, print_meshes
    from ferrum_jax.executables.topology import target_devices
    from ferrum_jax.meshes.choices import meshes_of
    from ferrum_jax.meshes.forecast import forecast, refuse_length
    from ferrum_jax.progress import plain_console

    most = order.config.max_model_len or order.spec.max_position_embeddings
    tokens_in, tokens_out = lengths.within(most)
    refuse_length(tokens_in, tokens_out, most)  # before minutes of compiling
    meshes, console = meshes_of(order.subject, target_devices(order.target), lengths), plain_console()
    if not args.json:
        print_meshes(console, order, meshes)  # a mesh that does not fit ends the command, and these may
    _draw(args, order, meshes)
    order = order.settled(meshes)
    layout = _laid_out(order, compiles=args.compile)
    found = forecast(layout, layout.options.target, tokens_in=tokens_in, tokens_out=tokens_out)
    if args.json:
        shown = {"forecast": dataclasses.asdict(found), "is_compiled": args.compile}
        print(json.dumps(_as_json(order, layout, meshes) | shown))
        return 0
    print_choices(console, order.why_mesh, layout.why_bounded)
    print_memory(console, order, layout, is_compiled=args.compile)
    print_bounds(console, found)
    return 0


def _plan_encoder(args: argparse.Namespace, order: BundleOrder, lengths: Lengths) -> int:
    """Raises ValueError for what an encoder has not."""
    from ferrum_jax.commands.plan_tables import print_choices, print_encoder, print_meshes
    from ferrum_jax.executables.topology import target_devices
    from ferrum_jax.meshes.choices import meshes_of
    from ferrum_jax.meshes.encoder_forecast import forecast_encoder, target_of
    from ferrum_jax.progress import plain_console

    if lengths.tokens_out is not None:
        raise ValueError(f"--tokens-out is {lengths.tokens_out}, and {order.model} generates nothing; leave it out")
    if args.compile:
        raise ValueError("--compile counts what an engine's largest steps need; an encoder keeps no pools beside them")
    meshes, console = meshes_of(order.subject, target_devices(order.target), lengths), plain_console()
    order = order.settled(meshes)
    layout: EncoderLayout = order.lay_out_encoder()
    found = forecast_encoder(layout, target_of(layout), tokens_in=lengths.tokens_in or layout.max_model_len)
    _draw(args, order, meshes)
    if args.json:
        speed = dataclasses.asdict(found) | {"texts_per_s": found.texts_per_s}
        shown = {"target": order.target, "mesh": order.config.mesh, "weights_bytes": layout.model.weights_bytes}
        print(json.dumps(shown | {"executables": len(layout.buckets), "forecast": speed, "meshes": _meshes(meshes)}))
        return 0
    print_meshes(console, order, meshes)
    print_choices(console, order.why_mesh)
    print_encoder(console, order, layout, found)
    return 0


def _draw(args: argparse.Namespace, order: BundleOrder, meshes: list[MeshFit]) -> None:
    """The picture of the meshes, where one is asked for. Raises ValueError where there is no mesh to choose."""
    if args.plot is None:
        return
    from ferrum_jax.meshes.mesh_plot import draw_meshes

    if not meshes:
        raise ValueError(f"--plot draws the meshes of a target, and {order.target} has no choice of them; leave it out")
    draw_meshes(args.plot, meshes, f"{Path(order.model).name} on {order.target}")


def _laid_out(order: BundleOrder, *, compiles: bool) -> Layout:
    """With what the largest steps need beside weights and pools: by shapes, or by the compiler."""
    from ferrum_jax.progress import plain_console, status
    from ferrum_jax.runtime.fit import expected_temporaries, refuse_overfull, temporaries_bytes, with_temporaries

    def ask(layout: Layout) -> int:
        return temporaries_bytes(layout, None) if compiles else expected_temporaries(layout)

    what = f"compiling the largest steps for {order.target}" if compiles else f"counting for {order.target}"
    with status(plain_console(stderr=True), what):
        layout = order.lay_out(ask)
        if layout.ledger.temporaries_bytes == 0:  # the config names the pool
            layout = with_temporaries(layout, ask(layout))
            refuse_overfull(layout)
    return layout


def _as_json(order: BundleOrder, layout: Layout, meshes: list[MeshFit]) -> dict[str, Any]:
    from ferrum_jax.runtime.fit import scalar_bytes

    return {
        "target": order.target,
        "mesh": order.config.mesh,
        "ledger": dataclasses.asdict(layout.ledger),
        "kv_tokens": layout.ledger.kv_tokens,
        "scalar_bytes": scalar_bytes(layout),
        "executables": len(layout.ladder.buckets),
        "meshes": _meshes(meshes),
    }


def _meshes(meshes: list[MeshFit]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(mesh) for mesh in meshes]
