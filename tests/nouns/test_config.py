"""EngineConfig is checked when it is made: a bad value is refused by its field, with what is allowed."""

import types

import numpy as np
import pytest

from ferrum_jax.config import EngineConfig

REFUSED = [
    ("max_num_seqs", "16", "a whole number"),
    ("max_num_batched_tokens", 2048.0, "a whole number"),
    ("block_size", True, "a whole number or None"),
    ("max_model_len", 4096.0, "a whole number or None"),
    ("enable_prefix_caching", 1, "true or false"),
    ("mesh", 4, "a text"),
    ("mesh", "tp=0", "must name numbers of devices"),
    ("dtype", "int4", "must be one of"),
    ("seed", 2**64, "64 bits"),
    ("seed", None, "a whole number"),
    ("num_blocks", 0, "at least 1"),
    ("block_size", 24, "a power of two"),
    ("host_cache_bytes", -1, "0 (none) or more"),
]


@pytest.mark.parametrize(("field", "value", "message"), REFUSED)
def test_a_bad_value_is_refused_by_its_field(field, value, message):
    with pytest.raises(ValueError) as refused:
        EngineConfig(**{field: value})
    assert str(refused.value).startswith(f"{field} is {value!r}; it must") and message in str(refused.value)


def test_a_step_must_hold_a_token_of_every_row():
    with pytest.raises(ValueError, match="max_num_batched_tokens is 8, less than max_num_seqs, 16"):
        EngineConfig(max_num_seqs=16, max_num_batched_tokens=8)


def test_numbers_of_numpy_are_numbers_and_a_seed_has_64_bits():
    assert EngineConfig(max_num_seqs=np.int32(4), seed=2**64 - 1).max_num_seqs == 4


def test_devices_are_named_by_ids_and_devices_or_a_mesh_stand_for_theirs():
    here = [types.SimpleNamespace(id=i) for i in range(4)]
    mesh = types.SimpleNamespace(axis_names=("x",), devices=np.array(here[2:]))
    assert EngineConfig(devices=mesh).devices == EngineConfig(devices=here[2:]).devices == (2, 3)
    assert EngineConfig(devices=[3, 1]).among(here) == [here[3], here[1]]
    assert EngineConfig().among(here) == here
    for bad, why in (((4,), r"names \[4\], and there are"), ((1, 1), "one of them twice")):
        with pytest.raises(ValueError, match=why):
            EngineConfig(devices=bad).among(here)
    for bad in ((), "tpu", 3, ("a",), (True,)):
        with pytest.raises(ValueError, match="devices is"):
            EngineConfig(devices=bad)
