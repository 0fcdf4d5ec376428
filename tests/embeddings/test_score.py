"""LLM.score: models that read two texts together give sentence-transformers' scores."""

import asyncio
import functools
import json

import numpy as np
import pytest

from ferrum_jax import LLM, AsyncLLM, EngineConfig
from ferrum_jax.io.files.json_files import read_json
from ferrum_jax.models.families import registry
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
    engine = AsyncLLM.over(llm)
    with pytest.raises(ValueError, match="prompt 1: the pair is 'ab'; it must be two texts"):
        asyncio.run(engine.score([pairs[0], "ab"]))
    engine.close()
    found = dict(llm.score_as_completed(iter([("good", pairs[2]), ("bad", ["x", 5])])))
    assert abs(found["good"].score - wanted[2]) < 1e-5 and "must be two texts" in str(found["bad"])


def test_vllms_form_scores_a_query_beside_each_document_or_as_many():
    llm, (pairs, _) = cross_encoder("bert"), golden("bert")
    (query, first), (other, second) = pairs[:2]
    wanted = [output.score for output in llm.score([(query, first), (query, second), (other, second)])]
    assert [output.score for output in llm.score(query, [first, second])] == wanted[:2]
    assert [output.score for output in llm.score([query, other], [first, second], use_tqdm=False)] == wanted[::2]
    with pytest.raises(ValueError, match="2 queries and 3 documents are given; give one query, or one for each"):
        llm.score(["a", "b"], ["c", "d", "e"])


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_methods_of_vllm_that_are_not_here_say_what_to_use(kind):
    with pytest.raises(AttributeError, match=f"{kind.__name__} has no encode, .*: embed gives vectors"):
        kind.encode  # noqa: B018
    assert not hasattr(kind, "beam_search") and not hasattr(kind, "get_metrics")


def test_a_model_that_scores_makes_no_vectors_and_one_of_vectors_compares_them():
    with pytest.raises(ValueError, match=r"scores texts and makes no vectors; ask LLM\.score"):
        cross_encoder("bert").embed("x")
    llm, texts = LLM(str(GOLDENS / "encoders" / "bert"), CONFIG), ["a block", "keys of a row", "a block"]
    one, other, _ = llm.embed(texts)
    pairs = [("a block", "a block"), ("a block", "keys of a row"), {"query": texts[1], "document": texts[0]}]
    found = llm.score(pairs)
    cosine = float(one.embedding @ other.embedding)
    np.testing.assert_allclose([each.score for each in found], [1, cosine, cosine], atol=1e-6)
    lengths = len(one.prompt_token_ids), len(other.prompt_token_ids)
    read = [len(each.prompt_token_ids) for each in found]
    assert read == [2 * lengths[0], sum(lengths), sum(lengths)]
    ranked, again = (llm.score([{**pairs[2], **more}]) for more in ({"ranks": True}, {"query_counts": False}))
    assert len(again[0].prompt_token_ids) == lengths[0]
    query, document = (
        llm.embed({"prompt": text, "prompt_name": name})[0].embedding
        for text, name in ((texts[1], "query"), (texts[0], "document"))
    )
    np.testing.assert_allclose(ranked[0].score, query @ document, atol=1e-6)
    refused = dict(llm.score_as_completed(enumerate(["ab", ("a", "b"), {**pairs[2], "instruction": "i"}, {"x": 1}])))
    assert [type(refused[place]) for place in range(4)] == [ValueError, type(found[0]), ValueError, ValueError]
    assert "must be two texts" in str(refused[0]) and "models that score pairs" in str(refused[2])


def test_what_a_cross_encoder_is_asked_to_be_beyond_one_score_is_refused():
    config = read_json(SCORERS / "bert" / "config.json")
    change = {"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}}
    with pytest.raises(ValueError, match=r"activation of scores is 'torch\.nn\.ReLU'"):
        registry.encoder_spec_of(config | change)
    assert registry.encoder_spec_of(config | {"id2label": {"0": "no", "1": "yes"}}).scorer == "", "it classifies"
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
