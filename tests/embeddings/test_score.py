"""LLM.score: models that read two texts together give sentence-transformers' scores."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

from ferrum_jax import LLM, EngineConfig
from ferrum_jax.files.json_files import read_json
from ferrum_jax.models import registry
from ferrum_jax.text.tokenizer import Tokenizer
from tests.support import COMPILED, GOLDENS

SCORERS = GOLDENS / "scorers"
CONFIG = EngineConfig(max_model_len=40, compilation_cache_dir=str(COMPILED))


@functools.cache
def cross_encoder(name: str) -> LLM:
    return LLM(str(SCORERS / name), CONFIG)


def golden(name: str) -> tuple[list[list[str]], list[float]]:
    found = json.loads((SCORERS / name / "golden.json").read_text())
    return found["pairs"], found["scores"]


@pytest.mark.parametrize("name", ["bert", pytest.param("xlm_roberta", marks=pytest.mark.slow)])
def test_pairs_have_the_references_scores_those_that_are_too_long_as_well(name):
    pairs, wanted = golden(name)
    found = cross_encoder(name).score(pairs, truncate=True)
    np.testing.assert_allclose([output.score for output in found], wanted, rtol=1e-5, atol=1e-5)
    assert [len(output.prompt_token_ids) for output in found[3:]] == [40, 40]


def test_a_pair_that_is_too_long_or_none_is_refused_by_its_place():
    llm, (pairs, wanted) = cross_encoder("bert"), golden("bert")
    with pytest.raises(ValueError, match=r"prompt 1: the pair has \d+ tokens; it must have 1 to 40"):
        llm.score([pairs[0], pairs[3]])
    with pytest.raises(ValueError, match="prompt 0: the pair is 'ab'; it must be two texts"):
        llm.score(["ab"])
    found = dict(llm.score_as_completed(iter([("good", pairs[2]), ("bad", ["x", 5])])))
    assert abs(found["good"].score - wanted[2]) < 1e-5 and "must be two texts" in str(found["bad"])


def test_a_model_that_scores_makes_no_vectors_and_one_of_vectors_does_not_score():
    with pytest.raises(ValueError, match=r"scores pairs of texts and makes no vectors; ask LLM\.score"):
        cross_encoder("bert").embed("x")
    vectors = LLM(str(GOLDENS / "encoders" / "bert"), CONFIG)
    with pytest.raises(ValueError, match=r"BertModel does not read two texts together; compare vectors of LLM\.embed"):
        vectors.score([("a", "b")])


def test_what_a_cross_encoder_is_asked_to_be_beyond_one_score_is_refused():
    config = read_json(SCORERS / "bert" / "config.json")
    for change, message in (
        ({"id2label": {"0": "no", "1": "yes"}}, "the model has 2 labels; pairs are scored by models with one"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}}, "activation of scores is 'torch.nn.ReLU'"),
    ):
        with pytest.raises(ValueError, match=message):
            registry.encoder_spec_of(config | change)
    plain = {key: value for key, value in config.items() if key != "sentence_transformers"}
    assert registry.encoder_spec_of(config).scorer == "identity"
    assert registry.encoder_spec_of(plain).scorer == "sigmoid"


def test_two_texts_are_cut_at_their_ends_the_longer_one_first():
    tokenizer = Tokenizer.load(SCORERS / "bert")
    assert tokenizer is not None
    short, long = "keys of a block", "the quick brown fox jumps over the lazy dog"
    whole, second = tokenizer.encode_pair(short, long)
    assert whole.index(3) == 5 and second == 6  # [SEP] after four words
    cut, second = tokenizer.encode_pair(short, long, max_tokens=12)
    assert len(cut) == 12 and second == 6 and cut[:6] == whole[:6] and cut[6:-1] == whole[6:11]
    cut, second = tokenizer.encode_pair(long, long, max_tokens=10)
    assert len(cut) == 10 and second == 5  # three words of the first, four of the second
