"""The parser of every command: a short `--help` with examples, and `--help-all` with every flag."""

import argparse
import contextlib
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.setting import settings_of

_COMMON = frozenset(field.name for field, said in settings_of(EngineConfig) if said.is_common)


class CommandParser(argparse.ArgumentParser):
    """Refuses what it does not know itself, with its own usage; argparse leaves that to the outermost parser.

    common: the arguments that `--help` shows beside those that are needed; None shows all. examples: whole commands.
    """

    common: frozenset[str] | None = None
    examples: Sequence[str] = ()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            meant = get_close_matches(unknown[0].split("=")[0], self._option_string_actions, n=1)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {meant[0]}?' if meant else ''}")
        return found, unknown

    def format_help(self) -> str:
        return self.help_of(self.common)

    def help_of(self, common: frozenset[str] | None) -> str:
        """The help with these arguments and those that are needed."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments([action for action in group._group_actions if _is_shown(action, common)])
            formatter.end_section()
        examples = ["\nexamples:", *map(_folded, self.examples)] if self.examples else []
        return formatter.format_help() + "".join(f"{example}\n" for example in examples)


class PrintAndExit(argparse.Action):
    """A flag that prints the text which `const` makes."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: Callable[[], str], help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, const=const, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(self.const().rstrip())
        parser.exit()


def new_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    needed: str,
    *,
    examples: Sequence[str],
    common: str | None = None,
) -> CommandParser:
    """The parser of a command; name: with its group, `needed`: what the usage line shows.

    examples: without the program's name. common: the arguments that `--help` shows, beside an engine's common ones;
    None shows all.
    """
    command = commands.add_parser(
        name.split()[-1],
        help=text,
        description=text[0].upper() + text[1:] + ".",
        usage=" ".join(f"ferrum-jax {name} {needed} [options]".split()),
        allow_abbrev=False,
        add_help=False,
    )
    command.examples = [f"ferrum-jax {name} {example}".rstrip() for example in examples]
    command.add_argument("-h", "--help", action="help", help="show this and exit")
    if common is not None:
        command.common = _COMMON | {"help", "help_all", *common.split()}
    whole = partial(command.help_of, None)
    command.add_argument("--help-all", action=PrintAndExit, const=whole, help="show every flag and exit")
    command.add_argument("--traceback", action="store_true", help="show where an error comes from")
    command.set_defaults(run=run)
    return command


def add_flags(group: argparse._ActionsContainer, flags: Mapping[str, str], **how: Any) -> None:
    """Adds flags with these texts as their help: "--name" is a switch, and "--name VALUE" takes a value.

    INT is read as a whole number. how: what else argparse is told of each.
    """
    for flag, text in flags.items():
        name, _, metavar = flag.partition(" ")
        kind = {"type": int} if metavar == "INT" else {}
        value = {"metavar": metavar, **kind} if metavar else {"action": "store_true"}
        group.add_argument(name, help=text, **value, **how)


def number_of(least: float, wanted: str) -> Callable[[str], Any]:
    """The reader of a flag's number, which is `least` or more, and whole if that is. wanted: such a one, in words."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if (isinstance(least, float) or text.isdecimal()) and least <= type(least)(text) < math.inf:
                return type(least)(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return read


def _is_shown(action: argparse.Action, common: frozenset[str] | None) -> bool:
    return common is None or action.required or not action.option_strings or action.dest in common


def _folded(example: str) -> str:
    """The command as a shell takes it, in lines narrow enough for the terminal where its flags allow that."""
    width, lines = shutil.get_terminal_size().columns - 4, [""]
    for part in re.split(r"(?= --)", example):
        if len(lines[-1]) + len(part) > width:
            lines.append("   ")
        lines[-1] += part
    return "  " + " \\\n  ".join(lines)
