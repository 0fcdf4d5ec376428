"""`--seed`: every run draws the same histories, unless it is given a seed; with one seed it draws the same again."""

import os
import sys

import pytest

from tests.support import ROOT, written_by

TESTS = """
import sys
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.histories import seeded

def note(value):
    with open("drawn", "a") as file:
        print(value, file=file)

@settings(max_examples=20)
@given(st.integers(), st.text())
def test_of_hypothesis(number, text):
    note((number, text))

class Machine(RuleBasedStateMachine):
    @rule(n=st.integers())
    def step(self, n):
        note(n)

TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=5)

def test_of_a_seed():
    note(seeded(3))
"""


@pytest.mark.slow
def test_histories_are_the_same_without_a_seed_and_with_the_same_one(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ("tests.histories",)\n')
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    def drawn(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py", *arguments]
        environment["PYTHONPATH"] = str(ROOT)
        (tmp_path / "drawn").unlink(missing_ok=True)
        shown = written_by(command, cwd=tmp_path, env=environment)
        assert ("histories from --seed 7" in shown) == bool(arguments)
        return (tmp_path / "drawn").read_text()

    always, seeded = drawn(), drawn("--seed", "7")
    assert drawn() == always and drawn("--seed", "7") == seeded
    assert always.endswith("\n3\n") and seeded.endswith(f"\n{3 + 7 * 1_000_003}\n")
    assert always.splitlines()[5:20] != seeded.splitlines()[5:20]
