"""Parsing in several processes: the same columns, whatever becomes of the processes."""

import dataclasses
import io
import json
import pickle

import pytest

from ferrum_jax.batch.input import parsing, read_ahead
from ferrum_jax.batch.input.rows import Rows

LINES = [
    *(
        json.dumps({"custom_id": f"row-{i}", "prompt_token_ids": [i, 7, 9], "max_tokens": 4}).encode()
        for i in range(40)
    ),
    b"",
    b"{",
    json.dumps({"custom_id": "text", "prompt": "x" * 300, "cache_salt": "tenant"}).encode(),
    json.dumps({"custom_id": "vector", "input": "x", "model": "m"}).encode(),
]
DEFAULTS = {"n": 2, "max_tokens": 9, "stop": ["x"], "logit_bias": {"5": -1.0}}


def columns() -> list[bytes]:
    found = parsing.parse_file(io.BytesIO(b"\n".join(LINES)), seed=3, defaults=DEFAULTS)
    assert len(found.offsets) == len(LINES) - 1  # one is blank
    return [pickle.dumps(getattr(found, field.name)) for field in dataclasses.fields(found)]


@pytest.fixture
def many_processes(monkeypatch):
    monkeypatch.setattr(parsing, "_CHUNK_BYTES", 300)
    monkeypatch.setattr(parsing, "_MIN_BYTES", 1)
    monkeypatch.setattr(parsing.os, "cpu_count", lambda: 2)


def test_a_large_input_parsed_in_two_processes_gives_the_columns_of_one(many_processes, monkeypatch):
    elsewhere = columns()
    monkeypatch.undo()
    assert elsewhere == columns()


def test_a_process_that_ends_before_its_time_is_an_error_that_says_what_to_do(many_processes, monkeypatch):
    monkeypatch.setattr("ferrum_jax.io.child._PROGRAM", "pass")
    with pytest.raises(OSError, match="ended before its time; start the job again"):
        columns()


def test_rows_read_ahead_by_a_process_equal_rows_read_here(many_processes, monkeypatch):
    rows = Rows(io.BytesIO(b"\n".join(LINES)), seed=3, defaults=DEFAULTS)
    here = [rows.read(index) for index in range(len(rows))]
    expected = rows.order.tolist()
    monkeypatch.setattr(read_ahead, "_MAX_AT_ONCE", 5)
    with rows.reading_ahead():
        rows.expect(expected[:12])
        rows.expect(expected[12:])
        asked = [*expected[3:6], *expected[:3], *expected[6:], *range(len(rows))]
        assert [rows.read(index) for index in asked] == [here[index] for index in asked]


def test_a_process_that_reads_ahead_and_ends_is_an_error_that_says_what_to_do(many_processes, monkeypatch):
    rows = Rows(io.BytesIO(LINES[0]))
    monkeypatch.setattr("ferrum_jax.io.child._PROGRAM", "pass")
    with pytest.raises(OSError, match="ended before its time; start the job again"), rows.reading_ahead():
        rows.expect([0])
        rows.read(0)
