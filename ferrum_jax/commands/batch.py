"""`ferrum-jax batch`: answers a JSONL file of requests."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_jax.commands.model import add_load, add_model, open_llm
from ferrum_jax.commands.parsers import new_command
from ferrum_jax.config import EngineConfig
from ferrum_jax.flags import engine_config

if TYPE_CHECKING:
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
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL file, one request a line, in the OpenAI batch form or the short form",
    )
    batch.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL file, one answer a line; appended to if it exists",
    )
    add_model(batch)
    add_load(batch)


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ferrum_jax.batch.job import run_batch

    config = engine_config(args)
    settings = {
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "max_model_len": config.max_model_len,
        "tokenizer": args.tokenizer,
    }
    with contextlib.ExitStack() as stack:

        def make_llm() -> LLM:
            return open_llm(args, _batch_config(config, given="invariant" in args), stack)

        model = os.path.basename(os.path.abspath(args.model))
        console = Console(stderr=True)
        return run_batch(
            make_llm, args.input, args.output, model=model, seed=config.seed, settings=settings, console=console
        )


def _batch_config(config: EngineConfig, *, given: bool) -> EngineConfig:
    """A job's config: where nothing else was said, the CPU gives every row the same bits in any company."""
    import jax

    if given or jax.default_backend() != "cpu" or config.dtype == "bfloat16":
        return config
    return dataclasses.replace(config, invariant=True)
