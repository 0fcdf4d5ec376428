"""The flags that name a model, and the LLM that they ask for."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from ferrum_jax.config import EngineConfig
from ferrum_jax.flags import add_engine_flags, engine_config

if TYPE_CHECKING:
    from ferrum_jax.llm import LLM, Measure


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face folder or Orbax checkpoint")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder whose tokenizer to use instead of the model's own")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a profiler trace of the run")
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="executables that `ferrum-jax compile` made")
    parser.add_argument("--require-bundle", action="store_true", help="refuse to compile what the bundle does not give")
    parser.set_defaults(load_prefix_cache=None)
    add_hosts(parser)
    add_engine_flags(parser)


def add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several hosts, each with this same command")
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="of process 0, which alone reads and writes; auto in a TPU slice, where jax finds the processes by itself",
    )
    group.add_argument("--num-processes", type=int, metavar="INT", help="how many there are")
    group.add_argument("--process-id", type=int, metavar="INT", help="which of them this is, from 0")


def add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load-prefix-cache", type=Path, metavar="DIR", help="begin with the prefixes that `cache save` wrote there"
    )


def chosen_config(args: argparse.Namespace) -> EngineConfig:
    """The config of the flags; a bundle's own where it is given and they say nothing."""
    if args.bundle is None:
        return engine_config(args)
    from ferrum_jax.runtime.bundle import Bundle

    return engine_config(args, Bundle.open(args.bundle).purpose.config)


def open_llm(
    args: argparse.Namespace, config: EngineConfig, stack: contextlib.ExitStack, reach: Measure | None = None
) -> LLM:
    """The model, ready; a trace of what follows is written if --profile asks for one. reach: as of `LLM`."""
    from rich.console import Console
    from rich.markup import escape

    from ferrum_jax.llm import LLM
    from ferrum_jax.progress import status

    _check_folders(args)
    console = Console(stderr=True)
    name = escape(str(args.model))
    with status(console, f"loading {args.model}") as update:
        llm = LLM(
            args.model,
            config,
            tokenizer=args.tokenizer,
            bundle=args.bundle,
            require_bundle=args.require_bundle,
            reach=reach,
            on_progress=lambda what, done, total: update(f"{what} {done}/{total}"),
            on_problem=lambda text: console.print(escape(text), highlight=False),
        )
    console.print(f"{name} ready in {llm.startup_s:.1f} s", highlight=False)
    if llm.bundled is not None:
        found = ", ".join(sorted(llm.bundled.found)) or "none"
        console.print(f"bundle: {llm.bundled.hits} executables ({found}); {llm.bundled.misses} others", highlight=False)
    ledger = llm.ledger
    if ledger.head_copies > 1:
        console.print(
            f"{config.mesh} is more devices than KV heads: each head is on {ledger.head_copies} of them, and "
            f"{ledger.repeated_bytes:,} of {ledger.kv_bytes:,} KV bytes of a device are repeated",
            highlight=False,
        )
    if llm.host_memory_kind is not None:
        console.print(
            f"host tier: {ledger.num_shards * ledger.num_host_blocks} blocks of {ledger.host_block_bytes:,} bytes in "
            f"{llm.host_memory_kind} memory",
            highlight=False,
        )
    if args.load_prefix_cache is not None:
        count = llm.load_prefix_cache(args.load_prefix_cache)
        console.print(f"{count} blocks of cached prefixes loaded", highlight=False)
    if args.profile is not None:
        import jax

        stack.enter_context(jax.profiler.trace(str(args.profile)))
    return llm


def _check_folders(args: argparse.Namespace) -> None:
    """Of what is read or written once the model is ready."""
    if args.profile is not None:
        args.profile.mkdir(parents=True, exist_ok=True)
    if args.load_prefix_cache is not None and not args.load_prefix_cache.is_dir():
        raise ValueError(f"{args.load_prefix_cache} is no folder; name one that `ferrum-jax cache save` wrote")
