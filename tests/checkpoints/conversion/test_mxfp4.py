"""MXFP4 tensors decode to what the specification says, wherever they are sliced, and are kept packed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from checkpoints import Rule, TensorSlice, convert, open_checkpoint, to_huggingface
from checkpoints.formats import join, mxfp4, scheme_of
from checkpoints.formats.scheme import Module
from tests.checkpoints.conversion.test_back import assert_same
from tests.oracles import mxfp4 as oracle

RULES = (
    Rule(source="experts.gate_up", target="gate", part=TensorSlice(axis=2, step=2, transposed=True)),
    Rule(source="experts.gate_up", target="up", part=TensorSlice(axis=2, start=1, step=2, transposed=True)),
)
SHAPE = (3, 5, 64)
CONFIG = {"quantization_config": {"quant_method": "mxfp4"}}


def drawn(*shape: int, low: int = 100, high: int = 150) -> tuple[np.ndarray, np.ndarray]:
    """Blocks and scales of a tensor [.., out, in]."""
    rng = np.random.default_rng(0)
    scales = (*shape[:-1], shape[-1] // 32)
    return rng.integers(0, 256, (*scales, 16), np.uint8), rng.integers(low, high, scales, np.uint8)


def packed(blocks: np.ndarray, scales: np.ndarray):
    return mxfp4.pack(Module(name="x", form=mxfp4.FORM, tensors={"_blocks": blocks, "_scales": scales}))


def test_every_byte_with_every_scale_is_what_the_specification_says():
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (255, 1, 1))
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)
    expected = oracle.decode(blocks, scales)
    expected[np.abs(expected) > float(np.finfo(np.float32).max)] *= np.inf
    found = np.asarray(packed(blocks, scales).swapaxes(-1, -2)).astype(np.float64)
    np.testing.assert_array_equal(found, expected)


def test_slices_and_exchanged_axes_are_those_of_the_decoded_array():
    tensor = packed(*drawn(4, 6, 64))
    whole = np.asarray(tensor)
    assert tensor.shape == whole.shape == (4, 64, 6)
    everything = slice(None)
    for index in [(slice(1, 3),), (slice(0, 4, 3), everything, slice(1, None, 2)), (everything, slice(0, 64))]:
        np.testing.assert_array_equal(np.asarray(tensor[index]), whole[index])
    part = TensorSlice(axis=2, start=1, step=2, transposed=True)
    np.testing.assert_array_equal(np.asarray(part.of(tensor)), part.of(whole))
    with pytest.raises(ValueError, match="x is cut along its inputs, which share scales"):
        tensor[everything, slice(0, 32)]


def folder(path, blocks, scales):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {"experts.gate_up_blocks": blocks, "experts.gate_up_scales": scales}
    safetensors.numpy.save_file({f"model.{name}": x for name, x in tensors.items()}, path / "model.safetensors")
    return path


def test_a_folder_loads_and_converts_to_the_packed_weights_and_back(tmp_path):
    blocks, scales = drawn(3, 10, 64)
    source = folder(tmp_path / "hf", blocks, scales)
    rules = [Rule(source=f"model.{r.source}", target=r.target, part=r.part) for r in RULES]
    leaves = mxfp4.FORM.leaves(SHAPE)
    targets = {
        f"{name}.{leaf}": jax.ShapeDtypeStruct(*leaves[leaf]) for name in ("gate", "up") for leaf in ("codes", "scales")
    }
    assert convert(source, tmp_path / "own", rules=rules, harmless=(), targets=targets).max_cast_error == 0
    for path in (source, tmp_path / "own"):
        params = open_checkpoint(path).load(rules=rules, harmless=(), targets=targets)
        for first, name in enumerate(("gate", "up")):
            np.testing.assert_array_equal(params[f"{name}.codes"], blocks[:, first::2].reshape(3, 5, 32))
            np.testing.assert_array_equal(params[f"{name}.scales"], scales[:, first::2])
    assert open_checkpoint(tmp_path / "own").stored_forms.forms == (("gate", mxfp4.FORM), ("up", mxfp4.FORM))
    assert to_huggingface(tmp_path / "own", tmp_path / "back", rules=rules) == 2
    assert_same(source, tmp_path / "back")


def test_blocks_and_scales_that_do_not_fit_are_refused():
    blocks, scales = drawn(2, 10, 64)
    scheme = scheme_of(CONFIG)
    wrong = {"m.experts.x_blocks": blocks, "m.experts.x_scales": scales[..., :1]}
    with pytest.raises(ValueError, match=r"x_blocks \[2, 10, 2, 16\] and m.experts.x_scales \[2, 10, 1\] uint8 are no"):
        join(wrong, scheme)
    with pytest.raises(ValueError, match=r"m.experts.x_scales is missing beside m.experts.x_blocks"):
        join({"m.experts.x_blocks": blocks}, scheme)
    assert join({"y": scales}, scheme) == {"y": scales}
    nan = packed(blocks, np.where(np.arange(2) == 1, 255, scales).astype(np.uint8))
    with pytest.raises(ValueError, match=r"x_scales is NaN at \[0, 0, 1\]; a scale must be a number"):
        np.asarray(nan.leaf("scales"), jnp.float32)
