"""Vectors and scores of an encoder over HTTP are those of LLM.embed; tests/openai has what each body is answered."""

import base64

import numpy as np
import pytest

from ferrum_jax.serve.http.settings import ServerSettings
from tests.openai.asked import TEXTS
from tests.openai.sections import embedder
from tests.serve.running import running


@pytest.fixture(scope="module")
def llm():
    return embedder()


@pytest.fixture(scope="module")
def vectors(llm):
    """The vectors of the texts under a prompt."""
    return lambda name=None: np.stack([found.embedding for found in llm.embed(TEXTS, prompt_name=name)])


@pytest.fixture(scope="module")
def server(llm, vectors):
    vectors()
    with running(ServerSettings(names=("small",)), inner=llm) as found:
        yield found


def test_vectors_come_as_numbers_and_base64_whole_and_cut(client, vectors):
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


def test_an_embedder_says_what_it_was_made_for(server):
    assert server.ask("/v1/models/small")[2]["made_for"] == ["embed"]
    assert "warning" not in server.ask("/v1/embeddings", {"input": "x"})[1]
