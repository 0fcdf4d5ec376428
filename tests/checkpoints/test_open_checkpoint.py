"""open_checkpoint: both kinds are recognised, and what is neither says what was expected."""

import json

import pytest

from checkpoints import open_checkpoint
from tests.checkpoints.folders import CONFIG, tensors, write_single


@pytest.fixture
def folder(tmp_path):
    return write_single(tmp_path / "hf", tensors())


def test_a_bare_hugging_face_folder_is_recognised(folder):
    opened = open_checkpoint(str(folder))
    assert (opened.kind, opened.path, opened.config, opened.generation_config) == ("huggingface", folder, CONFIG, {})
    assert (opened.tokenizer_files, opened.has_chat_template) == ((), False)


def test_generation_config_tokenizer_and_a_template_inside_its_config_are_found(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    opened = open_checkpoint(folder)
    assert opened.generation_config == {"eos_token_id": [1, 2]}
    assert opened.tokenizer_files == ("tokenizer.json", "tokenizer_config.json")
    assert opened.has_chat_template


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
