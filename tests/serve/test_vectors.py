"""Vectors and scores of an encoder over HTTP are those of LLM.embed; bodies that are wrong name their field."""

from __future__ import annotations

import base64
import functools

import numpy as np
import openai
import pytest

from ferrum_jax import LLM, EngineConfig
from ferrum_jax.openai.asked import BodyLimits
from ferrum_jax.openai.bodies import asked_scores, asked_vectors
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.serve.http.settings import ServerSettings
from tests.serve.running import running
from tests.support import COMPILED, GOLDENS

ENCODER = EngineConfig(
    max_model_len=64, max_num_seqs=8, max_num_batched_tokens=128, compilation_cache_dir=str(COMPILED)
)
TEXTS = ["a block holds keys", "tokens of a row", "another text"]


@pytest.fixture(scope="module")
def llm():
    return LLM(str(GOLDENS / "encoders" / "bert"), ENCODER)


@pytest.fixture(scope="module")
def vectors(llm):
    """The vectors of the texts under a prompt."""
    return lambda name=None: np.stack([found.embedding for found in llm.embed(TEXTS, prompt_name=name)])


@pytest.fixture(scope="module")
def server(llm, vectors):
    vectors()
    with running(ServerSettings(names=("small",)), encoder=llm) as found:
        yield found


def test_vectors_come_as_numbers_and_base64_whole_and_cut(server, vectors):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        wanted = vectors()
        found = client.embeddings.create(model="small", input=TEXTS, encoding_format="float").data
        np.testing.assert_allclose([each.embedding for each in found], wanted, atol=1e-5)
        assert [each.index for each in found] == [0, 1, 2]
        cut = wanted[:, :5] / np.linalg.norm(wanted[:, :5], axis=1, keepdims=True)
        found = client.embeddings.create(model="small", input=TEXTS, dimensions=5, encoding_format="base64").data
        values = [np.frombuffer(base64.b64decode(each.embedding), "<f4") for each in found]
        np.testing.assert_allclose(values, cut, atol=1e-5)
        one = client.embeddings.create(model="small", input=[5, 6, 7], encoding_format="float")
        assert len(one.data) == 1 and one.usage.prompt_tokens == 3
    status, _, found = server.ask("/v1/embeddings", {"input": "x", "dimensions": 4096})
    assert status == 400 and f"the model's vectors have {wanted.shape[1]}" in found["error"]["message"]


def test_a_score_is_the_cosine_of_two_vectors(server, vectors):
    wanted = vectors() @ vectors().T
    status, _, found = server.ask("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS})
    assert status == 200 and [each["index"] for each in found["data"]] == [0, 1, 2]
    np.testing.assert_allclose([each["score"] for each in found["data"]], wanted[0], atol=1e-5)
    found = server.ask("/score", {"text_1": TEXTS, "text_2": TEXTS[::-1]})[2]
    np.testing.assert_allclose([each["score"] for each in found["data"]], np.diag(wanted[:, ::-1]), atol=1e-5)
    assert found["usage"]["prompt_tokens"] > 0


def test_documents_are_ranked_with_the_prompts_of_the_checkpoint(server, llm, vectors):
    prompts = llm.model.embedder.layout.prompts
    query = vectors("query" if "query" in prompts else None)[1]
    scores = vectors("document" if "document" in prompts else None) @ query
    asked = {"query": TEXTS[1], "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    status, _, found = server.ask("/v1/rerank", asked)
    order = np.argsort(-scores)
    assert status == 200 and [each["index"] for each in found["results"]] == order.tolist()
    np.testing.assert_allclose([each["relevance_score"] for each in found["results"]], scores[order], atol=1e-5)
    assert found["results"][0]["document"] == {"text": TEXTS[order[0]]}
    (best,) = server.ask("/v2/rerank", {**asked, "top_n": 1, "return_documents": False})[2]["results"]
    assert best["index"] == order[0] and "document" not in best


@pytest.mark.slow
def test_a_cross_encoder_scores_and_ranks_pairs():
    folder = GOLDENS / "scorers" / "bert"
    llm = LLM(str(folder), EngineConfig(max_model_len=40, compilation_cache_dir=str(COMPILED)))
    query, documents = "the quick fox", ["a lazy dog", "a fox jumps over the dog", "keys and values"]
    wanted = [output.score for output in llm.score([(query, document) for document in documents])]
    with running(ServerSettings(names=("small",)), encoder=llm) as server:
        found = server.ask("/v1/score", {"text_1": query, "text_2": documents})[2]
        np.testing.assert_allclose([each["score"] for each in found["data"]], wanted, atol=1e-6)
        ranked = server.ask("/v1/rerank", {"query": query, "documents": documents, "top_n": 2})[2]["results"]
        assert [each["index"] for each in ranked] == np.argsort(wanted)[::-1][:2].tolist()
        status, _, found = server.ask("/v1/score", {"text_1": query, "text_2": "keys " * 60})
        assert status == 400 and "truncate=True" in found["error"]["message"]
        status, _, found = server.ask("/v1/embeddings", {"input": query})
        assert status == 400 and "makes no vectors" in found["error"]["message"]


def test_an_embedder_says_what_it_was_made_for(server):
    assert server.ask("/v1/models/small")[2]["made_for"] == ["embed"]
    assert "warning" not in server.ask("/v1/embeddings", {"input": "x"})[1]


def test_what_generates_is_not_there(server):
    status, _, found = server.ask("/v1/completions", {"prompt": "x"})
    assert status == 400 and "/v1/embeddings" in found["error"]["message"]


asked_score, asked_ranking = (functools.partial(asked_scores, ranks=ranks) for ranks in (False, True))
WRONG = [
    (asked_vectors, {"input": "x", "dimensions": 0}, "dimensions"),
    (asked_vectors, {"input": "x", "dimensions": True}, "dimensions"),
    (asked_vectors, {"input": "x", "pooling": ["mean"]}, "pooling"),
    (asked_vectors, {"input": "x", "prompt_name": {}}, "prompt_name"),
    (asked_vectors, {"input": "x", "encoding_format": "hex"}, "encoding_format"),
    (asked_vectors, {"input": [["x"]]}, "input[0]"),
    (asked_vectors, {"input": {"text": "x"}}, "input"),
    (asked_score, {"text_1": "x"}, "text_2"),
    (asked_score, {"text_1": ["x", "y"], "text_2": ["x"]}, "text_1"),
    (asked_score, {"text_1": "x", "text_2": ["x", 5]}, "text_2[1]"),
    (asked_score, {"text_1": "", "text_2": "x"}, "text_1"),
    (asked_score, {"text_1": "x", "text_2": "y", "cache_salt": 5}, "cache_salt"),
    (asked_score, {"text_1": "x", "text_2": "y", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    (asked_ranking, {"query": "x", "documents": "y"}, "documents"),
    (asked_ranking, {"query": "x", "documents": [{"title": "y"}]}, "documents[0]"),
    (asked_ranking, {"query": "x", "documents": []}, "documents"),
    (asked_ranking, {"query": ["x"], "documents": ["y"]}, "query"),
    (asked_ranking, {"query": "x", "documents": ["y"], "top_n": 0}, "top_n"),
    (asked_ranking, {"query": "x", "documents": ["y"], "return_documents": 1}, "return_documents"),
    (asked_ranking, {"query": "x", "documents": ["y"], "model": 5}, "model"),
]


@pytest.mark.parametrize(("read", "body", "param"), WRONG, ids=lambda each: "" if callable(each) else str(each))
def test_an_error_names_the_field(read, body, param):
    with pytest.raises(FieldError) as found:
        read(body, BodyLimits())
    assert found.value.param == param, found.value
