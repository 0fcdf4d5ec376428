"""The `ferrum-jax` command: check, generate, serve, batch, verify, embed, bench, plan, compile, convert, cache.

Flags are the fields of EngineConfig and SamplingParams under their own names; a flag that is not given keeps the
field's default. jax is imported by the commands that need it and only once their files have been checked.
Exit codes: 0 done, 1 some rows failed (batch, embed) or something is wrong (check), 2 wrong usage or input, 3 too many
rows failed (batch), 70 the program crashed, 75 stopped by the system's notice (batch), 130 interrupted, 141 nobody
reads the output any more.
"""

import sys

_INTERRUPTED = "ferrum-jax: interrupted"
try:
    import argparse
    import atexit
    import importlib.metadata
    import os
    import platform
    import traceback
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from ferrum_jax import __version__
    from ferrum_jax.batch.notice import EXIT_INTERRUPTED, EXIT_PREEMPTED
    from ferrum_jax.cli import batch, bench, cache, check, compile, convert, embed, generate, plan, serve, verify
    from ferrum_jax.cli.given_paths import require_files_apart
    from ferrum_jax.cli.parsers import CommandParser
    from ferrum_jax.engine.startup.accelerators import idle_packages
    from ferrum_jax.io.old_names import COMMANDS
except KeyboardInterrupt:  # these take a good part of a second
    print(_INTERRUPTED, file=sys.stderr)
    sys.exit(130)

EXIT_USAGE, EXIT_CRASHED, EXIT_CLOSED = 2, 70, 141  # 70 is EX_SOFTWARE
_SECRET = "FERRUM_JAX_COORDINATOR_SECRET"  # environment variable, in place of --coordinator-secret-file


def command() -> NoReturn:
    """Runs `main` and ends the process with its exit code.

    The process ends at once: what must be kept is durable by then, and freeing every module, waiting for threads that
    still compile and closing a device's client takes half a second, or longer than a machine that is taken away will
    exist. Handlers that were registered for the exit run, except where the command was interrupted, refused or crashed.
    """
    code: object
    try:
        _open_what_is_closed()
        code = main()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:  # before its flags were read, or on its way out
        print(_INTERRUPTED, file=sys.stderr)
        code = EXIT_INTERRUPTED
    except Exception as error:
        traceback.print_exc()
        code = EXIT_USAGE if isinstance(error, ValueError | OSError) else EXIT_CRASHED  # only with --traceback
        _end_others(code)
    if not isinstance(code, int):
        sys.exit(code)  # a message, or None
    if code not in (EXIT_USAGE, EXIT_CRASHED, EXIT_INTERRUPTED, EXIT_PREEMPTED):
        atexit._run_exitfuncs()
    _output_is_closed()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser, begun = _parser(), " ".join((sys.argv[1:] if argv is None else argv)[:2])
    if begun in COMMANDS:
        parser.error(f"`ferrum-jax {begun}` is gone: take {COMMANDS[begun]}")
    try:
        args = parser.parse_args(argv)
    except BrokenPipeError:  # of what a flag prints, such as `--help-all` or `batch --schema`
        _output_is_closed()
        return EXIT_CLOSED
    if getattr(args, "coordinator", None) is None:
        return _run(args)
    from ferrum_jax.integrations import distributed

    try:
        code = _run(args, distributed.join)
    except SystemExit as ended:  # another process was lost, or process 0 has ended
        distributed.end(int(ended.code or 0))
        raise
    distributed.end(code)
    return code


def _end_others(code: int) -> None:
    """Ends the other processes of this command, if there are any, with this code too."""
    if "ferrum_jax.integrations.distributed" in sys.modules:
        sys.modules["ferrum_jax.integrations.distributed"].end(code)


def _run(args: argparse.Namespace, join: Callable[..., None] | None = None) -> int:
    try:
        require_files_apart(args)
        _use_cpu_without_chips(args)
        if join is not None:
            join(
                args.coordinator,
                args.num_processes,
                args.process_id,
                coordinator_secret_file=args.coordinator_secret_file,
                coordinator_secret=os.environ.get(_SECRET),
            )
        code = args.run(args)
        return EXIT_CLOSED if _output_is_closed() else code
    except KeyboardInterrupt:
        print(_INTERRUPTED, file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            return EXIT_CLOSED
        if args.traceback:
            raise
        print(f"ferrum-jax {args.command}: error: {_describe(error)}", file=sys.stderr)
        return EXIT_USAGE


def _use_cpu_without_chips(args: argparse.Namespace) -> None:
    """Chooses the CPU if accelerator packages find no chip, and says so; without this jax would print tracebacks."""
    found = [] if "JAX_PLATFORMS" in os.environ else idle_packages()
    if not found:
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if getattr(args, "runs_here", False):
        are = "is" if len(found) == 1 else "are"
        print(
            f"ferrum-jax: {' and '.join(found)} {are} installed and no GPU or TPU was found: this runs on the CPU "
            "(JAX_PLATFORMS=cpu asks for it and leaves this line out)",
            file=sys.stderr,
        )


def _describe(error: ValueError | OSError) -> str:
    """The error's message, without the system's error number."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _open_what_is_closed() -> None:
    """Gives /dev/null to each of stdin, stdout and stderr that whoever started this has closed, as `>&-` does.

    The next file that is opened would have its number, and what is printed would go there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their numbers
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _output_is_closed() -> bool:
    """Flushes stdout. True if nobody reads it any more, as in `ferrum-jax generate ... | head -1`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return True
    return False


def _versions() -> str:
    """The versions, read without importing jax, which takes a second."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")]
    return f"ferrum-jax {__version__} ({', '.join(found)}, Python {platform.python_version()})"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="ferrum-jax", description="LLM inference in JAX: paged KV, prefix reuse.")
    parser.add_argument(
        "--version", action="version", version=_versions(), help="print the versions of ferrum-jax, jax and Python"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (check, generate, serve, batch, verify, embed, bench, plan, compile, convert, cache):
        command.add(commands)
    return parser


if __name__ == "__main__":
    command()
