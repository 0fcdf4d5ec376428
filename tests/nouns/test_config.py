"""EngineConfig is checked when it is made: a bad value is refused by its field, with what is allowed."""

import numpy as np
import pytest

from ferrum_jax.config import EngineConfig

REFUSED = [
    ("max_num_seqs", "16", "a whole number"),
    ("max_num_batched_tokens", 2048.0, "a whole number"),
    ("block_size", True, "a whole number or None"),
    ("max_model_len", 4096.0, "a whole number or None"),
    ("enable_prefix_caching", 1, "true or false"),
    ("mesh", None, "a text"),
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
