"""Pages of the documentation that are made from the code, and links into it; mkdocs calls `on_files` and the others.

A page may hold `{{ config EngineConfig }}` (a table of a dataclass's fields), `{{ commands }}` (the --help of every
command), and `{{ source PATH NAME }}`, a link to the line where NAME is defined: a class, a function or Class.method. A
name that is not there ends the build, so such links cannot go stale.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = re.compile(r"\{\{ *(\w+)((?: +[^\s}]+)*) *\}\}")
SOURCES = "source/"
LINE_ANCHOR = "#__codelineno-0-{line}"


def on_config(config: Any) -> Any:
    """The navigation, with a page for each decision where it says DECISIONS."""
    decisions = [f"decisions/{path.name}" for path in sorted((ROOT / "docs/decisions").glob("*.md"))]
    config.nav = _with_decisions(config.nav, decisions)
    return config


def _with_decisions(nav: Any, decisions: list[str]) -> Any:
    if isinstance(nav, dict):
        return {title: _with_decisions(below, decisions) for title, below in nav.items()}
    if isinstance(nav, list):
        return [_with_decisions(entry, decisions) for entry in nav]
    return decisions if nav == "DECISIONS" else nav


def on_files(files: Any, config: Any) -> Any:
    """The pages, with one more for each source file that some page links to."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    texts = [file.content_string for file in files.documentation_pages()]
    for path in sorted({path for text in texts for path, _ in source_links(text)}):
        code = _read(path)
        page = f'---\nsearch: {{exclude: true}}\n---\n# {path}\n\n```python linenums="1"\n{code}\n```\n'
        files.append(File.generated(config, _source_page(path), content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text with every placeholder replaced."""
    from mkdocs.exceptions import PluginError  # pyright: ignore[reportMissingImports]

    if page.file.src_uri.startswith(SOURCES):
        return markdown
    try:
        return with_placeholders(markdown, page.file.src_uri)
    except ValueError as error:
        raise PluginError(str(error)) from error


def with_placeholders(markdown: str, page: str) -> str:
    """The text of a page with every placeholder replaced. Raises ValueError for one that names nothing."""
    makers = {"source": _source_link, "config": _fields_table, "commands": _commands}

    def replaced(found: re.Match[str]) -> str:
        name, words = found[1], found[2].split()
        if name not in makers:
            raise ValueError(f"{page}: {found[0]} is unknown; known are {', '.join(makers)}")
        return makers[name](page, *words)

    return PLACEHOLDER.sub(replaced, markdown)


def source_links(markdown: str) -> list[tuple[str, str]]:
    """(path, name) of each link into the code."""
    found = [words.split() for kind, words in PLACEHOLDER.findall(markdown) if kind == "source"]
    return [(path, name) for path, name in found]


def _source_page(path: str) -> str:
    return f"{SOURCES}{path.removesuffix('.py')}.md"


def _read(path: str) -> str:
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"a page links to {path}, which cannot be read: {error}") from error


def _source_link(page: str, path: str, name: str) -> str:
    line = line_of(path, name)
    up = "../" * page.count("/")
    return f'[`{name}`]({up}{_source_page(path)}{LINE_ANCHOR.format(line=line)} "{path}, line {line}")'


def line_of(path: str, name: str) -> int:
    """The line that defines a class, a function or Class.method. Raises ValueError where the file has none."""
    body: list[ast.stmt] = ast.parse(_read(path)).body
    line = 0
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        if not isinstance(found, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            raise ValueError(f"a page links to {name} in {path}, which defines no {part}")
        line, body = found.lineno, found.body
    return line


def _fields_table(page: str, name: str) -> str:
    """Fields of EngineConfig or SamplingParams: name, default, the flag that sets it, and what the flag's help says."""
    import ferrum_jax
    from ferrum_jax import __main__ as cli

    generate = dict(parsers(cli._parser(), "ferrum-jax"))["ferrum-jax generate"]
    flags = {action.dest: action for action in generate._actions}
    rows = ["| field | type and default | flag | |", "|---|---|---|---|"]
    for field in dataclasses.fields(getattr(ferrum_jax, name)):
        kind = str(field.type).replace(" | ", " or ")
        flag = flags.get(field.name) if (name, field.name) != ("SamplingParams", "seed") else None
        shown = "" if flag is None else f"`{flag.option_strings[0]}`"
        text = "" if flag is None else re.sub(r" \((default|needs --json).*\)$", "", flag.help or "")
        rows.append(f"| `{field.name}` | {kind}, `{_default(field)}` | {shown} | {text} |")
    return "\n".join(rows)


def _default(field: dataclasses.Field[Any]) -> object:
    return repr(field.default)


def _commands(page: str) -> str:
    from ferrum_jax import __main__ as cli

    parts: list[str] = []
    for name, parser in parsers(cli._parser(), "ferrum-jax"):
        text = io.StringIO()
        parser.print_help(text)
        parts.append(f"## {name}\n\n```text\n{text.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)


def parsers(parser: argparse.ArgumentParser, name: str) -> list[tuple[str, argparse.ArgumentParser]]:
    """Every command below a parser, with its whole name."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        return [(name, parser)]
    return [found for word, below in groups[0].choices.items() for found in parsers(below, f"{name} {word}")]
