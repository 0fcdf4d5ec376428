"""`ferrum-jax cache`: keeps prefixes between runs, and replays request logs."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from ferrum_jax.cli.model import add_model, chosen_config, exact_config, open_llm
from ferrum_jax.cli.parsers import new_command
from ferrum_jax.cli.prompt_flags import add_prompts, reach_of, read_prompts
from ferrum_jax.config import EngineConfig
from ferrum_jax.io.paths import require_folder_of, require_free
from ferrum_jax.sampling_params import SamplingParams


def add(commands: Any) -> None:
    parser = commands.add_parser("cache", help="keep prefixes between runs; study the cache", allow_abbrev=False)
    commands = parser.add_subparsers(dest="cache_command", required=True, metavar="COMMAND")
    save = new_command(
        commands,
        "cache save",
        _save,
        "compute prompts and write their KV to a folder, for --load-prefix-cache of generate and batch",
        "DIR --model DIR --prompt TEXT ...",
        examples=(
            "prefixes --model checkpoints/demo --prompt 'def add(a, b):'",
            "prefixes --model checkpoints/demo --prompt-file system_prompt.txt",
        ),
        common="prompt prompt_file chat system",
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
        examples=("prefixes --model checkpoints/demo", "prefixes --model checkpoints/demo --mesh tp=2"),
        common="",
    )
    load.add_argument("dir", type=Path, metavar="DIR", help="folder that `cache save` wrote")
    load.set_defaults(reads=("dir",))
    add_model(load)
    _add_simulate(commands)
    _add_clear(commands)


def _add_simulate(commands: Any) -> None:
    simulate = new_command(
        commands,
        "cache simulate",
        _simulate,
        "replay a request log at other pool sizes, without the model, and print what the cache would have done",
        "--request-log FILE",
        examples=(
            "--request-log requests.jsonl",
            "--request-log requests.jsonl --blocks 64,128,256 --plot hits.png",
        ),
    )
    simulate.add_argument(
        "--request-log",
        type=Path,
        required=True,
        metavar="FILE",
        help="written by generate or batch with --request-log",
    )
    simulate.add_argument(
        "--blocks",
        type=_block_counts,
        metavar="N,...",
        help="pool sizes in blocks (default: from a quarter to four times the recorded one)",
    )
    simulate.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw hit rate over pool size (needs matplotlib)"
    )
    simulate.set_defaults(reads=("request_log",))


def _add_clear(commands: Any) -> None:
    clear = new_command(
        commands,
        "cache clear",
        _clear,
        "delete the compiled programs that are kept on this machine, and nothing else",
        "[--compilation-cache-dir DIR]",
        examples=("", "--compilation-cache-dir gs://BUCKET/executables"),
    )
    clear.add_argument(
        "--compilation-cache-dir",
        metavar="DIR",
        help="folder to clear, or URL whose fetched programs to delete "
        "(default: the usual folder and everything fetched)",
    )


def _save(args: argparse.Namespace) -> int:
    prompts = read_prompts(args)
    require_free(args.dir)
    with contextlib.ExitStack() as stack:
        config = exact_config(args)
        llm = open_llm(args, config, stack, reach_of(prompts, SamplingParams(max_tokens=1)))
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
    from ferrum_jax.core.progress import plain_console
    from ferrum_jax.planning.offline.simulate_cache import simulate

    if args.plot is not None:
        require_folder_of(args.plot, "plot")
    simulate(args.request_log, args.blocks, args.plot, plain_console())
    return 0


def _clear(args: argparse.Namespace) -> int:
    from ferrum_jax.runtime.compile.executable_store import clear

    named: str | None = args.compilation_cache_dir
    if named == "":  # elsewhere it means that nothing is kept, and a shell's unset variable gives it too
        raise ValueError("--compilation-cache-dir is ''; name a folder, or leave it out to clear the usual one")
    place = named or EngineConfig.compilation_cache_dir
    assert place is not None, "there is a usual folder"
    cleared = clear(place, all_fetched=named is None)
    where = ", ".join(cleared.folders) or place
    print(f"{where}: {cleared.num_files:,} files of compiled programs deleted, {cleared.num_bytes:,} bytes")
    return 0


def _block_counts(text: str) -> list[int]:
    sizes = [int(size) if size.isdecimal() else 0 for size in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of pool sizes, as in 1024,2048,4096")
    return sizes
