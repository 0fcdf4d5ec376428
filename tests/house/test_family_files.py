"""A family is added in few files: its own, the list of families, a published config, a golden, and made pages."""

import re
import subprocess

import pytest

from tests.support import ROOT

# May only fall. Five are written: the family, the list in the registry, tests/published/, the recipe of a golden and
# its row in tests/goldens/families.toml. Three are made: models.csv and slices.csv in docs/tables, and a table of
# docs/reference/models.md.
MOST_FILES = 8
# Families that brought no mechanism of their own, and how their names are spelled.
PLAIN = {
    "arcee": "arcee|AFM-4",
    "cohere2": "cohere.?2",
    "exaone4": "exaone",
    "smollm3": "smollm3",
    "starcoder2": "starcoder.?2",
}
# What was done when, and a page that tells how one family was added.
TALES = ("CHANGELOG.md", "docs/contributing/a-family-from-nothing.md", "tests/house/test_family_files.py")


def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in found if path not in TALES and (ROOT / path).is_file()]


@pytest.mark.parametrize("module", PLAIN)
def test_few_files_name_a_family_that_brought_no_mechanism(module: str):
    files = [path for path in tracked() if not re.match(r"tests/goldens/.*/", path)]  # which a command made
    texts = {path: (ROOT / path).read_bytes().decode(errors="ignore") for path in files}
    naming = [path for path, text in texts.items() if re.search(PLAIN[module], f"{path}\n{text}", re.IGNORECASE)]
    assert f"ferrum_jax/models/families/{module}.py" in naming
    assert len(naming) <= MOST_FILES, f"{len(naming)} files name {module}: {naming}"


def test_scripts_and_the_product_import_no_tests():
    for path in tracked():
        if path.endswith(".py") and not path.startswith("tests/"):
            assert not re.search(r"(?m)^\s*(from|import) tests\b", (ROOT / path).read_text()), path
