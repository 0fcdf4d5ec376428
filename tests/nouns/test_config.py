"""EngineConfig is checked when it is made: a bad value is refused by its field, with what is allowed.

One table says what an object may hold, and one error has all that is wrong in it.
"""

import types

import numpy as np
import pytest

from ferrum_jax.config import EngineConfig
from ferrum_jax.io.error_text import Elsewhere
from ferrum_jax.io.error_text.known_fields import NAMES, TRUTH, Fields, Known, number, one_of, require, whole
from tests.rows import rows_beside

ROWS = rows_beside(__file__)

REFUSED = [
    *ROWS["refused"],
    ("seed", 2**64, "64 bits"),
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


FIELDS = Fields(
    {
        "size": Known(whole(1)),
        "rate": Known(number(0), 0.5),
        "is_fast": Known(TRUTH, False),
        "kind": Known(one_of("a", "b", None)),
        "names": Known(NAMES, []),
        "pad": Elsewhere((False, None), "leave it out"),
    }
)


def test_each_field_has_its_value_or_default_and_no_effect_is_left_out():
    found = FIELDS.read({"size": 3, "kind": "b", "rate": None, "pad": False})
    assert found == {"size": 3, "rate": 0.5, "is_fast": False, "kind": "b", "names": []}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *ROWS["a value of another kind and a key that is not here are refused"],
        ({"rate": float("nan")}, "rate is nan; it must be a number, 0 or more"),
    ],
)
def test_a_value_of_another_kind_and_a_key_that_is_not_here_are_refused(given, said):
    with pytest.raises(ValueError) as error:
        FIELDS.read({"size": 1} | given if given else {})
    assert str(error.value) == said


def test_one_error_has_all_faults_in_the_order_of_the_table():
    with pytest.raises(ValueError, match=r"^size is 'x'; .*; rate is -1; .*; odd is 1, .*; pad is True, .*"):
        FIELDS.read({"pad": True, "odd": 1, "rate": -1, "size": "x"})


def test_a_table_has_sentences_of_its_own():
    fields = Fields({"a": Known(whole(2), 2)}, wrong="{name} = {value}", refused="no {name}", unknown="what is {name}?")
    assert fields.problems({"a": 1, "b": 2}) == ["a = 1", "what is b?"]


def test_a_value_alone_is_required_of_a_kind():
    assert require("n", 4, whole(1)) == 4
    with pytest.raises(ValueError, match="n is 0; it must be a whole number, 1 or more"):
        require("n", 0, whole(1))


def test_an_empty_name_of_a_folder_keeps_no_executables():
    assert EngineConfig(compilation_cache_dir="").compilation_cache_dir is None
