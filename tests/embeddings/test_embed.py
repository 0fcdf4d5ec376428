"""LLM.embed: encoders and models that generate give the reference's vectors, as their checkpoints say them."""

import dataclasses
import functools
import gzip
import json
import shutil

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import open_checkpoint
from checkpoints.sentence import SentenceLayout
from ferrum_jax import LLM, EngineConfig
from ferrum_jax.__main__ import main
from ferrum_jax.cli import embed as command
from ferrum_jax.engine.startup.open import Opening
from ferrum_jax.models.families import registry
from ferrum_jax.tasks.embedder import UNTRAINED, Embedder
from tests.support import COMPILED, GOLDENS, SMALL, small_llm

ENCODER = EngineConfig(
    max_model_len=64, max_num_seqs=8, max_num_batched_tokens=128, compilation_cache_dir=str(COMPILED)
)
INVARIANT = {"invariant": True, "max_num_batched_tokens": 64}
WORDS = "a block holds the keys and values of its tokens"


@functools.cache
def encoder() -> LLM:
    """The golden folder that sentence-transformers would read: mean, normalised, prompts."""
    return LLM(str(GOLDENS / "encoders" / "bert"), ENCODER)


def test_vectors_of_a_model_that_was_made_for_none_are_said_to_mean_little_once(caplog):
    made_to_generate = Embedder(SentenceLayout(), None, poolings=("last",), vocab_size=9, max_tokens=9)
    asked = {"prompt_name": None, "pooling": None, "normalize": None, "truncate": False}
    for _ in range(2):
        made_to_generate.params(**asked)
    assert [record.message for record in caplog.records] == [UNTRAINED]
    for layout, poolings in ((SentenceLayout(pooling="last"), ("last",)), (SentenceLayout(), ("mean", "cls", "last"))):
        made_to_compare = Embedder(layout, None, poolings=poolings, vocab_size=9, max_tokens=9)
        made_to_compare.params(**asked)
        assert made_to_compare.compares
    assert len(caplog.records) == 1


def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / name / "golden.npz"))


def vectors(outputs) -> np.ndarray:
    return np.stack([output.embedding for output in outputs])


def test_an_encoders_vectors_are_pooled_and_normalised_as_its_folder_says():
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


@pytest.mark.slow
def test_linear_layers_behind_the_pooling_make_the_references_vectors():
    llm = LLM(str(GOLDENS / "encoders" / "embedding_gemma_dense"), dataclasses.replace(ENCODER, dtype="float32"))
    arrays = golden("encoders/embedding_gemma_dense")
    found = vectors(llm.embed([arrays[f"prompt_{i}"].tolist() for i in range(7)]))
    wanted = np.stack([arrays[f"sentence_{i}"] for i in range(7)])
    assert found.shape == (7, 36)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


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


@pytest.fixture
def answering(monkeypatch, tmp_path):
    """Runs the command over lines, with the encoder that is loaded already."""
    monkeypatch.setattr(command, "open_llm", lambda args, config, stack: encoder())

    def run(lines: list, output: str, *flags: str) -> int:
        (tmp_path / "in.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n{\n")
        files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / output)]
        return main(["embed", "--model", "m", *files, *flags])

    return run


def test_the_command_writes_a_line_for_each_line_and_names_failures(answering, tmp_path, capsys):
    lines = [WORDS, {"custom_id": "ids", "input": [5, 6]}, {"custom_id": "bad", "input": [999]}, {"input": "a"}, 7]
    assert answering(lines, "out.jsonl", "--prompt-name", "query") == 1
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line.get("num_tokens") for line in found] == [14, None, None, 5, None, None]
    assert [line["custom_id"] for line in found] == [None, "ids", "bad", None, None, None]
    wanted = encoder().embed(WORDS, prompt_name="query")[0].embedding
    np.testing.assert_array_equal(np.float32(found[0]["embedding"]), wanted)
    error = capsys.readouterr().err
    assert "line 3: the text is token ids, before which" in error and "4 of 6 lines failed" in error
    assert "not valid JSON" in found[5]["error"]["message"]


def test_an_array_has_a_row_for_each_line_and_nan_where_one_failed(answering, tmp_path):
    assert answering([WORDS, [1], "a block"], "out.npy", "--no-normalize", "--pooling", "cls") == 1
    found = np.load(tmp_path / "out.npy")
    wanted = vectors(encoder().embed([WORDS, "a block"], normalize=False, pooling="cls"))
    np.testing.assert_array_equal(found[[0, 2]], wanted)
    assert np.isnan(found[[1, 3]]).all() and found.dtype == np.float32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.npy"]


def test_the_names_of_both_files_say_their_form(answering, tmp_path, capsys):
    (tmp_path / "texts.csv").write_text(f'custom_id,input\na,{WORDS}\nb,"[5, 6]"\nc,a,too,many\nd,7\n')
    command = ["embed", "--model", "m", "--input", str(tmp_path / "texts.csv"), "--output"]
    assert main([*command, str(tmp_path / "out.parquet")]) == 1
    rows = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in rows] == ["a", "b", "c", "d"]
    assert "has 4 cells" in rows[2]["error"] and rows[2]["embedding"] is None
    wanted = vectors(encoder().embed([WORDS, [5, 6], "7"]))
    np.testing.assert_array_equal(np.float32([rows[i]["embedding"] for i in (0, 1, 3)]), wanted)
    assert rows[0]["num_tokens"] == 12
    assert main([*command, str(tmp_path / "out.csv.gz")]) == 1
    lines = gzip.decompress((tmp_path / "out.csv.gz").read_bytes()).decode().splitlines()
    assert lines[0] == "custom_id,embedding,num_tokens,error" and len(lines) == 5
    capsys.readouterr()
    for name in ("out.arrow", "out.npy.gz"):
        assert main([*command, str(tmp_path / name)]) == 2
        assert (
            "is not supported; name .jsonl, .csv or .parquet, also with .gz or .zst, or .npy" in capsys.readouterr().err
        )
    assert not (tmp_path / "out.arrow").exists()


@settings(max_examples=60)
@given(
    st.lists(
        st.binary(max_size=8)
        | st.sampled_from([b'"a"', b"[" * 50_000, b'{"input": [NaN]}', b'{"input": "\\ud800"}', b'{"input": [[[]]]}'])
        | st.builds(
            lambda value, key: json.dumps({"custom_id": "x", key: value}).encode(),
            st.recursive(st.none() | st.text(max_size=3) | st.integers() | st.floats(), st.lists, max_leaves=3),
            st.sampled_from(["input", "other"]),
        ),
        max_size=4,
    )
)
def test_every_line_gives_a_vector_or_an_error_whatever_bytes_it_has(lines):
    lines = [line for line in lines if line.strip()]
    found = list(command._entries(encoder().embed_as_completed, lines, lambda num_tokens: None))
    assert len(found) == len(lines)


def test_an_encoder_refuses_to_generate_and_what_it_does_not_know():
    llm = encoder()
    with pytest.raises(ValueError, match="BertModel is an encoder and generates nothing"):
        llm.generate(WORDS)
    with pytest.raises(ValueError, match="pooling is 'max'; this model has"):
        llm.embed(WORDS, pooling="max")
    with pytest.raises(
        ValueError, match=r"is 'title', which the checkpoint does not have; its prompts are \['document', 'query'\]"
    ):
        llm.embed(WORDS, prompt_name="title")


def test_an_encoders_weights_can_be_swapped():
    llm = LLM.from_model(encoder_in_memory(), ENCODER)
    text = golden("encoders/bert")["prompt_3"].tolist()
    first = llm.embed([text])[0].embedding
    np.testing.assert_array_equal(first, encoder().embed([text], normalize=False)[0].embedding)
    llm.update_weights(encoder_in_memory(scale=2.0))
    assert not np.array_equal(llm.embed([text])[0].embedding, first)
    assert llm.stats()["compiles_after_ready"] == 0


def encoder_in_memory(scale: float = 1.0):
    checkpoint = open_checkpoint(GOLDENS / "encoders" / "bert")
    weights, graph = registry.weights_of(checkpoint.config), encoder().model.opened.model.layout.graph
    arrays = checkpoint.load(rules=weights.rules, harmless=weights.harmless, targets=weights.targets)
    return registry.bind(graph, arrays | {"norm.bias": arrays["norm.bias"] * scale})


@pytest.mark.slow
def test_a_model_that_generates_embeds_by_its_last_token_with_reuse():
    llm, arrays = small_llm("qwen3"), golden("qwen3")
    texts = [arrays[f"prompt_{i}"].tolist() for i in (2, 3)]
    wanted = np.stack([arrays[f"norm_{i}"][-1] for i in (2, 3)])
    first, again = llm.embed(texts), llm.embed([*texts, [7] * 40])[:2]
    scale = np.max(np.abs(wanted))
    np.testing.assert_allclose(vectors(first) / scale, wanted / scale, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vectors(again) / scale, wanted / scale, rtol=1e-5, atol=1e-5)
    assert all(output.num_cached_tokens > 0 for output in again)
    with pytest.raises(ValueError, match=r"this model has 'last' alone"):
        llm.embed(texts, pooling="mean")
    assert np.allclose(np.linalg.norm(llm.embed(texts, normalize=True)[1].embedding), 1)


@pytest.mark.slow
def test_qwen3_embedding_gives_the_last_tokens_unit_vector_under_its_prompts(tmp_path):
    shutil.copytree(GOLDENS / "qwen3", tmp_path / "model")
    folder, kinds = tmp_path / "model", ("Transformer", "Pooling", "Normalize")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen3Model"]}
    (folder / "config.json").write_text(json.dumps(config))
    steps = [{"path": "1_Pooling" * (k == "Pooling"), "type": f"sentence_transformers.models.{k}"} for k in kinds]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    prompts = {"prompts": {"query": "Instruct: find\nQuery:", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    llm, arrays = LLM(str(folder), small_llm("qwen3").config), golden("qwen3")
    texts = [arrays[f"prompt_{i}"].tolist() for i in (2, 3)]
    wanted = np.stack([arrays[f"norm_{i}"][-1] for i in (2, 3)])
    unit = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors(llm.embed(texts)), unit, rtol=1e-5, atol=1e-5)
    asked = llm.embed(WORDS, prompt_name="query")[0]
    assert asked.prompt_token_ids == tuple(llm.get_tokenizer().encode("Instruct: find\nQuery:" + WORDS))


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


@pytest.mark.slow
def test_a_decoder_reads_texts_as_long_as_its_model_and_cuts_them_as_its_file_says(tmp_path):
    narrow, wide = small_llm("qwen3", dataclasses.replace(SMALL, max_model_len=32)), small_llm("qwen3")
    ids = [5 + i % 30 for i in range(33)]
    whole, cut = narrow.embed([ids[:32], ids], truncate=True)
    assert len(whole.prompt_token_ids) == len(cut.prompt_token_ids) == 32
    np.testing.assert_allclose(whole.embedding, wide.embed([ids[:32]])[0].embedding, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="the text has 33 tokens; it must have 1 to 32"):
        narrow.embed([ids])
    shutil.copytree(GOLDENS / "qwen3", tmp_path / "m")
    parts = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in parts.items()]
    (tmp_path / "m/modules.json").write_text(json.dumps(modules))
    (tmp_path / "m/1_Pooling").mkdir()
    (tmp_path / "m/1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    (tmp_path / "m/sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    for most, longest in ((None, 24), (100, 100)):
        order = Opening.of_checkpoint(str(tmp_path / "m"), dataclasses.replace(SMALL, max_model_len=most))
        assert order.longest_text(order.texts(), order.max_model_len) == longest
