"""The text part of a model that sees images is the text model: its spec and its parameters are equal."""

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import open_checkpoint
from checkpoints.formats import scheme_of, without_forms
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.models.families.registry import abstract_model, spec_of, unbind
from tests.models.test_goldens import GOLDENS, load, parameters_of
from tests.rows import rows_beside


@pytest.mark.parametrize(
    ("golden", "architecture"), rows_beside(__file__)["the text part of a model that sees images is the text model"]
)
def test_the_text_part_of_a_model_that_sees_images_is_the_text_model(golden, architecture, tmp_path):
    config = json.loads((GOLDENS / golden / "config.json").read_text())
    dtype = config["dtype"]
    del config["architectures"], config["dtype"]
    outer = {"architectures": [architecture], "dtype": dtype, "vision_config": {"hidden_size": 8}}
    if architecture.startswith("Qwen3_5"):
        outer["language_model_only"] = True  # else it has a tower
    if architecture.startswith(("Gemma3", "Gemma4", "Mistral3")):
        del outer["vision_config"]  # likewise
    (tmp_path / "config.json").write_text(json.dumps(outer | {"text_config": config, "eos_token_id": [1, 106]}))
    tensors = load_file(GOLDENS / golden / "model.safetensors")
    save_file(_beside_images(tensors, architecture), tmp_path / "model.safetensors")

    spec = spec_of(open_checkpoint(tmp_path).config)
    found = parameters_of(tmp_path, spec)
    text, _, expected, _ = load(golden)
    assert spec.eos_token_ids == (1, 106), "the part names no end of turn"
    assert dataclasses.replace(spec, architecture=text.architecture, eos_token_ids=text.eos_token_ids) == text
    assert set(found) == set(expected)
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def _beside_images(tensors, architecture: str):
    """Tensors of a text model as they are named, and the experts of a layer joined, beside those of images."""
    images = {name: np.ones(3, np.float16) for name in ("vision_tower.a.weight", "multi_modal_projector.b")}
    if architecture.startswith("Gemma4"):
        named = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
        return named | {f"model.{name}.a": np.ones(3, np.float16) for name in ("embed_audio", "vision_tower")}
    if not architecture.startswith("Qwen3_5"):
        return images | {f"language_model.{name}": x for name, x in tensors.items()}
    named = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    named |= {"model.visual.a.weight": np.ones(3, np.float16), "mtp.fc.weight": np.ones(3, np.float16)}
    apart = {name for name in named if ".experts." in name}
    for block in {name.partition(".experts.")[0] for name in apart}:
        each = range(sum(name.startswith(block) and name.endswith("up_proj.weight") for name in apart))
        gate, up, down = (
            np.stack([named[f"{block}.experts.{e}.{part}_proj.weight"] for e in each])
            for part in ("gate", "up", "down")
        )
        named |= {f"{block}.experts.gate_up_proj": np.concatenate([gate, up], axis=1)}
        named |= {f"{block}.experts.down_proj": down}
    return {name: x for name, x in named.items() if name not in apart}


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize(("whole", "part"), [*itertools.product((True, False, None), repeat=2)])
def test_the_whole_says_whether_the_head_is_tied_and_without_a_head_either_does(whole, part, has_head, tmp_path):
    shutil.copytree(GOLDENS / "vision/qwen3_vl", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for level, value in ((config, whole), (config["text_config"], part)):
        level.pop("tie_word_embeddings", None)
        level |= {} if value is None else {"tie_word_embeddings": value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: x for name, x in load_file(tmp_path / "model.safetensors").items() if name != "lm_head.weight"}
    head = {"lm_head.weight": tensors["model.language_model.embed_tokens.weight"].copy()} if has_head else {}
    save_file(tensors | head, tmp_path / "model.safetensors")
    source = ModelSource.of_checkpoint(open_checkpoint(tmp_path))
    is_tied = whole is True or (not has_head and part is True)
    assert source.spec.tie_word_embeddings == is_tied and not source.headless
    if has_head or is_tied:
        assert "embed.weight" in source.read(unbind(abstract_model(source.spec))[1])


def test_forms_may_be_said_in_the_part_of_the_text():
    config = json.loads((GOLDENS / "quantised/w4a16/config.json").read_text())
    said = config.pop("quantization_config")
    inside = {**config, "text_config": {"hidden_size": 8, "quantization_config": said}}
    assert scheme_of(inside).method == scheme_of(config | {"quantization_config": said}).method
    assert without_forms(inside)["text_config"] == {"hidden_size": 8}
    with pytest.raises(ValueError, match=r"two things, in quantization_config and text_config\.quantization_config"):
        scheme_of(inside | {"quantization_config": said | {"format": "other"}})
