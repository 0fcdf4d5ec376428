"""Links of the documentation into the code, and tables that are data; mkdocs calls `on_files` and the others.

A page names what it speaks of as [`NAME`](../PATH.py): a class, a function or Class.method. On a code host that opens
the file; here it becomes a link to the line where NAME is defined, in a page of the site that shows the file. A name
that is not there ends the build, so such links cannot go stale.
"""

import ast
import re
from pathlib import Path
from typing import Any

from scripts import csv_tables
from scripts.build_release import repository

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[`([\w.]+)`\]\((?:\.\./)+([\w/]+\.py)\)")
SOURCES = "source/"
NO_ADDRESS = "://code.example/"  # the address that pyproject.toml has until one is chosen
LINE_ANCHOR = "#__codelineno-0-{line}"


def on_config(config: Any) -> Any:
    """The navigation, with a page for each decision where it says DECISIONS; and a link to the repository."""
    decisions = [f"decisions/{path.name}" for path in sorted((ROOT / "docs/decisions").glob("*.md"))]
    config.nav = _with_decisions(config.nav, decisions)
    if NO_ADDRESS not in (place := repository(ROOT)):
        config.repo_url, config.repo_name = place, "the repository"
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
    """The page's text with its tables, whose links into the code lead to pages of the site."""
    from mkdocs.exceptions import PluginError  # pyright: ignore[reportMissingImports]

    if page.file.src_uri.startswith(SOURCES):
        return markdown
    try:
        return with_source_pages(csv_tables.with_tables(markdown), page.file.src_uri)
    except (OSError, ValueError) as error:
        raise PluginError(str(error)) from error


def with_source_pages(markdown: str, page: str) -> str:
    """The text of a page with links to lines of the site. Raises ValueError for one that names nothing."""
    return LINK.sub(lambda found: _source_link(page, found[2], found[1]), markdown)


def source_links(markdown: str) -> list[tuple[str, str]]:
    """(path, name) of each link into the code."""
    return [(path, name) for name, path in LINK.findall(markdown)]


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
