"""A grammar that would end its process ends a trial, and is refused; the next one compiles."""

import itertools
import os
import signal

import pytest

from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.text.structured import trial_process
from ferrum_jax.text.structured.grammars import Grammars
from tests.structured.vocabularies import demo_vocabulary

GOOD = StructuredOutputsParams(regex="[a-c]{3}")


def chain(length: int) -> dict:
    names = [f"d{number}" for number in range(length + 1)]
    parts = {
        name: {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{after}"}}, "required": ["a"]}
        for name, after in itertools.pairwise(names)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**parts, names[-1]: {"type": "null"}}}


def rules(length: int) -> str:
    return "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(length)) + f'r{length}: "a"'


@pytest.mark.parametrize(
    "asked",
    [
        {"json": chain(1000)},
        {"grammar": rules(3000)},
        {"grammar": "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(3000)) + 'r3000 ::= "a"'},
        {
            "structural_tag": {
                "structures": [{"begin": "<f>", "schema": chain(1000), "end": "</f>"}],
                "triggers": ["<f"],
            }
        },
    ],
    ids=["definitions", "rules", "gbnf", "tag"],
)
def test_a_grammar_that_overflows_the_stack_is_refused(asked):
    grammars = Grammars(demo_vocabulary())
    refused = grammars.get(StructuredOutputsParams(**asked)).fault()
    assert "takes too much nesting to compile; make it smaller, flatter" in str(refused)
    assert grammars.get(GOOD).fault() is None


@pytest.mark.parametrize("asked", [{"json": chain(200)}, {"grammar": rules(500)}])
def test_what_is_nested_as_people_nest_compiles(asked):
    assert Grammars(demo_vocabulary()).get(StructuredOutputsParams(**asked)).fault() is None


def spin(vocabulary, asked, text):
    while True:
        pass


def fill_memory(vocabulary, asked, text):
    return str(len(b"x" * (4 << 30)))


def ended_from_outside(vocabulary, asked, text):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("trial", "said"),
    [(spin, "more than 1 s"), (fill_memory, "takes its process"), (ended_from_outside, "takes its process")],
)
def test_a_trial_that_ends_its_process_is_a_fault(trial, said, monkeypatch):
    monkeypatch.setattr(trial_process, "_CPU_S", 1)
    monkeypatch.setitem(trial_process._TOOK, signal.SIGXCPU, "more than 1 s to compile")
    assert said in str(demo_vocabulary().trials.fault(trial, GOOD, ""))
    assert Grammars(demo_vocabulary()).get(GOOD).fault() is None


def number_of_process(vocabulary, asked, text):
    return str(os.getpid())


def test_a_worker_that_somebody_ends_is_replaced():
    trials = demo_vocabulary().trials
    before = int(str(trials.fault(number_of_process, GOOD, "")))
    os.kill(before, signal.SIGKILL)
    assert int(str(trials.fault(number_of_process, GOOD, ""))) != before
    trials._link.close()  # as if the child had ended
    assert Grammars(demo_vocabulary()).get(GOOD).fault() is None
