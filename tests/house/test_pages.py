"""Pages are linked from the home, and what they deny is held against the program."""

import re
import tomllib

from scripts import csv_tables
from tests.support import ROOT

DOCS = ROOT / "docs"
GUIDES = [
    ROOT / "README.md",
    *sorted(path for path in DOCS.rglob("*") if path.suffix in (".md", ".py") and "decisions" not in path.parts),
]
DENIALS = r"not yet|are refused|not there"


def test_every_guide_is_linked_from_the_home_and_stands_in_the_navigation():
    home, navigation = (DOCS / "index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for folder in ("start", "guides", "reference"):
        for page in (DOCS / folder).glob("*.md"):
            assert f"]({folder}/{page.name})" in home and f"- {folder}/{page.name}" in navigation, page.name


def test_the_home_shows_a_result_and_a_command():
    home = (DOCS / "index.md").read_text()
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", home)
    assert pictures and all((DOCS / path).exists() for path in pictures)
    assert "    scripts/demo\n" in home and "    ferrum-jax batch " in home


# A part of a line that denies, and what the program says there, by page and file.
HELD = tomllib.loads((ROOT / "tests/house/held.toml").read_text())


def test_what_a_page_denies_is_in_the_table_and_in_the_program():
    """A sentence that denies what there is since costs users the feature: each is tied to the program's own refusal."""
    for page in GUIDES:
        name = page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name
        if name in ("glossary.md", "laboratory.md", "models.md") or name.startswith("contributing/"):
            continue  # models.md is made from the registry's own table of what is not served
        held = HELD.get(name, [])
        text = re.sub(r"\n(?!\n|[|#-]) *", " ", csv_tables.with_tables(page.read_text()))
        for line in (line for line in text.splitlines() if re.search(DENIALS, line)):
            for found in re.finditer(DENIALS, line):
                around = line[max(0, found.start() - 90) : found.end() + 40]
                assert any(part in around for part, _, _ in held), f"{name}: {around!r} is not in held.toml"
        for part, path, said in held:
            assert part in text, f"{name} says no longer {part!r}: take it out of held.toml"
            assert path is None or said in (ROOT / "ferrum_jax" / path).read_text(), (
                f"{name}: {part!r}, and not {said!r}"
            )
