"""`ferrum-jax verify`: answers rows of a job's output again and says which are what was written.

Exit codes: 0 the output is what the model gives, within what is promised here; 1 something differs; 2 files do not fit;
130 or 75 where it is interrupted, after what was found until then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ferrum_jax.cli.job_llm import take_loading, verifying_llm
from ferrum_jax.cli.model import adapters_of, add_adapters, add_model, job_config
from ferrum_jax.cli.parsers import new_command, number_of

if TYPE_CHECKING:
    from ferrum_jax.batch.job import JobStart
    from ferrum_jax.inputs.identity import ModelIdentity
    from ferrum_jax.llm import LLM

_ALL = "all"


def add(commands: Any) -> None:
    verify = new_command(
        commands,
        "verify",
        _run,
        "check a batch job's output: read all its lines, and answer some of its rows again",
        "OUTPUT",
        examples=("out.jsonl --sample all", "out.jsonl --model checkpoints/demo --input in.jsonl"),
        common="output sample sample_seed margin report input model json",
    )
    verify.add_argument("output", metavar="OUTPUT", help="file that `ferrum-jax batch` wrote, or its URL")
    verify.add_argument(
        "--sample",
        type=lambda text: text if text == _ALL else number_of(1, "a whole number above 0, or all")(text),
        default=100,
        metavar="N",
        help="rows to answer again, or all; every line is read in any case (default: 100)",
    )
    verify.add_argument(
        "--sample-seed",
        type=int,
        metavar="INT",
        help="of the choice of rows, so that the same ones are answered again (default: another each time)",
    )
    verify.add_argument(
        "--margin",
        type=number_of(0.0, "a number, 0 or more"),
        metavar="X",
        help="where equal bits are not promised: numbers and ties that differ by at most this count as rounding "
        "(default: 0.001 in float32, 0.125 in bfloat16, 0.5 with a smaller KV dtype)",
    )
    verify.add_argument("--report", metavar="FILE", help="the job's report (default: OUTPUT.report.json)")
    verify.add_argument("--input", metavar="FILE", help="the job's input (default: the one that the report names)")
    verify.add_argument("--json", action="store_true", help="print what was found as one JSON object")
    add_adapters(verify, "where it lies now (default: as the report says)")
    add_model(verify, needed=False)
    verify.set_defaults(reads=("output", "report"))


def _run(args: argparse.Namespace) -> int:
    from ferrum_jax.batch.journal.job_record import record_of
    from ferrum_jax.batch.verify.show import as_json, shown
    from ferrum_jax.batch.verify.verify_job import EXIT_DIFFERS, Options, VerifyStopped, verify_job
    from ferrum_jax.core.progress import plain_console, status

    console = plain_console(stderr=True)
    seed = random.SystemRandom().getrandbits(32) if args.sample_seed is None else args.sample_seed
    options = Options(
        report_path=args.report,
        input_path=args.input,
        sample=None if args.sample == _ALL else args.sample,
        seed=seed,
        margin=args.margin,
    )
    record = record_of(args.output, args.report)
    taken = take_loading(args, record)
    adapters_of(args, job_config(args))
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as spinner:
        tell = spinner.enter_context(status(console, f"verifying {args.output}"))

        def make(start: JobStart, check: Callable[[ModelIdentity], None]) -> LLM:
            nonlocal tell
            spinner.close()  # loading has a spinner of its own
            llm = verifying_llm(args, stack, start, check, record, taken)
            tell = spinner.enter_context(status(console, f"verifying {args.output}"))
            return llm

        try:
            found = verify_job(make, args.output, record, options, lambda text: tell(text))
            code = 0 if found.is_right else EXIT_DIFFERS
        except VerifyStopped as stopped:
            found, code = stopped.found, stopped.code
    if args.json:
        print(json.dumps(as_json(found, args.model, options), indent=1))
    else:
        for part in shown(found, args.model, options):
            plain_console().print(part)
    return code
