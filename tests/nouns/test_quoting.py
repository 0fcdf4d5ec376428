"""Errors quote what others wrote in a bounded length, and read no more of it than they show."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.io.error_text import MAX_QUOTED, MOST_CHARACTERS, bounded, named, quoted

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150)
@given(value=VALUES)
def test_a_short_value_is_quoted_as_python_or_json_writes_it(value):
    for write in (repr, json.JSONEncoder(ensure_ascii=False).encode):
        whole = write(value)
        assert quoted(value, write) == whole or len(whole) > MAX_QUOTED


@pytest.mark.parametrize(
    "value, end",
    [
        ("x" * 10**6, "x'.. (1,000,000 characters)"),
        (["x"] * 10**6, ".. (1,000,000 entries)"),
        ({str(i): i for i in range(10**4)}, ".. (10,000 entries)"),
        ([[["x" * 10**6]]], ".."),
        (10**4000, "a whole number of 13,288 bits"),
    ],
    ids=["text", "list", "object", "nested", "number"],
)
def test_a_long_value_is_quoted_by_its_beginning_and_its_size(value, end):
    found = quoted(value)
    assert found.endswith(end) and len(found) < MAX_QUOTED + 40


def test_of_a_list_no_more_is_read_than_is_shown():
    read = []

    class Entry:
        def __repr__(self) -> str:
            read.append(self)
            return "entry"

    quoted([Entry()] * 10**5)
    assert len(read) < MAX_QUOTED


def test_the_first_few_names_are_said_and_the_others_counted():
    assert named(["a", "b"]) == "a, b"
    assert named([f"n{i}" for i in range(300_000)]) == "n0, n1, n2, n3, n4, n5, n6, n7 and 299,992 more"
    assert len(named(["x" * 10**6])) < 200


def test_a_long_sentence_keeps_its_beginning_and_what_to_do():
    found = bounded(f"stop is {'x' * 10**6}; leave it out")
    assert len(found) <= MOST_CHARACTERS and found.startswith("stop is x") and found.endswith("x; leave it out")
    assert "(1,000,022 characters in all)" in found
    assert bounded("\ud800 is not known") == "\\ud800 is not known"
