"""LLM.score of models that generate: sentence-transformers' scores of a LogitScore, and scores of plain folders."""

import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest

from checkpoints.folder import copy_companions
from checkpoints.sentence import read_sentence_layout
from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.tasks.logit_scorer import TokenLogits
from tests.support import COMPILED, GOLDENS, INVARIANT

FOLDER = GOLDENS / "scorers" / "qwen3"
CONFIG = dataclasses.replace(INVARIANT, max_model_len=40)
GOLDEN = json.loads((FOLDER / "golden.json").read_text())
PAIRS = GOLDEN["pairs"]


@functools.cache
def reranker() -> LLM:
    return LLM(str(FOLDER), CONFIG)


def scores(outputs) -> list[float]:
    return [output.score for output in outputs]


def test_pairs_have_the_references_scores_those_that_are_too_long_as_well():
    found = reranker().score(PAIRS, truncate=True)
    np.testing.assert_allclose(scores(found), GOLDEN["scores"], rtol=1e-5, atol=1e-5)
    assert [len(output.prompt_token_ids) for output in found[3:]] == [40, 40]
    told = reranker().score(PAIRS[:3], instruction="the quick answer")
    np.testing.assert_allclose(scores(told), GOLDEN["told"], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="prompt 3: the pair has 57 tokens; it must have 1 to 40"):
        reranker().score(PAIRS)


def test_it_generates_as_before_and_other_weights_score_otherwise():
    llm = LLM(str(FOLDER), CONFIG)
    before = scores(llm.score(PAIRS[:2]))
    assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, temperature=0.0))[0].token_ids
    names = list(llm.loaded.layout.targets)
    weights = {name: np.asarray(array) * 1.25 for name, array in zip(names, llm.loaded.weights, strict=True)}
    llm.update_weights(weights)
    after = scores(llm.score(PAIRS[:2]))
    head = np.asarray(weights["embed.weight"])
    for pair, score in zip(PAIRS[:2], after, strict=True):
        ids = llm.model.opened.scorer.request(pair, truncate=False).token_ids  # type: ignore[union-attr]
        (vector,) = llm.embed([ids])
        logits = head[[49, 50]] @ vector.embedding
        assert abs(score - 1 / (1 + np.exp(logits[1] - logits[0]))) < 1e-6
    assert np.abs(np.subtract(before, after)).max() > 1e-3


@pytest.mark.slow
def test_a_plain_folder_scores_through_the_published_prompt_where_tokens_are_named(tmp_path):
    for file in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        shutil.copyfile(FOLDER / file, tmp_path / file)
    config = dataclasses.replace(CONFIG, max_model_len=128, score_tokens="yes, no")
    llm = LLM(str(tmp_path), config)
    np.testing.assert_allclose(scores(llm.score(PAIRS[:3])), GOLDEN["published"], rtol=1e-5, atol=1e-5)
    plain = LLM(str(tmp_path), dataclasses.replace(config, score_tokens=None))
    with pytest.raises(ValueError, match="or score_tokens='yes,no' for a reranker that generates"):
        plain.score(PAIRS[:1])


def test_what_cannot_score_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="score_tokens is 'yes,'; it must be one token or two"):
        EngineConfig(score_tokens="yes,")
    with pytest.raises(ValueError, match=r"score_tokens is 'yes,no no', whose texts have \[1, 2\] tokens"):
        LLM(str(FOLDER), dataclasses.replace(CONFIG, score_tokens="yes,no no"))
    copy_companions(FOLDER, tmp_path)
    shutil.copyfile(FOLDER / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match="chat template does not write messages of the roles 'query' and 'document'"):
        LLM(str(tmp_path), CONFIG)
    (tmp_path / "1_LogitScore" / "config.json").write_text('{"true_token_id": "yes"}')
    with pytest.raises(ValueError, match="true_token_id must be a token id"):
        read_sentence_layout(tmp_path)
    with pytest.raises(ValueError, match="a cross-encoder is told nothing beside the pair"):
        config = EngineConfig(max_model_len=40, compilation_cache_dir=str(COMPILED))
        LLM(str(GOLDENS / "scorers" / "bert"), config).score(PAIRS[:1], instruction="x")


def test_logits_have_the_models_scale_cap_and_bias():
    rows, state = np.asarray([[1.0, 2.0], [3.0, -1.0]], np.float32), np.asarray([2.0, 1.0], np.float32)
    logits = TokenLogits(rows=rows, scale=0.5, cap=3.0)(state)
    np.testing.assert_allclose(logits, 3.0 * np.tanh(np.asarray([2.0, 2.5]) / 3.0))
    biased = TokenLogits(rows=rows, scale=0.5, cap=None, bias=np.asarray([1.0, -2.0], np.float32))
    np.testing.assert_allclose(biased(state), [2.5, 1.5])
