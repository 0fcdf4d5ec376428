"""`ferrum-jax plan`: the memory of an engine and the bounds of its speed, for a device that need not be here."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_jax.cli.compile import add_target, order_of, without_device
from ferrum_jax.cli.flags import add_engine_flags
from ferrum_jax.cli.parsers import add_flags, new_command

if TYPE_CHECKING:
    from ferrum_jax.planning.meshes.choices import MeshFit
    from ferrum_jax.planning.meshes.encoder_forecast import AnyForecast
    from ferrum_jax.planning.meshes.forecast import Lengths
    from ferrum_jax.planning.meshes.on_paper import OnPaper
    from ferrum_jax.planning.offline.bundle_order import BundleOrder
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
    flags = {
        "--tokens-in INT": "prompt of a request (default: 1024 where the model has room)",
        "--tokens-out INT": "its output (default: 256 where it has room)",
        "--compile": "compile the largest steps of the mesh, which takes minutes, and count what they need",
        "--json": "print one JSON object",
    }
    add_flags(plan, flags)
    plan.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw memory and speed of each mesh (needs matplotlib)"
    )
    add_engine_flags(plan, planned=True)


def _run(args: argparse.Namespace) -> int:
    without_device(args.target)
    from ferrum_jax.cli.plan_tables import print_choices, print_meshes, print_model
    from ferrum_jax.core.progress import plain_console
    from ferrum_jax.io.paths import require_plot
    from ferrum_jax.planning.meshes.choices import meshes_of
    from ferrum_jax.planning.meshes.forecast import Lengths
    from ferrum_jax.runtime.compile.topology import target_devices

    if args.plot is not None:
        require_plot(args.plot)
    order, lengths = order_of(args), Lengths(tokens_in=args.tokens_in, tokens_out=args.tokens_out)
    _refuse(args, order, lengths)
    meshes, console = meshes_of(order.subject, target_devices(order.target), lengths), plain_console()
    if not args.json:
        print_meshes(console, order, meshes)  # a mesh that does not fit ends the command, and these may
    _draw(args, order, meshes)
    order = order.settled(meshes)
    model = _laid_out(order, compiles=args.compile)
    found = model.forecast(lengths)
    if args.json:
        print(json.dumps(_as_json(order, model, meshes, found, is_compiled=args.compile)))
        return 0
    print_choices(console, order.why_mesh, model.layout.why_bounded)
    print_model(console, order, model, found, is_compiled=args.compile)
    return 0


def _refuse(args: argparse.Namespace, order: BundleOrder, lengths: Lengths) -> None:
    """Raises ValueError for what the model has no room for or has not, before minutes of compiling."""
    from ferrum_jax.models.spec import ModelSpec
    from ferrum_jax.planning.meshes.forecast import refuse_length

    spec = order.subject.spec
    if isinstance(spec, ModelSpec):
        most = order.config.max_model_len or spec.max_position_embeddings
        refuse_length(*lengths.within(most), most)
    elif lengths.tokens_out is not None:
        raise ValueError(f"--tokens-out is {lengths.tokens_out}, and {order.model} generates nothing; leave it out")
    elif args.compile:
        raise ValueError("--compile counts what an engine's largest steps need; an encoder keeps no pools beside them")


def _draw(args: argparse.Namespace, order: BundleOrder, meshes: list[MeshFit]) -> None:
    """The picture of the meshes, where one is asked for. Raises ValueError where there is no mesh to choose."""
    if args.plot is None:
        return
    from ferrum_jax.planning.meshes.choices import draw_meshes

    if not meshes:
        raise ValueError(f"--plot draws the meshes of a target, and {order.target} has no choice of them; leave it out")
    draw_meshes(args.plot, meshes, f"{Path(order.model).name} on {order.target}")


def _laid_out(order: BundleOrder, *, compiles: bool) -> OnPaper:
    """With what the largest steps need beside weights and pools: by shapes, or by the compiler."""
    from ferrum_jax.core.progress import plain_console, status
    from ferrum_jax.planning.meshes.on_paper import Generating
    from ferrum_jax.runtime.placing.fit import (
        expected_temporaries,
        refuse_overfull,
        temporaries_bytes,
        with_temporaries,
    )

    def ask(layout: Layout) -> int:
        return temporaries_bytes(layout, None) if compiles else expected_temporaries(layout)

    what = f"compiling the largest steps for {order.target}" if compiles else f"counting for {order.target}"
    with status(plain_console(stderr=True), what):
        model = order.laid_out(ask)
        if isinstance(model, Generating) and model.layout.ledger.temporaries_bytes == 0:  # the config names the pool
            model = Generating(layout=with_temporaries(model.layout, ask(model.layout)))
            refuse_overfull(model.layout)
    return model


def _as_json(
    order: BundleOrder,
    model: OnPaper,
    meshes: list[MeshFit],
    found: AnyForecast,
    *,
    is_compiled: bool,
) -> dict[str, Any]:
    from ferrum_jax.runtime.layout import Layout
    from ferrum_jax.runtime.placing.fit import scalar_bytes

    layout, speed = model.layout, dataclasses.asdict(found)
    named = {"target": order.target, "mesh": order.config.mesh}
    every_mesh = [dataclasses.asdict(mesh) for mesh in meshes]
    if not isinstance(layout, Layout):
        shown = {"weights_bytes": layout.ledger.weights_bytes, "executables": len(layout.buckets)}
        return named | shown | {"forecast": speed | {"texts_per_s": found.rate}, "meshes": every_mesh}
    return named | {
        "ledger": dataclasses.asdict(layout.ledger),
        "kv_tokens": layout.ledger.kv_tokens,
        "scalar_bytes": scalar_bytes(layout),
        "executables": len(layout.ladder.buckets),
        "meshes": every_mesh,
        "forecast": speed,
        "is_compiled": is_compiled,
    }
