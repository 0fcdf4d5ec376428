"""What every command's parser has."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def new_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, needed: str
) -> argparse.ArgumentParser:
    """The parser of a command; name: with its group, `needed`: what the usage line shows."""
    command = commands.add_parser(
        name.split()[-1],
        help=text,
        description=text[0].upper() + text[1:] + ".",
        usage=f"ferrum-jax {name} {needed} [options]",
        allow_abbrev=False,
    )
    command.add_argument("--traceback", action="store_true", help="show where an error comes from")
    command.set_defaults(run=run)
    return command
