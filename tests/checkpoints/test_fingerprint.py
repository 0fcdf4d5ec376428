"""The fingerprint: the same weights have the same one, wherever they came from, and others have another."""

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import convert, fingerprint, open_checkpoint
from checkpoints.fingerprint import _gather, _sample_indices, sample
from tests.checkpoints.folders import HARMLESS, RULES, targets, tensors, write_sharded, write_single

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
