"""Scripts and documentation agree: every script explains itself, and every command that a text names is understood.

What needs the reference implementation (`torch`, `transformers`) cannot be imported here and is left to `-m oracle`.
"""

import argparse
import ast
import importlib
import os
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from unittest import mock

import pytest

from ferrum_jax import __main__ as cli
from tests.support import ROOT

PROGRAMS = {p.stem: p for p in (ROOT / "scripts").glob("*.py") if '__name__ == "__main__"' in p.read_text()}
_REFERENCE = re.compile(r"(?m)^(?:import|from) (?:torch|transformers|scripts\.goldens\.reference)\b")
OF_THE_REFERENCE = {name for name, path in PROGRAMS.items() if _REFERENCE.search(path.read_text())}
COMMAND = re.compile(r"(?:ferrum-jax|python3? (?:-m scripts\.|scripts/)(?P<script>\w+)(?:\.py)?) (?P<words>.*)")
PROSE = re.compile(r" +#.*| {3,}(?![ -]).*")  # what stands beside a command, in its line


class Understood(Exception):
    """Raised once the arguments are parsed, in place of the work."""


def _texts() -> Iterator[tuple[str, str]]:
    """Each text that names commands, with where it stands. Blocks of bash are indented, others are left out."""
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    for path in (*pages, *sorted((ROOT / "checkpoints").glob("demo*/README.md"))):
        yield (
            path.relative_to(ROOT).as_posix(),
            re.sub(r"```(\w*)\n(.*?)```", _block, path.read_text(), flags=re.DOTALL),
        )
    for name, path in sorted(PROGRAMS.items()):
        yield f"scripts/{name}.py", ast.get_docstring(ast.parse(path.read_text())) or ""


def _block(found: re.Match[str]) -> str:
    return textwrap.indent(found[2], "    ") if found[1] == "bash" else ""


def _commands(*, whole: bool) -> list:
    """(command or script, its words) of lines that are a command by themselves, or of mentions within sentences."""
    found = {}
    for where, text in _texts():
        lines = re.findall(r"(?m)^ {4}(\S.*)$", text.replace("\\\n", " "))
        mentions = [" ".join(mention.split()) for mention in re.findall(r"`([^`]+)`", text)]
        for line in lines if whole else mentions:
            command = COMMAND.match(line + " ")
            if command is None or command["script"] in OF_THE_REFERENCE:
                continue
            words = PROSE.sub("", command["words"]).strip()
            if not (whole and re.search(r"\[|\.\.\.", words)):  # a synopsis
                found[command["script"] or "ferrum-jax", words] = where
    return [pytest.param(*command, id=f"{where}: {' '.join(command)}") for command, where in found.items()]


@pytest.fixture
def call():
    """Calls a program with arguments; its environment variables stay its own."""

    def _call(program: str, words: list[str]) -> None:
        with mock.patch.dict(os.environ), mock.patch("sys.argv", [program, *words]):
            if program == "ferrum-jax":
                cli.main(words)
            else:
                importlib.import_module(f"scripts.{program}").main()

    return _call


@pytest.mark.parametrize("program", sorted(PROGRAMS.keys() - OF_THE_REFERENCE))
def test_a_script_explains_itself(program, call, capsys):
    with pytest.raises(SystemExit) as ended:
        call(program, ["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith("usage: ")
    assert (ast.get_docstring(ast.parse(PROGRAMS[program].read_text())) or "missing") in shown


@pytest.mark.parametrize(("program", "words"), _commands(whole=True))
def test_a_command_that_a_text_shows_is_understood(program, words, call, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(parser: argparse.ArgumentParser, *arguments: object) -> None:
        parse(parser, *arguments)  # pyright: ignore
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    with pytest.raises(Understood):
        call(program, shlex.split(words))


def _lines(start: str) -> list[str]:
    """Lines of all texts that begin so, each once."""
    found = [line for _, text in _texts() for line in re.findall(rf"(?m)^ {{4}}{start}.*$", text)]
    return sorted(set(map(str.strip, found)))


@pytest.mark.parametrize("line", _lines(r"(?:EXTRAS=\w+ )?scripts/"))
def test_a_script_that_a_text_shows_is_there(line):
    words = shlex.split(line, comments=True)
    script = ROOT / next(word for word in words if not word.startswith("EXTRAS="))
    assert os.access(script, os.X_OK)
    paths = [word for word in words if word.startswith("tests/") and "NAME" not in word]
    assert all((ROOT / path).exists() for path in paths)


def test_an_extra_that_a_text_installs_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra for _, text in _texts() for found in re.findall(r"-e '\.\[(.*?)\]'", text) for extra in found.split(",")
    }
    assert {"tpu", "gpu", "store"} <= named <= set(extras)


@pytest.mark.parametrize(("program", "words"), _commands(whole=False))
def test_an_option_that_a_sentence_names_is_there(program, words, call, capsys):
    command = words.partition(" -")[0].split() if program == "ferrum-jax" else []
    with pytest.raises(SystemExit):
        call(program, [*command, "--help-all"] if command else ["--help"])
    options = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert set(re.findall(r"--[\w-]+", words)) <= options
