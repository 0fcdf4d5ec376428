"""The files of sentence-transformers: what they say is read, and what is not understood is refused by name."""

import json

import numpy as np
import pytest

from checkpoints.folder import companion_files, copy_companions
from checkpoints.sentence import SentenceLayout, read_sentence_layout
from tests.rows import rows_beside
from tests.support import GOLDENS

FOLDER = GOLDENS / "encoders" / "bert"


def changed(tmp_path, file: str, **values):
    copy_companions(FOLDER, tmp_path)
    path = tmp_path / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return tmp_path


def test_a_folder_says_pooling_normalisation_length_and_prompts(tmp_path):
    found = read_sentence_layout(FOLDER)
    assert (found.pooling, found.normalize, found.max_seq_length, found.pools_prompt) == ("mean", True, 48, True)
    assert dict(found.prompts) == {"query": "query: ", "document": "document: "} and found.default_prompt is None
    assert read_sentence_layout(GOLDENS / "qwen3") == SentenceLayout()
    lower = changed(tmp_path, "sentence_bert_config.json", do_lower_case=True)
    assert read_sentence_layout(lower).lower_case


def test_newer_files_name_the_pooling(tmp_path):
    copy_companions(FOLDER, tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    assert read_sentence_layout(tmp_path).pooling == "last"


@pytest.mark.parametrize(
    ("file", "values", "message"), rows_beside(__file__)["a pooling that is not supported is refused"]
)
def test_a_pooling_that_is_not_supported_is_refused(tmp_path, file, values, message):
    with pytest.raises(ValueError, match=message):
        read_sentence_layout(changed(tmp_path, file, **values))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("Transformer", ""), ("Pooling", "1_Pooling"), ("LSTM", "2_LSTM")], "LSTM.*supported are a Transformer"),
        ([("Transformer", "0_Transformer"), ("Pooling", "1_Pooling")], "0_Transformer.*in the folder itself"),
        ([("Transformer", ""), ("Pooling", "../secret")], "outside its folder"),
    ],
)
def test_steps_that_are_not_supported_are_refused(tmp_path, modules, message):
    copy_companions(FOLDER, tmp_path)
    steps = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in modules]
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    with pytest.raises(ValueError, match=message):
        read_sentence_layout(tmp_path)


def test_the_files_are_companions_that_conversion_carries_along(tmp_path):
    names = companion_files(FOLDER)
    assert {"modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"} <= set(names)
    copy_companions(FOLDER, tmp_path / "out")
    assert all((tmp_path / "out" / name).read_bytes() == (FOLDER / name).read_bytes() for name in names)


def test_linear_layers_behind_the_pooling_are_read_with_a_digest_of_their_weights(tmp_path):
    folder = GOLDENS / "encoders" / "embedding_gemma_dense"
    first, second = read_sentence_layout(folder).dense
    assert (first.place, first.activation, second.activation) == ("2_Dense", "Identity", "Tanh")
    assert first.digest != second.digest
    assert second.load(folder)(first.load(folder)(np.ones((3, 48), np.float32))).shape == (3, 36)
    copy_companions(folder, tmp_path)
    assert read_sentence_layout(tmp_path) == read_sentence_layout(folder)
    path = tmp_path / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"activation_function": "torch.nn.GELU"}))
    with pytest.raises(ValueError, match=r"GELU.*with Identity or Tanh"):
        read_sentence_layout(tmp_path)
    (tmp_path / "3_Dense" / "model.safetensors").unlink()
    path.write_text((folder / "2_Dense" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"3_Dense/model\.safetensors is missing"):
        read_sentence_layout(tmp_path)
