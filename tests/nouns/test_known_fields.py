"""One table says what an object may hold, and one error has all that is wrong in it."""

from __future__ import annotations

import pytest

from ferrum_jax.quoting import Elsewhere
from ferrum_jax.quoting.known_fields import NAMES, TRUTH, Fields, Known, number, one_of, require, whole

FIELDS = Fields(
    {
        "size": Known(whole(1)),
        "rate": Known(number(0), 0.5),
        "is_fast": Known(TRUTH, False),
        "kind": Known(one_of("a", "b", None)),
        "names": Known(NAMES, []),
        "pad": Elsewhere((False, None), "leave it out"),
    }
)


def test_each_field_has_its_value_or_default_and_no_effect_is_left_out():
    found = FIELDS.read({"size": 3, "kind": "b", "rate": None, "pad": False})
    assert found == {"size": 3, "rate": 0.5, "is_fast": False, "kind": "b", "names": []}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": 0}, "size is 0; it must be a whole number, 1 or more"),
        ({}, "size is None; it must be a whole number, 1 or more"),
        ({"size": True}, "size is True; it must be a whole number, 1 or more"),
        ({"rate": float("nan")}, "rate is nan; it must be a number, 0 or more"),
        ({"is_fast": 1}, "is_fast is 1; it must be true or false"),
        ({"kind": "c"}, "kind is 'c'; it must be one of ('a', 'b', None)"),
        ({"names": ["a", 2]}, "names is ['a', 2]; it must be a list of names"),
        ({"pad": 0}, "pad is 0, a setting that is not here: leave it out"),
        ({"odd": [1]}, "odd is [1], a setting that is not here: "),
    ],
)
def test_a_value_of_another_kind_and_a_key_that_is_not_here_are_refused(given, said):
    with pytest.raises(ValueError) as error:
        FIELDS.read({"size": 1} | given if given else {})
    assert str(error.value) == said


def test_one_error_has_all_faults_in_the_order_of_the_table():
    with pytest.raises(ValueError, match=r"^size is 'x'; .*; rate is -1; .*; odd is 1, .*; pad is True, .*"):
        FIELDS.read({"pad": True, "odd": 1, "rate": -1, "size": "x"})


def test_a_table_has_sentences_of_its_own():
    fields = Fields({"a": Known(whole(2), 2)}, wrong="{name} = {value}", refused="no {name}", unknown="what is {name}?")
    assert fields.problems({"a": 1, "b": 2}) == ["a = 1", "what is b?"]


def test_a_value_alone_is_required_of_a_kind():
    assert require("n", 4, whole(1)) == 4
    with pytest.raises(ValueError, match="n is 0; it must be a whole number, 1 or more"):
        require("n", 0, whole(1))
