"""`ferrum-jax batch`: answers a file of requests. Exit codes: see `ferrum_jax.batch.job.run_batch`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_jax.batch.notice import ENDPOINTS, Notice, exit_in_time, notice_of_cloud
from ferrum_jax.commands.batch_plan import show_plan
from ferrum_jax.commands.model import add_load, add_model, chosen_config, open_llm
from ferrum_jax.commands.parsers import new_command
from ferrum_jax.config import EngineConfig
from ferrum_jax.paths import require_free

if TYPE_CHECKING:
    from ferrum_jax.batch.rows import Rows
    from ferrum_jax.llm import LLM


def add(commands: Any) -> None:
    batch = new_command(
        commands,
        "batch",
        _run,
        "answer a JSONL file of requests; started again, it continues where it stopped",
        "--model DIR --input FILE --output FILE",
    )
    batch.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help="file or its URL, one request a line, in the OpenAI batch form or the short form; "
        ".jsonl, .csv, .parquet, also .gz and .zst",
    )
    batch.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="file or its URL, of the same kinds, written when all rows are answered, in the order of the input; "
        "FILE.journal holds what is done until then",
    )
    batch.add_argument(
        "--max-errors", type=_count, metavar="N", help="stop, with exit code 3, once more than N rows have failed"
    )
    batch.add_argument(
        "--plan",
        action="store_true",
        help="print rows, tokens, shared prefixes, executables, memory and expected time; run and write nothing",
    )
    batch.add_argument(
        "--report",
        metavar="FILE.html",
        help="write a page with plots over time, to a path or URL; OUTPUT.report.json is written anyway",
    )
    _add_leaving(batch)
    add_model(batch)
    add_load(batch)


def _add_leaving(batch: argparse.ArgumentParser) -> None:
    """What is done when a worker goes or has gone."""
    batch.add_argument(
        "--lease-expiry",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="how long a worker of the same job may be silent before others take its rows (default: 60)",
    )
    batch.add_argument(
        "--preemption-notice",
        choices=sorted(ENDPOINTS),
        metavar="CLOUD",
        help="ask this cloud's metadata server whether the machine is about to go: "
        "gce or aws; SIGTERM and SIGINT are heeded in any case",
    )
    batch.add_argument(
        "--save-prefixes-at-notice",
        type=Path,
        metavar="DIR",
        help="write cached prefixes to this new folder before ending for a notice, for --load-prefix-cache",
    )


def _run(args: argparse.Namespace) -> int:
    config = chosen_config(args)
    if args.plan:
        return show_plan(args, _batch_config(args, config))
    if args.save_prefixes_at_notice is not None:
        require_free(args.save_prefixes_at_notice)
    notice = Notice()
    with contextlib.ExitStack() as stack:
        stack.enter_context(exit_in_time(notice))
        stack.enter_context(notice_of_cloud(notice, args.preemption_notice))
        return _run_job(args, config, notice, stack)


def _run_job(args: argparse.Namespace, config: EngineConfig, notice: Notice, stack: contextlib.ExitStack) -> int:
    """stack: what must end after the job."""
    from rich.console import Console

    from ferrum_jax.batch.job import JobOptions, run_batch
    from ferrum_jax.batch.reach import reach_of

    def make_llm(rows: Rows) -> LLM:
        return open_llm(args, _batch_config(args, config), stack, functools.partial(reach_of, rows))

    return run_batch(
        make_llm,
        args.input,
        args.output,
        model=os.path.basename(os.path.abspath(args.model)),
        seed=config.seed,
        settings={
            "dtype": config.dtype,
            "kv_dtype": config.kv_dtype,
            "max_model_len": config.max_model_len,
            "tokenizer": args.tokenizer,
        },
        options=JobOptions(max_errors=args.max_errors, expiry_s=args.lease_expiry),
        console=Console(stderr=True),
        notice=notice,
        at_notice=functools.partial(_save_prefixes, args.save_prefixes_at_notice),
        page_path=args.report,
    )


def _save_prefixes(folder: Path | None, llm: Any) -> None:
    if folder is not None and llm.stats()["entries"]:
        llm.save_prefix_cache(folder)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, 1 or more")
    return seconds


def _batch_config(args: argparse.Namespace, config: EngineConfig) -> EngineConfig:
    """A job's config: where flags and bundle say nothing else, the CPU gives every row the same bits in any company."""
    import jax

    if "invariant" in args or args.bundle is not None or jax.default_backend() != "cpu" or config.dtype == "bfloat16":
        return config
    return dataclasses.replace(config, invariant=True)
