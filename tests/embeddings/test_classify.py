"""LLM.classify and LLM.reward: models with a head for classes give transformers' logits."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ferrum_jax import LLM, EngineConfig
from ferrum_jax.models.families.encoder_spec import labels_of
from scripts.goldens.weights import made
from tests.support import COMPILED, GOLDENS

CLASSIFIERS = GOLDENS / "classifiers"
CONFIG = EngineConfig(
    max_model_len=64, max_num_seqs=4, block_size=8, num_blocks=64, compilation_cache_dir=str(COMPILED)
)
ACTIVATIONS = {"bert": "sigmoid", "llama": "softmax", "qwen2": "sigmoid"}


@functools.cache
def classifier(name: str) -> LLM:
    config = CONFIG if name != "bert" else EngineConfig(max_model_len=64, compilation_cache_dir=str(COMPILED))
    return LLM(str(CLASSIFIERS / name), config)


def golden(name: str) -> tuple[list[list[int]], np.ndarray]:
    found = json.loads((CLASSIFIERS / name / "golden.json").read_text())
    return found["texts"], np.asarray(found["logits"], np.float32)


def probabilities(logits: np.ndarray, activation: str) -> np.ndarray:
    wide = logits.astype(np.float64)
    return 1 / (1 + np.exp(-wide)) if activation == "sigmoid" else np.exp(wide) / np.exp(wide).sum(1, keepdims=True)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_logits_are_the_references_and_probabilities_as_the_problem_says(name):
    texts, wanted = golden(name)
    found = classifier(name).classify(texts)
    np.testing.assert_allclose([output.logits for output in found], wanted, atol=1e-4)
    np.testing.assert_allclose([output.probs for output in found], probabilities(wanted, ACTIVATIONS[name]), atol=1e-5)
    names = ("LABEL_0",) if name == "qwen2" else ("glad", "sad", "neither")
    assert [output.label for output in found] == [names[best] for best in wanted.argmax(1)]


@pytest.mark.slow
def test_the_cache_and_companions_leave_classes_as_they_are():
    llm, (texts, _) = LLM(str(CLASSIFIERS / "llama"), dataclasses.replace(CONFIG, invariant=True)), golden("llama")
    first = llm.classify(texts)
    alone = [llm.classify([text])[0] for text in texts]
    assert [output.num_cached_tokens for output in alone] == [0, 37, 20, 0], "whole prompts hit"
    for one, other in zip(first, alone, strict=True):
        assert one.logits.tolist() == other.logits.tolist() and one.label == other.label


def test_a_head_reads_the_last_token_that_is_no_pad_as_transformers_does():
    text = golden("llama")[0][0]
    whole, padded, pads, pad = classifier("llama").classify([text, [*text, 0, 0], [0, 0, 0], [0]])
    assert padded.logits.tolist() == whole.logits.tolist() and pads.logits.tolist() == pad.logits.tolist()


def test_a_reward_is_the_one_logit_of_a_model_with_one_label():
    texts, wanted = golden("qwen2")
    found = classifier("qwen2").reward(texts)
    np.testing.assert_allclose([output.reward for output in found], wanted[:, 0], atol=1e-4)
    assert found[1].prompt_token_ids == tuple(texts[1]) and found[1].prompt is None
    with pytest.raises(ValueError, match=r"has 3 labels, and a reward is one number; ask LLM\.classify"):
        classifier("llama").reward(texts)


def folder_with(tmp_path: Path, name: str, tensors: dict[str, np.ndarray], **config: object) -> str:
    """A golden's folder with another head."""
    source = made(CLASSIFIERS / name)
    folder = tmp_path / name
    shutil.copytree(source, folder)
    own = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in own.items() if not key.startswith("score.")}
    save_file(kept | tensors, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(folder)


def test_a_reward_model_may_have_two_layers_with_biases(tmp_path):
    rng = np.random.default_rng(1)
    first, second = (rng.normal(size=shape).astype(np.float32) for shape in ((48, 48), (1, 48)))
    biases = [rng.normal(size=n).astype(np.float32) for n in (48, 1)]
    tensors = {"score.0.weight": first, "score.0.bias": biases[0], "score.2.weight": second, "score.2.bias": biases[1]}
    llm = LLM(folder_with(tmp_path, "qwen2", tensors, architectures=["Qwen2ForRewardModel"]), CONFIG)
    texts, _ = golden("qwen2")
    states = np.stack([output.embedding for output in llm.embed(texts, normalize=False)]).astype(np.float64)
    wanted = np.maximum(states @ first.T + biases[0], 0) @ second.T + biases[1]
    np.testing.assert_allclose([output.reward for output in llm.reward(texts)], wanted[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({}, r"has the tensors \[\]; supported are score.weight"),
        ({"score.weight": np.zeros((2, 48), np.float32)}, r"has the shape \(2, 48\); with 3 labels"),
        ({"score.weight": np.zeros((3, 48), np.float32), "score.norm": np.zeros(48, np.float32)}, "score.norm"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_what_would(tmp_path, tensors, why):
    with pytest.raises(ValueError, match=why):
        LLM(folder_with(tmp_path, "llama", tensors), CONFIG)


def test_a_classifier_generates_nothing_and_other_models_classify_nothing():
    with pytest.raises(ValueError, match="generates nothing"):
        classifier("qwen2").generate([[5]], progress=False)
    with pytest.raises(ValueError, match="BertModel is read as no classifier; name a checkpoint whose architecture"):
        LLM(str(GOLDENS / "encoders" / "bert"), EngineConfig(compilation_cache_dir=str(COMPILED))).classify([[5]])
    with pytest.raises(ValueError, match="prompt 1: the text has 70 tokens; it must have 1 to 64"):
        classifier("llama").classify([[5], [5] * 70])
    assert len(classifier("llama").classify([[5] * 70], truncate=True)[0].prompt_token_ids) == 64


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"num_labels": 0}, "num_labels is 0; it must be between 1 and 65,536"),
        ({"num_labels": 1 << 40}, "num_labels is 1099511627776"),
        ({"id2label": {"0": "a", "2": "b"}}, "must have a text for each of 0 to 1"),
        ({"id2label": ["a"]}, "it must name 1 to 65,536 labels"),
        ({"problem_type": "ranking"}, "problem_type is 'ranking'; supported are"),
    ],
)
def test_labels_that_are_none_are_refused(config, why):
    with pytest.raises(ValueError, match=why):
        labels_of(config)


def test_conversations_are_read_as_the_chat_template_writes_them(tmp_path):
    folder = Path(folder_with(tmp_path, "qwen2", {"score.weight": np.ones((1, 48), np.float32)}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(GOLDENS / "scorers" / "qwen3" / name, folder / name)
    llm, chat = LLM(str(folder), CONFIG), [{"role": "user", "content": "the block"}]
    written = llm.render_chat(chat, add_generation_prompt=False)
    ids = llm.get_tokenizer().encode(written, add_special_tokens=False)
    one, other, text = llm.reward([chat, {"messages": chat}, ids])
    assert one.reward == other.reward == text.reward and one.prompt_token_ids == tuple(ids)


def test_a_regression_has_logits_for_probabilities():
    labels = labels_of({"problem_type": "regression", "num_labels": 2})
    assert labels.names == ("LABEL_0", "LABEL_1")
    assert labels.probabilities(np.asarray([-3.0, 40.0], np.float32)).tolist() == [-3.0, 40.0]
