"""The table of mutants is true of the files, so that `python -m scripts.mutants` finds what it is to change."""

import pytest

from scripts.mutant_forks import fast_tests
from scripts.mutants import mutants
from tests.support import ROOT


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_a_mutants_text_stands_in_its_file_once(mutant):
    assert mutant.old != mutant.new
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, "say what it is now, or where it went"


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_tests_that_find_a_mutant_are_there(mutant):
    assert mutant.tests and all(path.startswith("tests/") and (ROOT / path).exists() for path in mutant.tests)


def test_mutants_are_found_by_tests_that_run_always():
    assert "not slow" in fast_tests() and "not aot" in fast_tests()
