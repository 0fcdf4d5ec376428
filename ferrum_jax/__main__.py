"""The `ferrum-jax` command: generate, batch, embed, bench, plan, compile, convert, cache.

Flags are the fields of EngineConfig and SamplingParams under their own names; what is not given keeps the
field's default. jax is imported by the commands that need it and only once their files have been checked.
Exit codes: 0 done, 1 some rows failed (batch, embed), 2 wrong usage or input, 3 too many rows failed (batch),
75 ended for a notice of the system (batch), 130 interrupted, 141 who read the output has gone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ferrum_jax.batch.notice import EXIT_INTERRUPTED, EXIT_PREEMPTED
from ferrum_jax.commands import batch, bench, cache, compile, convert, embed, generate, plan
from ferrum_jax.commands.parsers import CommandParser

EXIT_USAGE, EXIT_CLOSED = 2, 141


def command() -> NoReturn:
    """The process of the command: runs `main` and ends with its exit code.

    One that was interrupted or refused ends at once. What was to be kept is durable by then, and what else an
    interpreter does at its end (handlers, threads that still compile, a device's client) may take longer than the
    machine is there.
    """
    code: object
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    if code in (EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PREEMPTED):
        _output_is_closed()
        sys.stderr.flush()
        os._exit(int(code))
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = _parser().parse_args(argv)
    if getattr(args, "coordinator", None) is None:
        return _run(args)
    from ferrum_jax import distributed

    try:
        code = _run(args, distributed.join)
    except SystemExit as ended:  # of one that lost another, which then says so, or that follows one that has ended
        distributed.end(int(ended.code or 0))
        raise
    distributed.end(code)
    return code


def _run(args: argparse.Namespace, join: Callable[..., None] | None = None) -> int:
    try:
        if join is not None:
            join(args.coordinator, args.num_processes, args.process_id)
        code = args.run(args)
        return EXIT_CLOSED if _output_is_closed() else code
    except KeyboardInterrupt:
        print("ferrum-jax: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            return EXIT_CLOSED
        if args.traceback:
            raise
        print(f"ferrum-jax {args.command}: error: {_describe(error)}", file=sys.stderr)
        return EXIT_USAGE


def _describe(error: ValueError | OSError) -> str:
    """What it says, without the number that the system gave it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _output_is_closed() -> bool:
    """Writes out what is printed; whether nobody reads it any more, as in `ferrum-jax generate ... | head -1`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains as it ends
        return True
    return False


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="ferrum-jax", description="LLM inference in JAX: paged KV, prefix reuse.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, batch, embed, bench, plan, compile, convert, cache):
        command.add(commands)
    return parser


if __name__ == "__main__":
    command()
