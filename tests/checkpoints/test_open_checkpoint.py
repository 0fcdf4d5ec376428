"""open_checkpoint: both kinds are recognised, and what is neither says what was expected.

The fingerprint: the same weights have the same one, wherever they came from, and others have another.

Base models that were saved alone, as embedding models are: no prefix before their tensors' names, and no head.

A head beside an embedding that config.json calls the same is a copy, or an error, whatever the family.
"""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import convert, fingerprint, open_checkpoint
from checkpoints.fingerprints import _gather, _sample_indices, sample
from checkpoints.formats import join, scheme_of
from checkpoints.huggingface import map_tensors, sources_of
from checkpoints.memory import copies_of_tensors
from checkpoints.rules import BASE, HEAD
from checkpoints.stored_weight import weight_of
from ferrum_jax import LLM
from ferrum_jax.__main__ import main
from ferrum_jax.models.families import registry
from tests.checkpoints.conversion.test_back import assert_same
from tests.checkpoints.folders import CONFIG, HARMLESS, RULES, parameters, targets, tensors, write_sharded, write_single
from tests.support import GOLDENS, INVARIANT, small_llm


@pytest.fixture
def folder(tmp_path):
    return write_single(tmp_path / "hf", tensors())


def test_a_bare_hugging_face_folder_is_recognised(folder):
    opened = open_checkpoint(str(folder))
    assert (opened.kind, opened.path, opened.config, opened.generation_config) == ("huggingface", folder, CONFIG, {})


def test_generation_config_is_found(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(folder).generation_config == {"eos_token_id": [1, 2]}


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is not a folder"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_folder_of_neither_kind_says_what_is_expected(tmp_path):
    with pytest.raises(
        ValueError, match=r"neither ferrum_jax.json \(ours\) nor model.safetensors or .*saved as safetensors"
    ):
        open_checkpoint(tmp_path)


def test_a_folder_without_a_readable_config_names_the_file(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json cannot be read as JSON"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json cannot be read as JSON"):
        open_checkpoint(folder)


SMALL = np.arange(6, dtype=np.float32).reshape(2, 3)
LARGE = np.arange(200 * 300, dtype=np.float32).reshape(200, 300)


def test_it_is_the_same_from_one_file_or_several_and_from_our_own_folder(tmp_path):
    made = tensors("bfloat16")
    one, two = write_single(tmp_path / "one", made), write_sharded(tmp_path / "two", made)
    convert(one, tmp_path / "out", rules=RULES, harmless=HARMLESS, targets=targets("bfloat16"))
    found = set()
    for folder in (one, two, tmp_path / "out"):
        params = open_checkpoint(folder).load(rules=RULES, harmless=HARMLESS, targets=targets())
        found.add(fingerprint("spec", "float32", params))
    assert len(found) == 1


def test_it_is_the_same_in_every_process_and_version():
    assert fingerprint("spec", "float32", {"b": SMALL, "a": LARGE}) == "64f359bb8bd200c19bcca721d45e5302"
    assert (
        fingerprint("spec", "float32", {"a": jnp.asarray(LARGE), "b": jnp.asarray(SMALL)})
        == "64f359bb8bd200c19bcca721d45e5302"
    )


@pytest.mark.parametrize(
    ("spec", "dtype", "params"),
    [
        ("other", "float32", {"a": SMALL, "b": LARGE}),
        ("spec", "bfloat16", {"a": SMALL, "b": LARGE}),
        ("spec", "float32", {"a": SMALL, "c": LARGE}),
        ("spec", "float32", {"a": SMALL.T.copy().reshape(2, 3), "b": LARGE}),
        ("spec", "float32", {"a": SMALL.reshape(3, 2), "b": LARGE}),
        ("spec", "float32", {"a": SMALL, "b": LARGE + 1}),
        ("spec", "float32", {"a": SMALL}),
        ("specf", "loat32", {"a": SMALL, "b": LARGE}),
    ],
)
def test_spec_dtype_name_shape_and_values_each_change_it(spec, dtype, params):
    assert fingerprint(spec, dtype, params) != fingerprint("spec", "float32", {"a": SMALL, "b": LARGE})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sample_is_64_kb_from_the_first_to_the_last_element(dtype):
    tensor = LARGE.astype(jnp.dtype(dtype))
    found = sample(tensor)
    assert found.nbytes == 65_536
    assert found[0] == tensor.reshape(-1)[0]
    assert found[-1] == tensor.reshape(-1)[-1]


def test_a_tensor_of_64_kb_or_less_is_taken_whole():
    tensor = np.arange(65_536 // 4, dtype=np.float32).reshape(128, 128)
    np.testing.assert_array_equal(sample(tensor), tensor.reshape(-1))


def test_the_gather_on_a_device_takes_the_elements_that_the_host_takes():
    where = np.unravel_index(_sample_indices(LARGE.size, 4), LARGE.shape)
    np.testing.assert_array_equal(np.asarray(_gather(jnp.asarray(LARGE), where)), sample(LARGE))


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


TIED = {  # by the name of the embedding's tensor
    "llama": "model.embed_tokens.weight",
    "nemotron_h": "backbone.embeddings.weight",
    "gemma3": "model.embed_tokens.weight",
}


def folder_with_head(name: str, folder, change):
    """A golden whose config.json ties its head, with a head beside it that `change` makes of the embedding."""
    shutil.copytree(GOLDENS / name, folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    (embedding,) = (x for key, x in tensors.items() if key in TIED.values() or key.endswith("embeddings.weight"))
    save_file(tensors | {"lm_head.weight": change(np.array(embedding))}, folder / "model.safetensors")
    return folder, config


def load(folder, config):
    own = registry.weights_of(config)
    return open_checkpoint(folder).load(rules=own.rules, harmless=own.harmless, targets=own.targets)


def in_one_place(embedding):
    embedding[17, 3] += 1
    return embedding


@pytest.mark.parametrize("name", TIED)
def test_a_copy_of_the_embedding_is_left_over(name, tmp_path):
    assert "head.weight" not in load(*folder_with_head(name, tmp_path / "model", lambda x: x))


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("change", [in_one_place, lambda x: x[:-1]], ids=["another number", "another shape"])
def test_a_head_that_differs_is_an_error_that_names_both(name, change, tmp_path):
    folder, config = folder_with_head(name, tmp_path / "model", change)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from \S+embed\S*, and config.json says in tie_word_"):
        load(folder, config)


def test_so_is_one_in_arrays_that_a_trainer_gives(tmp_path):
    folder, config = folder_with_head("llama", tmp_path / "model", in_one_place)
    own = registry.weights_of(config)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from"):
        copies_of_tensors(load_file(folder / "model.safetensors"), own.targets, rules=own.rules, harmless=own.harmless)
