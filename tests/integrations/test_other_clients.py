"""LangChain's and LiteLLM's clients against `ferrum-jax serve` with the demo model.

They run in an environment of their own, for LiteLLM wants an older `openai` than the tests do: `scripts/test -m
clients` makes .venv-clients with langchain-openai and litellm. CLIENTS_PYTHON names another interpreter that has both.
"""

import json
import os
import subprocess

import numpy as np
import pytest

from ferrum_jax import LLM, SamplingParams
from tests.serve.running import DEMO, DEMO_SIZES, serving_demo
from tests.support import COMPILED, ROOT

pytestmark = pytest.mark.clients
PYTHON = os.environ.get("CLIENTS_PYTHON", str(ROOT / ".venv-clients" / "bin" / "python"))
CALLED = ["Sure.", "go", {"to": "Rom"}]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the clients were given, the texts of a completion and a chat, and two vectors, as LLM has them."""
    folder = tmp_path_factory.mktemp("texts")
    with serving_demo(folder) as url:
        llm = LLM(DEMO, **DEMO_SIZES, tokenizer=str(folder), compilation_cache_dir=str(COMPILED))
        greedy = SamplingParams(max_tokens=12, temperature=0.0)
        (completion,) = llm.generate(["def main():"], greedy)
        (chat,) = llm.chat([{"role": "user", "content": "Go?"}], greedy)
        vectors = [output.embedding for output in llm.embed(["def main():", "x"])]
        program = str(ROOT / "tests" / "integrations" / "other_clients.py")
        done = subprocess.run([PYTHON, program, url, "none"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), completion, chat, vectors


def test_langchain_gets_texts_streams_calls_structures_and_vectors(found):
    said, completion, chat, vectors = found[0]["langchain"], *found[1:]
    texts = {said[name] for name in ("chat", "streamed", "async")}
    assert texts | set(said["batch"]) == {chat.text}
    for usage in (said["usage"], said["streamed_usage"]):
        assert (usage["input_tokens"], usage["output_tokens"]) == (len(chat.prompt_token_ids), len(chat.token_ids))
    assert said["calls"] == said["streamed_calls"] == CALLED and said["goes_on"]
    assert set(said["structured"]) <= {"yes", "no"}
    assert said["responses"] == said["responses_streamed"] and said["responses"].startswith(chat.text)
    assert said["completion"] == said["completion_streamed"] == completion.text
    np.testing.assert_allclose(said["vectors"], vectors, rtol=1e-4, atol=1e-4)


def test_litellm_gets_texts_streams_calls_structures_and_vectors(found):
    said, completion, chat, vectors = found[0]["litellm"], *found[1:]
    assert {said[name] for name in ("chat", "streamed", "async", "vllm")} == {chat.text}
    assert said["usage"] == len(chat.prompt_token_ids) + len(chat.token_ids)
    assert said["calls"] == said["streamed_calls"] == CALLED
    assert said["structured"] in ("yes", "no")
    assert said["responses"].startswith(chat.text)
    assert said["completion"] == completion.text
    assert said["error"] == "ContextWindowExceededError"
    np.testing.assert_allclose(said["vectors"], vectors, rtol=1e-4, atol=1e-4)
