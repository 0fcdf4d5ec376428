"""Base models that were saved alone, as embedding models are: no prefix before their tensors' names, and no head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import open_checkpoint
from checkpoints.formats import join, scheme_of
from checkpoints.huggingface import map_tensors, sources_of
from checkpoints.rules import BASE, HEAD
from ferrum_jax import LLM
from ferrum_jax.__main__ import main
from ferrum_jax.models import registry
from ferrum_jax.spec.stored_weight import weight_of
from tests.checkpoints.conversion.test_back import assert_same
from tests.checkpoints.folders import HARMLESS, RULES, parameters, targets, tensors, write_single
from tests.support import GOLDENS, INVARIANT, small_llm

_HEAD = HEAD.removesuffix("weight")
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))


def alone(made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as their base model has them: of the head neither weight nor bias."""
    return {name.removeprefix(BASE): array for name, array in made.items() if not name.startswith(_HEAD)}


def folder_of(golden: str, path: Path) -> Path:
    """A golden folder whose base model was saved alone, as an architecture of its own."""
    path.mkdir()
    config = json.loads((GOLDENS / golden / "config.json").read_text())
    (whole,) = config["architectures"]
    config["architectures"] = [whole.replace("ForCausalLM", "Model")]
    (path / "config.json").write_text(json.dumps(config))
    save_file(alone(map_tensors(GOLDENS / golden)), path / "model.safetensors")
    shutil.copy(GOLDENS / golden / "generation_config.json", path)
    return path


def test_a_folder_has_the_prefix_on_all_tensors_or_on_none(tmp_path):
    made = tensors()
    checkpoint = open_checkpoint(write_single(tmp_path / "alone", alone(made)))
    found = checkpoint.load(rules=RULES, harmless=HARMLESS, targets=targets())
    for name, expected in parameters(made).items():
        np.testing.assert_array_equal(found[name], expected)
    assert not checkpoint.has_head
    mixed = {name.removeprefix(BASE) if "embed" in name else name: array for name, array in made.items()}
    checkpoint = open_checkpoint(write_single(tmp_path / "mixed", mixed))
    with pytest.raises(ValueError, match=r"tensor model\.embed_tokens\.weight is missing"):
        checkpoint.load(rules=RULES, harmless=HARMLESS, targets=targets())
    assert checkpoint.has_head


@pytest.mark.slow
@pytest.mark.parametrize("golden", NAMES)
def test_the_base_model_of_every_decoder_family_fits_its_rules(golden):
    config = json.loads((GOLDENS / golden / "config.json").read_text())
    weights = registry.weights_of(config, has_head=lambda: False)
    plan = sources_of(
        join(alone(map_tensors(GOLDENS / golden)), scheme_of(config)),
        rules=weights.rules,
        harmless=weights.harmless,
        targets=weights.targets,
        has_scheme=True,
    )
    assert set(plan) == {weight_of(name) for name in weights.targets} and "head.weight" not in plan


@pytest.mark.slow
def test_a_base_model_without_a_head_embeds_and_generates_nothing(tmp_path):
    whole, source = small_llm("llama_linear", INVARIANT), folder_of("llama_linear", tmp_path / "hf")
    prompts = [[7, 8, 9], list(range(20, 60))]
    expected = [output.embedding for output in whole.embed(prompts)]
    assert main(["convert", "--hf", str(source), "--out", str(tmp_path / "ours")]) == 0
    for path in (source, tmp_path / "ours"):
        llm = LLM(str(path), INVARIANT)
        assert llm.loaded.layout.model.weights_bytes < whole.loaded.layout.model.weights_bytes
        for output, vector in zip(llm.embed(prompts), expected, strict=True):
            np.testing.assert_array_equal(output.embedding, vector)
        with pytest.raises(ValueError, match="prompt 0: LlamaForCausalLM has no head here"):
            llm.generate(prompts)
    assert main(["convert", "--orbax", str(tmp_path / "ours"), "--to-hf", str(tmp_path / "back")]) == 0
    assert_same(source, tmp_path / "back")
