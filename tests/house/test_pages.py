"""Pages are linked from the home, and what they deny is held against the program."""

import re

from scripts import csv_tables
from tests.support import ROOT

DOCS = ROOT / "docs"
GUIDES = [
    ROOT / "README.md",
    *sorted(path for path in DOCS.rglob("*") if path.suffix in (".md", ".py") and "decisions" not in path.parts),
]
DENIALS = r"not yet|are refused|not there"
_PROMPTS = "text/prompts.py"


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


# Where a page denies or refuses: a part of its line, and what the program says there, by file.
HELD = {
    "guides/speculative-decoding.md": [
        ("draft models are refused by name", "inputs/sizes/speculative.py", "no second model drafts here"),
    ],
    "reference/file-formats.md": [
        ("such as `.tsv` or `.zip`", "batch/input/files.py", "is not supported; name .jsonl")
    ],
    "reference/models.md": [
        ("sounds are refused", _PROMPTS, "sounds, and this model hears none"),
        ("videos and sounds are refused", _PROMPTS, "sounds, and this model hears none"),
        ("images are refused", _PROMPTS, "and this model takes none: it sees no images"),
        ("videos are refused", "inputs/images/prompt_images.py", "its family's videos are not known"),
        (
            "2 and 3 bits and KV scales",
            "../checkpoints/formats/compressed_tensors.py",
            "kv_cache_scheme=NOTHING",
        ),
        ("have no published form and are refused", "../checkpoints/export.py", "which is published for"),
    ],
    "guides/adapters.md": [
        ("lead outside are refused", "serve/folders_below.py", "which is outside {option}"),
        ("to groups are refused", "../checkpoints/names/patterns.py", "is not supported"),
    ],
    "guides/training-loops.md": [
        (
            "prefix caches that were saved before are refused",
            "../checkpoints/prefixes.py",
            "holds prefixes of another engine",
        ),
        (
            "`update_weights` and `sleep` are refused",
            "engine/startup/open_model.py",
            'refuse_several_processes("sleep")',
        ),
    ],
    "guides/batch-jobs.md": [
        ("other sampling flags are refused", "batch/journal/job_identity.py", "was begun with other settings")
    ],
    "guides/quantised.md": [
        (
            "atomic or possessive parts are refused",
            "../checkpoints/names/patterns.py",
            "a possessive repeat is not supp",
        ),
        (
            "a whole batch are refused",
            "../checkpoints/formats/compressed_tensors.py",
            "kv_cache_scheme=NOTHING",
        ),
    ],
    "guides/structured-output.md": [
        (
            "patterns, are refused with their numbers",
            "text/structured/overlap.py",
            "may both match: give them a required",
        ),
    ],
    "guides/sounds.md": [("`chunking_strategy` are refused by name", "openai/body_rules.py", '"chunking_strategy": (')],
    "guides/serving.md": [
        ("tools that a host runs are refused", "openai/body_rules.py", "previous_response_id"),
        ("of a batch are refused", "serve/app/batch_routes.py", "files are kept until they are deleted"),
    ],
    "architecture.md": [
        ("do not divide are refused", "models/sharding/undivided.py", "def refusals("),
    ],
}


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
                assert any(part in around for part, _, _ in held), f"{name}: {around!r} is not in HELD"
        for part, path, said in held:
            assert part in text, f"{name} says no longer {part!r}: take it out of HELD"
            assert path is None or said in (ROOT / "ferrum_jax" / path).read_text(), (
                f"{name}: {part!r}, and not {said!r}"
            )
