"""LLM.embed: encoders and models that generate give the reference's vectors, as their checkpoints say them."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from ferrum_jax import LLM, EngineConfig
from tests.support import COMPILED, GOLDENS, small_llm

ENCODER = EngineConfig(
    max_model_len=64, max_num_seqs=32, max_num_batched_tokens=512, compilation_cache_dir=str(COMPILED)
)
INVARIANT = {"invariant": True, "max_num_batched_tokens": 64}
WORDS = "a block holds the keys and values of its tokens"


@functools.cache
def encoder() -> LLM:
    """The golden folder that sentence-transformers would read: mean, normalised, prompts."""
    return LLM(str(GOLDENS / "encoders" / "bert"), ENCODER)


def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / name / "golden.npz"))


def vectors(outputs) -> np.ndarray:
    return np.stack([output.embedding for output in outputs])


def test_an_encoders_vectors_are_the_references_pooled_and_normalised_as_its_folder_says():
    llm, arrays = encoder(), golden("encoders/bert")
    texts = [arrays[f"prompt_{i}"].tolist() for i in range(7)]
    wanted = np.stack([arrays[f"mean_{i}"] for i in range(7)])
    found = llm.embed(texts)
    assert found[3].embedding.dtype == np.float32 and found[3].prompt_token_ids == tuple(texts[3])
    unit = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors(found), unit, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vectors(llm.embed(texts, normalize=False)), wanted, rtol=1e-5, atol=1e-5)
    cls = np.stack([arrays[f"cls_{i}"] for i in range(7)])
    np.testing.assert_allclose(vectors(llm.embed(texts, pooling="cls", normalize=False)), cls, rtol=1e-5, atol=1e-5)
    stats = llm.stats()
    assert stats["compiles_after_ready"] == 0 and stats["steps"] > 0 and stats["kv_bytes"] == 0


def test_texts_get_their_special_tokens_and_the_prompt_that_is_named():
    llm = encoder()
    plain, named = llm.embed(WORDS)[0], llm.embed([WORDS], prompt_name="query")[0]
    assert plain.prompt == WORDS and len(plain.prompt_token_ids) == 12  # ten words, [CLS], [SEP]
    assert named.prompt_token_ids[:2] == (plain.prompt_token_ids[0], llm.embed("query")[0].prompt_token_ids[1])
    assert llm.embed("query: " + WORDS)[0].prompt_token_ids == named.prompt_token_ids


def test_a_text_that_is_too_long_is_refused_or_cut_before_its_last_special_token():
    llm = encoder()
    long = " ".join([WORDS] * 10)
    with pytest.raises(ValueError, match="prompt 1: the text has 102 tokens; it must have 1 to 64"):
        llm.embed([WORDS, long])
    cut = llm.embed(long, truncate=True)[0].prompt_token_ids
    assert len(cut) == 64 and cut[-1] == llm.embed(WORDS)[0].prompt_token_ids[-1]
    assert len(llm.embed([[5] * 70], truncate=True)[0].prompt_token_ids) == 64


def test_a_stream_of_texts_gives_each_its_vector_or_its_error():
    llm = encoder()
    requests = [
        ("good", WORDS),
        ("bad", [1000]),
        ("odd", 7),
        ("chat", [{"role": "user", "content": "x"}]),
        ("end", "a"),
    ]
    found = dict(llm.embed_as_completed(iter(requests)))
    assert found.keys() == {key for key, _ in requests}
    assert "token ids are 0 to 89" in str(found["bad"]) and "must be a string" in str(found["odd"])
    assert "chat messages" in str(found["chat"])
    np.testing.assert_array_equal(found["good"].embedding, llm.embed(WORDS)[0].embedding)


def test_an_encoder_refuses_to_generate_and_what_it_does_not_know():
    llm = encoder()
    with pytest.raises(ValueError, match="BertModel is an encoder and generates nothing"):
        llm.generate(WORDS)
    with pytest.raises(ValueError, match="pooling is 'max'; this model's is one of"):
        llm.embed(WORDS, pooling="max")
    with pytest.raises(ValueError, match=r"is 'title'; the checkpoint's prompts are \['document', 'query'\]"):
        llm.embed(WORDS, prompt_name="title")


def test_a_model_that_generates_embeds_by_its_last_token_with_reuse_and_beside_other_requests():
    llm, arrays = small_llm("qwen3"), golden("qwen3")
    texts = [arrays[f"prompt_{i}"].tolist() for i in (2, 3)]
    wanted = np.stack([arrays[f"norm_{i}"][-1] for i in (2, 3)])
    first, again = llm.embed(texts), llm.embed([*texts, [7] * 40])[:2]
    scale = np.max(np.abs(wanted))
    np.testing.assert_allclose(vectors(first) / scale, wanted / scale, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vectors(again) / scale, wanted / scale, rtol=1e-5, atol=1e-5)
    assert all(output.num_cached_tokens > 0 for output in again)
    with pytest.raises(ValueError, match=r"one of \('last',\): of a model that generates the last token's state alone"):
        llm.embed(texts, pooling="mean")
    assert np.allclose(np.linalg.norm(llm.embed(texts, normalize=True)[1].embedding), 1)


@pytest.mark.slow
def test_in_invariant_mode_neither_reuse_nor_companions_change_a_bit_of_a_vector():
    llm, arrays = small_llm("qwen3", dataclasses.replace(small_llm("qwen3").config, **INVARIANT)), golden("qwen3")
    text = arrays["prompt_5"].tolist()
    alone = llm.embed([text])[0].embedding
    others = [np.random.default_rng(i).integers(6, 300, 20 + 7 * i).tolist() for i in range(6)]
    outputs = llm.embed([*others, text, text])[-2:]
    assert outputs[0].num_cached_tokens > 0
    for output in outputs:
        np.testing.assert_array_equal(output.embedding, alone)
