"""`ferrum-jax cache`: keeps prefixes between runs, and replays traces of them."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from ferrum_jax.commands.model import add_model, chosen_config, open_llm
from ferrum_jax.commands.parsers import new_command
from ferrum_jax.commands.prompts import add_prompts, reach_of, read_prompts
from ferrum_jax.paths import require_folder_of, require_free
from ferrum_jax.request import SamplingParams


def add(commands: Any) -> None:
    parser = commands.add_parser("cache", help="keep prefixes between runs; study the cache", allow_abbrev=False)
    commands = parser.add_subparsers(dest="cache_command", required=True, metavar="COMMAND")
    save = new_command(
        commands,
        "cache save",
        _save,
        "compute prompts and write their KV to a folder, for --load-prefix-cache of generate and batch",
        "DIR --model DIR --prompt TEXT ...",
    )
    save.add_argument("dir", type=Path, metavar="DIR", help="folder to write, new or empty")
    save.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="text to keep; may be repeated")
    add_prompts(save)
    add_model(save)
    load = new_command(
        commands,
        "cache load",
        _load,
        "check that a folder of prefixes is undamaged and fits a model",
        "DIR --model DIR",
    )
    load.add_argument("dir", type=Path, metavar="DIR", help="folder that `cache save` wrote")
    add_model(load)
    simulate = new_command(
        commands,
        "cache simulate",
        _simulate,
        "replay a trace at other pool sizes, without the model, and print what the cache would have done",
        "--trace FILE",
    )
    simulate.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="written by generate or batch with --trace"
    )
    simulate.add_argument(
        "--blocks",
        type=_block_counts,
        metavar="N,...",
        help="pool sizes in blocks (default: from a quarter to four times the traced one)",
    )
    simulate.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw hit rate over pool size (needs matplotlib)"
    )


def _save(args: argparse.Namespace) -> int:
    prompts = read_prompts(args)
    require_free(args.dir)
    with contextlib.ExitStack() as stack:
        llm = open_llm(args, chosen_config(args), stack, reach_of(prompts, SamplingParams(max_tokens=1)))
        for prompt in prompts:
            llm.cache_prefix(prompt)
        count = llm.save_prefix_cache(args.dir, prompts)
    print(f"{args.dir}: {count} blocks of {llm.ledger.block_size} tokens")
    return 0


def _load(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        llm = open_llm(args, chosen_config(args), stack, reach_of([], SamplingParams()))  # it runs no step
        count = llm.load_prefix_cache(args.dir)
    print(f"{args.dir}: {count} blocks of {llm.ledger.block_size} tokens, undamaged and of this model")
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ferrum_jax.what_if import simulate

    if args.plot is not None:
        require_folder_of(args.plot, "plot")
    simulate(args.trace, args.blocks, args.plot, Console())
    return 0


def _block_counts(text: str) -> list[int]:
    sizes = [int(size) if size.isdecimal() else 0 for size in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of pool sizes, as in 1024,2048,4096")
    return sizes
