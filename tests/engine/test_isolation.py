"""What separates cached prefixes end to end: salts and media."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.inputs.prompt import MediaSpan
from tests.support import fresh_engine, small_llm

GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
IDS = np.random.default_rng(5).integers(6, 250, 70).tolist()


@pytest.fixture
def llm(monkeypatch):
    llm = small_llm("qwen3")
    monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm))
    return llm


def cached(llm, params=GREEDY, **fields) -> tuple[int, int]:
    (output,) = llm.generate({"prompt_token_ids": IDS, **fields}, params, progress=False)
    assert output.prompt_token_ids == tuple(IDS[-(params.truncate_prompt_tokens or 0) :])
    return output.num_cached_tokens, output.num_cached_media


def test_prompts_of_different_salts_share_nothing_and_those_of_one_salt_share(llm):
    salts = ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    assert [cached(llm, **salt) for salt in salts] == [(0, 0)] * 3
    assert [cached(llm, **salt) for salt in salts] == [(70, 0)] * 3


def span(digest: bytes, start: int, length: int) -> MediaSpan:
    return MediaSpan(kind="image", digest=digest, start=start, length=length)


def test_an_item_counts_as_cached_only_if_it_lies_wholly_inside(llm):
    items = [span(b"a", 0, 10), span(b"b", 10, 22), span(b"c", 40, 30)]
    assert cached(llm, media=items) == (0, 0)
    assert cached(llm, media=items) == (70, 3), "the prompt is cached as a whole"
    assert cached(llm, media=[*items[:2], span(b"d", 40, 30)]) == (32, 2)
    assert cached(llm, media=[items[0], span(b"e", 10, 22), items[2]]) == (0, 0)
    assert cached(llm) == (0, 0), "text alone is other content"


def test_an_item_that_ends_in_a_partial_tail_is_computed_where_prompts_are_not_kept(llm, monkeypatch):
    monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm, max_cached_prompts=0))
    items = [span(b"a", 0, 10), span(b"b", 10, 22), span(b"c", 40, 30)]
    assert [cached(llm, media=items) for _ in range(2)] == [(0, 0), (64, 2)]


def test_spans_move_with_a_prompt_that_is_cut_at_its_start(llm):
    cut = dataclasses.replace(GREEDY, truncate_prompt_tokens=50)
    assert cached(llm, cut, media=[span(b"a", 0, 20), span(b"b", 25, 10)]) == (0, 0)
    assert cached(llm, cut, media=[span(b"b", 25, 10)]) == (50, 1)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        (span(b"a", 65, 6), "the image at tokens 65 to 70 ends beyond the prompt of 70 tokens"),
        (span(b"a", 18, 6), "truncate_prompt_tokens cuts the image at tokens 18 to 23 in two"),
    ],
)
def test_a_span_that_does_not_fit_is_refused_and_nothing_is_left(llm, media, message):
    with pytest.raises(ValueError, match=message):
        cached(llm, dataclasses.replace(GREEDY, truncate_prompt_tokens=50), media=[media])
    assert not llm.engine.has_unfinished
