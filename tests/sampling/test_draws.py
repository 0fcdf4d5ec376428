"""What serves rows that ask for little draws what the whole of sampling draws, bit for bit, without branch or loop."""

import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.core.plan import Draw
from ferrum_jax.runtime.sampling import draw_of, drawn
from ferrum_jax.sampling_params import SamplingParams
from tests.sampling.rows import ROWS, Row, V, pool_of, random_logits, step

R = 8  # of them, and padding to the rows that other tests compile
compiled = {draw: jax.jit(functools.partial(drawn, draw=draw)) for draw in (Draw.GREEDY, Draw.PLAIN)}
greedy = st.just(SamplingParams(temperature=0.0))
plain = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 5.0]),
    logprobs=st.sampled_from([None, 0]),
)


def rows_of(asked: st.SearchStrategy[SamplingParams]) -> st.SearchStrategy[list[Row]]:
    ids = st.lists(st.integers(0, V - 1), max_size=5).map(tuple)
    row = st.builds(
        Row, sampling=asked, output=ids, seed=st.integers(-(2**63), 2**63 - 1), choice=st.integers(0, 3), active=...
    )
    return st.lists(row, min_size=R, max_size=R)


@pytest.mark.parametrize(("draw", "asked"), [(Draw.GREEDY, greedy), (Draw.PLAIN, plain)])
def test_the_least_that_serves_all_rows_draws_the_bits_of_what_serves_any(draw, asked):
    @given(rows=rows_of(asked), seed=st.integers(0, 5), damage=st.sampled_from([None, np.nan, np.inf]))
    @settings(max_examples=40, deadline=None)
    def check(rows, seed, damage):
        assert max(draw_of(row.sampling) for row in rows) <= draw
        logits = random_logits(ROWS, V, seed)
        logits[:, :9] = np.round(logits[:, :9])  # equal ones
        if damage is not None:
            logits[seed, 7] = damage
        slots, positions, active = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32), np.zeros(ROWS, bool)
        slots[:R] = np.arange(1, R + 1)
        positions[:R], active[:R] = ([getattr(row, name) for row in rows] for name in ("position", "active"))
        given = logits, pool_of(rows, slots[:R].tolist()), slots, positions, active
        np.testing.assert_array_equal(compiled[draw](*given), step(*given).result)

    check()


@pytest.mark.parametrize(
    ("wishes", "draw"),
    [
        ({"temperature": 0.0}, Draw.GREEDY),
        ({"temperature": 0.0, "top_k": 5, "min_tokens": 0}, Draw.GREEDY),
        ({"temperature": 0.0, "logprobs": 0}, Draw.PLAIN),
        ({"seed": 3}, Draw.PLAIN),
        ({"logprobs": 1}, Draw.FULL),
        ({"top_p": 0.9}, Draw.FULL),
        ({"temperature": 0.0, "min_tokens": 2}, Draw.FULL),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, Draw.FULL),
        ({"temperature": 0.0, "structured_outputs": {"regex": "a+"}}, Draw.FULL),
    ],
    ids=str,
)
def test_the_host_knows_what_a_request_asks_of_its_draws(wishes, draw):
    assert draw_of(SamplingParams(**wishes)) == draw


@pytest.mark.parametrize("draw", [Draw.GREEDY, Draw.PLAIN])
def test_what_serves_little_has_neither_branches_nor_loops(draw):
    none = np.zeros(ROWS, np.int32)
    given = random_logits(ROWS, V), pool_of([], []), none, none, none > 0
    text = compiled[draw].lower(*given).compile().as_text()
    assert re.search(r" fusion\(", text) and not re.findall(r" (?:while|conditional)\(", text)
