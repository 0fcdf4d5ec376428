"""`--help` is short, with examples that its command takes; `--help-all` shows every flag."""

import argparse
import shlex

import pytest

from ferrum_jax.__main__ import _parser
from ferrum_jax.cli.parsers import CommandParser
from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.setting import settings_of

# of an engine, and without meaning for memory and speed
NOT_PLANNED = ("--seed", "--request-log", "--check-writes", "--ready", "--compilation-cache-dir", "--devices")


def commands(parser: argparse.ArgumentParser, name: str = "") -> dict[str, CommandParser]:
    """Every command that runs, by its name without the program's."""
    found: dict[str, CommandParser] = {}
    if parser.get_default("run") is not None:
        assert isinstance(parser, CommandParser)
        found[name] = parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                found |= commands(below, f"{name} {word}".strip())
    return found


COMMANDS = commands(_parser())


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("columns", [80, 120])
def test_help_is_short_and_ends_with_two_commands_that_work(name, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    command = COMMANDS[name]
    text = command.format_help()
    assert len(text.splitlines()) < 55 and all(len(line) <= columns for line in text.splitlines()[1:])
    examples = text.partition("\nexamples:\n")[2].replace("\\\n", "").splitlines()
    assert len(examples) == 2
    for example in examples:
        assert example.startswith(f"  ferrum-jax {name}")
        assert _parser().parse_args(shlex.split(example)[1:]).run == command.get_default("run")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_about_ten_flags_and_help_all_every_one(name, capsys):
    command = COMMANDS[name]
    flags = {flag for action in command._actions if action.help != argparse.SUPPRESS for flag in action.option_strings}
    short, whole = command.format_help(), command.help_of(None)
    assert {flag for flag in flags if flag in whole.replace(",", " ").split()} == flags
    assert sum(line.strip().startswith("--") for line in short.splitlines()) < 18
    assert command.common is None or command.common - {field.name for field, _ in settings_of(EngineConfig)} <= {
        action.dest for action in command._actions
    }
    if command.common is not None:
        with pytest.raises(SystemExit) as ended:
            command.parse_args(["--help-all"])
        assert ended.value.code == 0 and capsys.readouterr().out == whole


def test_the_help_of_a_job_names_the_flags_for_its_end_and_cost():
    text = COMMANDS["batch"].format_help()
    assert all(flag in text for flag in ("--deadline", "--within", "--budget", "--price-per-hour"))


def test_what_a_flag_takes_has_a_name_for_readers():
    for command in COMMANDS.values():
        for action in command._actions:
            shown = action.metavar or ("{" if action.choices else action.dest.upper())
            assert action.nargs == 0 or not str(shown).startswith("_"), action.option_strings


def test_a_plan_has_no_flags_without_meaning_for_it():
    known = set(COMMANDS["plan"]._option_string_actions)
    assert not known & set(NOT_PLANNED) and {"--mesh", "--kv-dtype", "--max-adapters"} <= known
    assert set(NOT_PLANNED) <= set(COMMANDS["compile"]._option_string_actions), "a bundle keeps them for its engines"


def test_every_field_says_what_it_is():
    for field, said in settings_of(EngineConfig):
        assert len(said.text) > 10 and not said.text.endswith("."), field.name
        assert f"    {field.name}: {said.text}" in (EngineConfig.__doc__ or "")
