"""Each row is in one part at a time, whatever is cut off, given back or taken over.

A row in progress goes on from all that it had: nothing of its choices is another after the journal.
"""

import dataclasses
import json

import numpy as np
import pytest

from ferrum_jax.batch.journal.leases import LeaseLost, Leases
from ferrum_jax.batch.journal.partials import decode_partial, encode_partial
from ferrum_jax.batch.journal.parts import JobParts
from ferrum_jax.core.outputs import Logprob
from ferrum_jax.io.files.store import LocalStore
from tests.batch.fake_llm import CHOICE

ROWS = [np.arange(0, 10), np.arange(10, 20)]


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def parts(store, worker: str, done: frozenset[int] = frozenset()) -> tuple[JobParts, Leases]:
    leases = Leases(store, worker, "l", expiry_s=1000.0)

    def unfinished(rows: np.ndarray) -> np.ndarray:
        return rows[~np.isin(rows, list(done))]

    return JobParts(ROWS, leases, unfinished=unfinished, refresh=lambda: None), leases


def test_what_a_worker_leaves_of_a_part_is_a_part_for_the_next(store):
    (one, _), (two, _) = parts(store, "one"), parts(store, "two")
    assert one.take(lambda num_open: num_open // 5) == ([0, 1, 2, 3], 1)
    assert two.num_open() == 16
    assert two.take(lambda num_open: 3) == ([4, 5, 6], 2)
    assert one.take(lambda num_open: 100) == ([7, 8, 9], 3)
    assert two.take(lambda num_open: 100) == (list(range(10, 20)), 1)
    assert one.take(lambda num_open: 100) == two.take(lambda num_open: 100) == ([], 0)


def test_rows_that_are_given_back_go_to_another_under_a_later_epoch(store):
    (one, _), (two, _) = parts(store, "one"), parts(store, "two", frozenset({0}))
    one.take(lambda num_open: 100)
    one.give(6)
    assert two.take(lambda num_open: 100) == ([6, 7, 8, 9], 3)
    one.give_all()
    assert two.take(lambda num_open: 100) == ([1, 2, 3, 4, 5], 4)


def test_a_worker_that_was_taken_for_dead_gives_nothing_away(store):
    (one, leases), (two, _) = parts(store, "one"), parts(store, "two")
    one.take(lambda num_open: 100)
    leases.leave()
    assert two.take(lambda num_open: 100) == (list(range(10)), 2)
    with pytest.raises(LeaseLost, match="another worker took over the rows of part 0"):
        one.give(5)
    assert parts(store, "three")[0].take(lambda num_open: 100)[0] == list(range(10, 20))


def test_a_journal_of_leases_that_were_never_cut_goes_on(store):
    older = Leases(store, "older", "l", expiry_s=1000.0)
    assert older.acquire("0") == 1
    one, _ = parts(store, "one", frozenset(range(5)))
    assert one.take(lambda num_open: 100)[0] == list(range(10, 20))
    older.leave()
    assert one.take(lambda num_open: 100) == ([5, 6, 7, 8, 9], 2)


@pytest.mark.parametrize("content", [b"one x", b"one -5", b"one " + b"9" * 200])
def test_a_damaged_lease_is_refused_with_what_it_holds(store, content):
    store.create("leases/l/0.1", content)
    with pytest.raises(OSError, match=r"the lease 0\.1 of the journal is damaged"):
        parts(store, "one")[0].num_open()


LOGPROBS = (
    {7: Logprob(logprob=-0.1 / 3, rank=1)},
    {9: Logprob(logprob=-1e-9, rank=1), 8: Logprob(logprob=-2.5, rank=40)},
)
RUNNING = dataclasses.replace(CHOICE, token_ids=(7, 8), logprobs=LOGPROBS, finish_reason=None)
ENDED = dataclasses.replace(
    RUNNING, index=1, text="ab\u2028", logprobs=None, finish_reason="stop", stop_reason=13, image_digests=("aa", "bb")
)


def test_choices_are_what_they_were_with_ranks_bits_reasons_and_images():
    choices = (RUNNING, ENDED, dataclasses.replace(ENDED, index=2, stop_reason="b", logprobs=(), image_digests=()))
    content = encode_partial(choices)
    assert decode_partial(content) == choices and b"\n" not in content


def test_of_a_choice_that_goes_on_the_text_is_made_again():
    found = decode_partial(encode_partial([dataclasses.replace(RUNNING, text="half")]))
    assert found == (RUNNING,) and "half" not in json.dumps(found[0].text)
