"""The tables of mutants are true of the files, and what `python -m scripts.made_mutants` has won stays won."""

import os
import sys
import tomllib

import pytest

from scripts.made_mutants import KEPT, PACKAGES
from scripts.mutant_forks import fast_tests
from scripts.mutant_sites import sites_of
from scripts.mutants import mutants
from tests.support import ROOT, written_by

MADE = tomllib.loads(KEPT.read_text())


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_a_mutants_text_stands_in_its_file_once(mutant):
    assert mutant.old != mutant.new
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, "say what it is now, or where it went"


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_tests_that_find_a_mutant_are_there(mutant):
    assert mutant.tests and all(path.startswith("tests/") and (ROOT / path).exists() for path in mutant.tests)


def test_mutants_are_found_by_tests_that_run_always():
    assert "not slow" in fast_tests() and "not aot" in fast_tests()


def test_a_survivor_can_be_made_today_and_few_have_no_reason():
    files = {name.partition(" ")[0] for name in MADE["survivors"]}
    there = {site.name for file in files for site in sites_of(ROOT / "ferrum_jax" / file)}
    assert MADE["survivors"].keys() <= there, "what a test finds, and what is gone, has no line"
    for package, (folder, _) in PACKAGES.items():
        open_ = [name for name, why in MADE["survivors"].items() if not why and f"ferrum_jax/{name}".startswith(folder)]
        assert len(open_) <= MADE["without_reason"][package], f"find or explain {open_}"


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_the_mutants_in_turn_are_found_and_no_branch_is_lost(package):
    command = [sys.executable, "-m", "scripts.made_mutants", package, "--seconds", "90"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "XLA_FLAGS"))}
    written_by(command, env=environment)
