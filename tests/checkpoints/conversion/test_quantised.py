"""Quantised checkpoints through our own and back: codes once on disk, and the same values in compressed-tensors."""

import dataclasses
import json

import numpy as np
import pytest

from checkpoints import open_checkpoint
from checkpoints.formats import PackedWeight, join, scheme_of
from checkpoints.huggingface import LEFTOVERS, map_tensors
from ferrum_jax.__main__ import main
from ferrum_jax.models.families.registry import spec_of
from tests.support import GOLDENS

FOLDER = GOLDENS / "quantised"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
FAST = ("gptq_v2_ordered",)
ORDERED = ("gptq_v2_ordered", "gptq_8_bits")  # compressed-tensors 0.20 has given up orders of inputs, engines have not


def convert(*arguments) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def there_and_back(source, tmp_path, *flags):
    convert("--hf", source, "--out", tmp_path / "own", *flags)
    convert("--orbax", tmp_path / "own", "--to-hf", tmp_path / "back")
    return tmp_path / "own", tmp_path / "back"


def tensors_of(folder) -> dict[str, PackedWeight | np.ndarray]:
    checkpoint = open_checkpoint(folder)
    return join(map_tensors(folder), scheme_of(checkpoint.config, checkpoint.stored_forms.scale_dtype))


def forms_of(folder):
    checkpoint = open_checkpoint(folder)
    return spec_of(checkpoint.config, stored=checkpoint.stored_forms).forms


def without_scale_dtype(forms):
    return [(name, dataclasses.replace(form, scale_dtype="float32")) for name, form in forms]


def assert_same_values(one, other) -> None:
    wanted, found = tensors_of(one), tensors_of(other)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert isinstance(found[name], PackedWeight) == isinstance(tensor, PackedWeight), name
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(tensor), err_msg=name)


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_every_format_goes_back_as_compressed_tensors_with_the_same_values_and_forms(name, tmp_path, capsys):
    own, back = there_and_back(FOLDER / name, tmp_path)
    assert not (own / LEFTOVERS).exists(), "codes stand in the parameters alone"
    assert_same_values(FOLDER / name, back)
    said = json.loads((back / "config.json").read_text())
    assert said.pop("quantization_config")["quant_method"] == "compressed-tensors"
    was = json.loads((FOLDER / name / "config.json").read_text())
    assert said == {key: value for key, value in was.items() if key != "quantization_config"}
    assert forms_of(own) == forms_of(FOLDER / name)
    assert without_scale_dtype(forms_of(back)) == without_scale_dtype(forms_of(own))


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ORDERED])
def test_compressed_tensors_reads_what_is_written_back_as_the_same_values(name, tmp_path):
    naive = pytest.importorskip("compressed_tensors.compressors.naive_quantized")
    packed = pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    reader = {
        "int-quantized": naive.IntQuantizationCompressor,
        "float-quantized": naive.FloatQuantizationCompressor,
        "pack-quantized": packed.PackedQuantizationCompressor,
    }
    from compressed_tensors.quantization import QuantizationConfig  # pyright: ignore[reportMissingImports]
    from safetensors.torch import load_file

    _, back = there_and_back(FOLDER / name, tmp_path)
    said = QuantizationConfig(**json.loads((back / "config.json").read_text())["quantization_config"])
    stored = load_file(back / "model.safetensors")
    for weight, expected in tensors_of(back).items():
        if isinstance(expected, PackedWeight):
            base = weight.removesuffix("weight")
            named = [group for group in said.config_groups.values() if base[:-1] in group.targets]
            scheme = (named or [group for group in said.config_groups.values() if "Linear" in group.targets])[0]
            own = {end.removeprefix(base): x for end, x in stored.items() if end.startswith(base)}
            own["weight_scale"] = own["weight_scale"].float()
            own.pop("input_scale", None)
            decoded = reader[scheme.format].decompress(own, scheme)["weight"]
            np.testing.assert_array_equal(decoded.float().numpy(), np.asarray(expected), err_msg=weight)


@pytest.mark.parametrize(
    ("golden", "form"),
    [
        ("qwen3", "int4-g8"),
        pytest.param("qwen3_moe", "fp8", marks=pytest.mark.slow),
        pytest.param("phi3", "int8", marks=pytest.mark.slow),  # fused tensors
    ],
)
def test_a_dense_model_is_quantised_while_converted_and_goes_back(golden, form, tmp_path):
    own, back = there_and_back(GOLDENS / golden, tmp_path, "--weights", form)
    assert without_scale_dtype(forms_of(back)) == without_scale_dtype(forms_of(own)) != []
    assert (own / "config.json").read_bytes() == (GOLDENS / golden / "config.json").read_bytes()
    dense, found = map_tensors(GOLDENS / golden), tensors_of(back)
    assert found.keys() == dense.keys()
    for name, tensor in found.items():
        if isinstance(tensor, PackedWeight):
            most = np.abs(dense[name].astype(np.float32)).max()
            assert 0 < np.abs(np.asarray(tensor) - dense[name].astype(np.float32)).max() < most / 6
        else:
            assert tensor.tobytes() == dense[name].tobytes()


@pytest.mark.slow
def test_experts_in_one_tensor_without_a_published_form_are_refused(tmp_path, capsys):
    convert("--hf", GOLDENS / "granitemoe", "--out", tmp_path / "own", "--weights", "int8")
    assert main(["convert", "--orbax", str(tmp_path / "own"), "--to-hf", str(tmp_path / "back")]) == 2
    assert "is one tensor of" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_a_form_that_cannot_be_made_and_an_encoder_are_refused(tmp_path, capsys):
    for folder, form, message in (
        (GOLDENS / "qwen3", "int3", "weights is 'int3'; it must be"),
        (FOLDER / "w8a8", "int8", "the checkpoint's are quantised already (int8)"),
        (GOLDENS / "encoders" / "bert", "int8", "an encoder's weights are not quantised"),
    ):
        assert main(["convert", "--hf", str(folder), "--out", str(tmp_path / "own"), "--weights", form]) == 2
        assert message in capsys.readouterr().err
