"""`ferrum-jax batch`: answers a file of requests. Exit codes: see `ferrum_jax.batch.job.run_batch`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_jax.batch.deadline.end_terms import EndTerms, deadline_of, money_of, span_of
from ferrum_jax.batch.input.sound_folder import rows_of_folder
from ferrum_jax.batch.notice import ENDPOINTS, Notice, exit_in_time, notice_of_cloud
from ferrum_jax.cli.batch_plan import show_plan
from ferrum_jax.cli.flags import add_sampling_flags, row_defaults
from ferrum_jax.cli.job_llm import job_llm, loading_of
from ferrum_jax.cli.machine_throughput import MachineThroughput
from ferrum_jax.cli.model import (
    adapters_of,
    add_adapters,
    add_load,
    add_model,
    chosen_config,
    job_config,
    named_adapters,
)
from ferrum_jax.cli.model_names import model_names
from ferrum_jax.cli.parsers import PrintAndExit, add_flags, new_command, number_of
from ferrum_jax.config import EngineConfig
from ferrum_jax.io.files.store import open_local, open_store, split
from ferrum_jax.io.paths import require_free
from ferrum_jax.openai.schemas import row_schema

if TYPE_CHECKING:
    from ferrum_jax.batch.job import JobStart
    from ferrum_jax.llm import LLM


def add(commands: Any) -> None:
    batch = new_command(
        commands,
        "batch",
        _run,
        "answer a JSONL file of requests; started again, it continues where it stopped",
        "--model DIR --input FILE --output FILE",
        examples=(
            "--model checkpoints/demo --input scripts/demo_prompts.jsonl --output out.jsonl --plan",
            "--model checkpoints/demo --input scripts/demo_prompts.jsonl --output out.jsonl --report report.html",
        ),
        common="input max_errors new_run plan report schema max_tokens",
    )
    _add_files(batch)
    names = {
        "--served-model-name NAME": "another name by which rows may ask for this model; may be repeated, and answers "
        "carry the first. Its path, its base name and its hub id are names too; a row that asks for another model "
        "becomes an error line",
    }
    add_flags(batch, names, action="append", default=[])
    add_adapters(batch, "a row names it as its model, or with the field adapter")
    batch.add_argument(
        "--max-errors",
        type=number_of(0, "a whole number, 0 or more"),
        metavar="N",
        help="stop, with exit code 3, once more than N rows have failed",
    )
    switches = {
        "--require-valid": "a row with structured output that max_tokens or a stop cuts off becomes an error line",
        "--new-run": "begin anew; an earlier output and journal are moved to old-1.NAME and so on, never deleted. "
        "Leave it out of the starts that are to continue the job",
        "--strict-bits": "refuse to continue with another mesh, jaxlib or instruction set, because bits may differ",
        "--plan": "print rows, tokens, shared prefixes, executables, memory, expected time and cost; run and write "
        "nothing",
    }
    add_flags(batch, switches)
    _add_earlier(batch)
    _add_shown(batch)
    _add_leaving(batch)
    add_end(batch)
    add_model(batch)
    add_load(batch)
    add_sampling_flags(batch, title="sampling, for rows that do not give the field", note="")


def _add_shown(batch: argparse.ArgumentParser) -> None:
    batch.add_argument(
        "--schema",
        action=PrintAndExit,
        const=lambda: json.dumps(row_schema(), indent=1, ensure_ascii=False),
        help="print the JSON schema (2020-12) of a row of the input, and end",
    )
    page = "write a page with plots over time, to a path or URL; OUTPUT.report.json is written anyway"
    add_flags(batch, {"--report FILE.html": page})


def _add_files(batch: argparse.ArgumentParser) -> None:
    source = (
        "file or its URL, one request a line, in the OpenAI batch form or the short form; .jsonl, .csv, .parquet, also "
        ".gz and .zst; or a folder of sounds, one request for each. With --fork the earlier job's (default: as its "
        "report says)"
    )
    output = (
        "file or its URL, of the same kinds, written when all rows are answered, in the order of the input; "
        "FILE.journal holds what is done until then"
    )
    batch.add_argument("--input", metavar="FILE", help=source)
    batch.add_argument("--output", required=True, metavar="FILE", help=output)


def _add_earlier(batch: argparse.ArgumentParser) -> None:
    """Flags for jobs that go on from others."""
    flags = {
        "--fork OUTPUT": "go on from the chats of an earlier output, each with its answer and a turn of the user; "
        "these rows are kept beside the new output, as OUTPUT.fork-DIGEST.jsonl",
        "--append TEXT": "with --fork: the turn of every row",
        "--append-file FILE": "with --fork: file or its URL with a turn a line",
        "--reuse-text": "with --reuse: also answers from another machine or mode, whose bits may differ",
    }
    add_flags(batch, flags)
    batch.add_argument(
        "--reuse",
        type=lambda text: text.split(","),
        default=[],
        metavar="OUTPUT[,OUTPUT]",
        help="earlier outputs, from which a row that asks the same of the same model takes its answer",
    )


def _add_leaving(batch: argparse.ArgumentParser) -> None:
    """Flags for what happens when a worker stops or has died."""
    batch.add_argument(
        "--lease-expiry",
        type=number_of(1.0, "a number of seconds, 1 or more"),
        default=60.0,
        metavar="S",
        help="how long a worker of the same job may be silent before others take its rows (default: 60)",
    )
    early = {
        "--leave-early": "end, with the code of a job that is done, once other workers run all rows that are left: "
        "this machine may stop then, and one of them writes the output",
    }
    add_flags(batch, early)
    batch.add_argument(
        "--preemption-notice",
        choices=sorted(ENDPOINTS),
        metavar="CLOUD",
        help="ask this cloud's metadata server whether the machine is about to be taken away: "
        "gce or aws; SIGTERM and SIGINT end the job in order in any case",
    )
    batch.add_argument(
        "--save-prefixes-at-notice",
        type=Path,
        metavar="DIR",
        help="after a notice, write the cached prefixes to this new folder, for --load-prefix-cache",
    )


def _run(args: argparse.Namespace) -> int:
    if (args.append is not None) + (args.append_file is not None) != (args.fork is not None):
        raise ValueError("--fork needs one turn of the user, by either --append or --append-file, which need --fork")
    if args.fork is not None:
        return _run_fork(args)
    if args.input is None:
        raise ValueError("there is nothing to answer; name rows with --input, or an earlier output with --fork")
    if not os.path.isdir(args.input):
        return _run_rows(args)
    if getattr(args, "image_root", None) is not None:
        raise ValueError("--input is a folder of sounds, below which they are read; leave --image-root out")
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as rows:
        rows.write(rows_of_folder(args.input))
        rows.flush()
        args.sounds = args.image_root = os.path.abspath(args.input)
        args.input = rows.name
        return _run_rows(args)


def _run_fork(args: argparse.Namespace) -> int:
    """The rows are kept beside the output, where `verify` reads them; a plan keeps nothing."""
    from ferrum_jax.batch.earlier.fork import forked_lines

    turns, adapters = [args.append], list(named_adapters(args))
    if args.append_file is not None:
        with open_local(args.append_file) as file:
            try:
                turns = [line.decode().rstrip("\r\n") for line in file]
            except UnicodeDecodeError as error:
                raise ValueError(f"{args.append_file} is not UTF-8; write the file as UTF-8") from error
    state = hashlib.blake2b(digest_size=8)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as rows:
        for line in forked_lines(args.fork, args.input, turns, adapters[0] if len(adapters) == 1 else None):
            state.update(line)
            rows.write(line)
        rows.flush()
        args.input = rows.name
        if not args.plan:
            args.input = f"{args.output}.fork-{state.hexdigest()}.jsonl"
            folder, name = split(args.input)
            rows.seek(0)
            with open_store(folder).writing(name) as kept:
                shutil.copyfileobj(rows, kept)
        return _run_rows(args)


def _run_rows(args: argparse.Namespace) -> int:
    config = chosen_config(args)
    row_defaults(args)  # before anything is read
    terms = end_terms(args)
    adapters_of(args, config)
    if args.reuse_text and (not args.reuse or args.strict_bits):
        raise ValueError("--reuse-text is for --reuse, and takes what --strict-bits refuses; leave one of them out")
    if args.plan and args.coordinator is not None:  # process 0 alone would look at devices, and wait for the others
        raise ValueError("--plan plans for the devices of one process; leave --coordinator out")
    if args.plan:
        return show_plan(args, job_config(args), terms, MachineThroughput(args, config).find())
    if args.save_prefixes_at_notice is not None:
        require_free(args.save_prefixes_at_notice)
    notice = Notice(functools.partial(_save_prefixes, args.save_prefixes_at_notice))
    with contextlib.ExitStack() as stack:
        stack.enter_context(exit_in_time(notice))
        stack.enter_context(notice_of_cloud(notice, args.preemption_notice))
        return _run_job(args, config, terms, notice, stack)


def _run_job(
    args: argparse.Namespace, config: EngineConfig, terms: EndTerms, notice: Notice, stack: contextlib.ExitStack
) -> int:
    """stack: what must end after the job."""
    from ferrum_jax.batch.job import JobOptions, JobSettings, run_batch
    from ferrum_jax.core.progress import plain_console

    def make_llm(start: JobStart) -> LLM:
        return job_llm(args, stack, start, start.identity.check)

    model, *names = model_names(args.model, args.served_model_name)
    return run_batch(
        make_llm,
        args.input,
        args.output,
        model=model,
        settings=JobSettings(
            names=names,
            adapters=tuple(named_adapters(args)),
            seed=config.seed,
            defaults=row_defaults(args),
            require_valid=args.require_valid,
        ),
        options=JobOptions(
            max_errors=args.max_errors,
            expiry_s=args.lease_expiry,
            new_run=args.new_run,
            strict_bits=args.strict_bits,
            reuse=args.reuse,
            reuse_text=args.reuse_text,
            leaves_early=args.leave_early,
            page_path=args.report,
            loading=loading_of(args, getattr(args, "sounds", args.input)),
            terms=terms,
            on_throughput=MachineThroughput(args, config).keep,
        ),
        console=plain_console(stderr=True),
        notice=notice,
    )


def _save_prefixes(folder: Path | None, llm: Any) -> None:
    if folder is not None and llm.stats()["entries"]:
        llm.save_prefix_cache(folder)


def add_end(batch: argparse.ArgumentParser) -> None:
    """Adds --deadline, --within, --budget and --price-per-hour."""
    group = batch.add_argument_group(
        "the end of the job and its cost",  # the short help shows this line in place of the four
        "Set by --deadline, --within, --budget, --price-per-hour; see --help-all.",
    )
    until = group.add_mutually_exclusive_group()
    times = {
        "--deadline TIME": "stop in order by then, with exit code 75 if rows are left: 06:00 is the next one in the "
        "machine's time zone; 2026-11-28T06:00, and with a zone 2026-11-28T06:00+01:00. Rows run by priority, then in "
        "the input's order",
        "--within TIME": "stop in order so long after the start: 2h, 90m, 1h30m",
    }
    add_flags(until, times)
    costs = {
        "--budget MONEY": "stop in order before all workers and starts of the job have cost more; needs "
        "--price-per-hour",
        "--price-per-hour MONEY": "what an hour of this machine costs: plan and progress then show costs, in the same "
        "currency",
    }
    add_flags(group, costs)


def end_terms(args: argparse.Namespace, now: Callable[[], float] = time.time) -> EndTerms:
    """The deadline and budget of the flags. Raises ValueError with the wrong value."""
    started = now()
    deadline = None if args.deadline is None else deadline_of(args.deadline, started)
    return EndTerms(
        deadline=deadline if args.within is None else started + span_of(args.within),
        budget=None if args.budget is None else money_of(args.budget, "the budget"),
        price_per_hour=None if args.price_per_hour is None else money_of(args.price_per_hour, "the price of an hour"),
    )
