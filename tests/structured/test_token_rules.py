"""What a request allows and forbids of its tokens is taken out of masks, and an error says where nothing is left."""

import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.structured import token_rules
from ferrum_jax.text.structured.token_rules import TokenRules, allow
from tests.structured.vocabularies import demo_tokenizer

V = 100


def narrowed(sampling: SamplingParams, output=(), allowed: Iterable[int] = range(V), stops=frozenset({0})):
    mask = np.zeros(4, np.int32)
    allow(mask, list(allowed))
    fault = TokenRules(sampling, stops, demo_tokenizer()).narrow(mask, list(output))
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()), fault


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_masks_are_the_sets_that_they_stand_for(seed):
    rng = random.Random(seed)
    some, given_ids = (set(rng.sample(range(V), rng.randint(1, V))) for _ in range(2))
    never = set(rng.sample(range(V), 5))
    sampling = SamplingParams(allowed_token_ids=sorted(given_ids), logit_bias=dict.fromkeys(never, float("-inf")))
    left, fault = narrowed(sampling, allowed=some)
    assert left == (some & given_ids) - never and (fault is None) == bool(left)


def test_the_last_token_of_a_bad_word_is_forbidden_where_those_before_it_came():
    encode = demo_tokenizer().encode
    word = "sortedlist"
    tokens = encode(word, add_special_tokens=False)
    assert len(tokens) > 1
    rules = TokenRules(SamplingParams(bad_words=[word, "if"]), frozenset(), demo_tokenizer())
    size = demo_tokenizer().vocab_size
    masks = np.zeros((3, -(-size // 32)), np.int32)
    for mask, output in zip(masks, (tokens[:-1], [7, *tokens[:-1]], tokens[:-2]), strict=True):
        allow(mask, range(size))
        assert rules.narrow(mask, output) is None
    allowed = [np.unpackbits(mask.view(np.uint8), bitorder="little")[tokens[-1]] for mask in masks]
    assert allowed == [0, 0, 1]
    singles = [ids[0] for ids in (encode("if", add_special_tokens=False), encode(" if", add_special_tokens=False))]
    assert all(not np.unpackbits(mask.view(np.uint8), bitorder="little")[singles].any() for mask in masks)


def test_end_tokens_come_before_min_tokens_only_where_nothing_else_may():
    early = SamplingParams(allowed_token_ids=[0, 5], min_tokens=3)
    assert narrowed(early) == ({5}, None) and narrowed(early, [5, 5, 5]) == ({0, 5}, None)
    assert narrowed(SamplingParams(allowed_token_ids=[0], min_tokens=3)) == ({0}, None)


def test_rules_that_leave_nothing_are_named():
    sampling = SamplingParams(allowed_token_ids=[5], logit_bias={5: float("-inf")})
    assert narrowed(sampling)[1] == "allowed_token_ids and logit_bias forbid every token that may come here"


def test_bad_words_need_a_tokenizer():
    with pytest.raises(ValueError, match="bad_words needs a tokenizer"):
        TokenRules(SamplingParams(bad_words=["a"]), frozenset(), None)


def test_long_lists_are_read_once_and_not_at_each_token(monkeypatch):
    """The tokens that a mask is made of, counted: those of lists at the first token, then those that output decides."""
    counted = []
    plain_allow, plain_forbid = token_rules.allow, token_rules.forbid
    monkeypatch.setattr(token_rules, "allow", lambda mask, ids: counted.append(len(ids)) or plain_allow(mask, ids))
    monkeypatch.setattr(token_rules, "forbid", lambda mask, ids: counted.append(len(ids)) or plain_forbid(mask, ids))
    bias = dict.fromkeys(range(50, 90), float("-inf"))
    words = [chr(97 + i) for i in range(20)] + ["sortedlist"]
    sampling = SamplingParams(allowed_token_ids=range(90), logit_bias=bias, bad_words=words)
    rules = TokenRules(sampling, frozenset(), demo_tokenizer())
    rules.narrow(np.full(150, -1, np.int32), [])
    assert sum(counted) > 120
    counted.clear()
    for length in range(20):
        rules.narrow(np.full(150, -1, np.int32), list(range(length)))
    assert sum(counted) <= 20
