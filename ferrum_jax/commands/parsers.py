"""What every command's parser has."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """Refuses what it does not know itself, with its own usage; argparse leaves that to the outermost parser."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            meant = get_close_matches(unknown[0].split("=")[0], self._option_string_actions, n=1)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {meant[0]}?' if meant else ''}")
        return found, unknown


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
