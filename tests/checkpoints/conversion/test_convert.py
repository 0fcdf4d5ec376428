"""Convert: a Hugging Face folder becomes ours, with a summary of what the cast cost."""

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import convert, open_checkpoint
from tests.checkpoints.folders import HARMLESS, RULES, parameters, targets, tensors, write_sharded, write_single


def run(source, out, dtype=None, wanted=None):
    return convert(source, out, rules=RULES, harmless=HARMLESS, targets=wanted or targets(), dtype=dtype)


def test_a_converted_checkpoint_holds_the_cast_weights(tmp_path):
    made = tensors()
    summary = run(write_single(tmp_path / "hf", made), tmp_path / "out", "bfloat16")
    params = open_checkpoint(tmp_path / "out").load(rules=(), harmless=(), targets=targets("bfloat16"))
    expected = parameters(made)
    error = max(np.abs(v.astype(jnp.bfloat16).astype(np.float64) - v).max() for v in expected.values())
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(params[name]), value.astype(jnp.bfloat16))
    assert (summary.tensors, summary.parameters, summary.dtype) == (6, 4, "bfloat16")
    assert summary.bytes == 2 * sum(value.size for value in expected.values())
    assert summary.max_cast_error == error > 0


def test_without_a_dtype_nothing_is_cast_and_the_source_is_recognised(tmp_path):
    made = tensors()
    one = run(write_single(tmp_path / "one", made), tmp_path / "out1")
    two = run(write_sharded(tmp_path / "two", made), tmp_path / "out2")
    other = run(write_single(tmp_path / "three", tensors(seed=1)), tmp_path / "out3")
    assert (one.max_cast_error, one.dtype) == (0.0, "float32")
    assert one.source_digest == two.source_digest != other.source_digest


def test_a_weight_beyond_the_range_of_the_dtype_is_refused_and_nothing_is_written(tmp_path):
    made = tensors()
    made["model.layers.0.q_proj.weight"][3, 4] = 1e6
    with pytest.raises(ValueError, match=r"layers.0.attention.q.weight has weights beyond the range of float16"):
        run(write_single(tmp_path / "hf", made), tmp_path / "out", "float16")
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_not_empty_is_refused_before_the_weights_are_read(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        run(tmp_path / "nowhere", tmp_path / "out")
