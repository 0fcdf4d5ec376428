"""The fast suite's budget of CPU seconds: each folder of tests has its part, and together they are no more than 500."""

from collections import Counter

from tests.spent import FOLDERS, SLOW, dear, folder_of, proven
from tests.support import ROOT


def test_each_folder_of_tests_has_a_budget_and_together_they_have_500_seconds():
    folders = {folder_of(str(path.relative_to(ROOT))) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {*FOLDERS} == {*folders, "collecting"}
    assert sum(FOLDERS.values()) <= 500


def test_every_test_that_is_listed_as_slow_is_there():
    for file, names in SLOW.items():
        text = (ROOT / file).read_text()
        assert [name for name in names if f"def {name.partition('[')[0]}(" not in text] == [], file


def test_what_a_run_has_proven_is_one_line():
    tests = Counter(batch=3, serve=2)
    assert proven(tests, 7.4, 0) == "proven: 5 tests of 2 folders hold on this CPU, in 7 CPU seconds"
    assert proven(tests, 7.4, 1) == "NOT proven: 5 tests passed, and others did not"


def test_units_that_took_more_than_is_recorded_are_named():
    a, b = "tests/house/test_readme.py::test[a]", "tests/new/test_new.py::test_other[b-qwen3]"
    assert dear({a: 100.0, b: 9.0, b.replace("other", "more"): 4.0}) == [(("tests/new/test_new.py", "qwen3"), 13.0)]
