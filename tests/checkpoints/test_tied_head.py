"""A head beside an embedding that config.json calls the same is a copy, or an error, whatever the family."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import open_checkpoint
from checkpoints.memory import copies_of_tensors
from ferrum_jax.models import registry
from tests.support import GOLDENS

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
