"""SamplingParams are checked when they are made: a bad value is refused by name, with what is allowed."""

import json
import math

import numpy as np
import pytest

from ferrum_jax.core.params_codec import params_to_json
from ferrum_jax.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams
from tests.rows import rows_beside

ROWS = rows_beside(__file__)

TOO_MANY = MAX_LOGIT_BIAS + 1
REFUSED = ROWS["refused"] | {
    "temperature": [-0.1, math.nan, math.inf, 10**400, "hot", None],
    "seed": [2**64, -(2**63) - 1, 1.5],
    "prompt_logprob_token_ids": [[], 5, [5, [6]], [[5.5]], [[1], list(range(129))], [[1] * 128] * (1 << 16)],
    "stop_token_ids": [["a"], 5, range(MAX_STOP_IDS + 1)],
    "logit_bias": [{5: 100.5}, {5: math.nan}, {5: math.inf}, {"5": 1.0}, [5, 1.0], dict.fromkeys(range(TOO_MANY), 1.0)],
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_bad_value_is_refused_by_its_name(field):
    for value in REFUSED[field]:
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value})


ACCEPTED = ROWS["accepted"] | {
    "top_k": [-1, 10**30],
    "seed": [2**64 - 1, -(2**63)],
    "stop_token_ids": [range(MAX_STOP_IDS)],
    "logit_bias": [dict.fromkeys(range(MAX_LOGIT_BIAS), -100), {5: -math.inf}],
}


@pytest.mark.parametrize("field", ACCEPTED)
def test_the_limits_themselves_are_accepted(field):
    for value in ACCEPTED[field]:
        assert getattr(SamplingParams(**{field: value}), field) == value


def test_more_least_tokens_than_most_are_refused_naming_both():
    with pytest.raises(ValueError, match=r"min_tokens is 5, more than max_tokens, 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_a_number_beyond_every_float_is_not_spelled_out():
    with pytest.raises(ValueError, match=r"temperature is a whole number of 16610 bits, too large; it must be 0"):
        SamplingParams(temperature=10**5000)


def test_one_stop_string_is_a_list_of_one_and_none_is_no_stop():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_unknown_parameters_are_all_named_with_what_is_known():
    with pytest.raises(ValueError, match=r"unknown sampling parameters \['temprature', 'tmep'\].*temperature"):
        SamplingParams.from_dict({"temprature": 1.0, "tmep": 3, "n": 2})


def test_known_parameters_come_from_a_json_object():
    assert SamplingParams.from_dict({"n": 2, "top_p": 0.5}) == SamplingParams(n=2, top_p=0.5)


@pytest.mark.parametrize("wishes", [{"stop": "a"}, {"echo": True}])
def test_what_needs_the_text_is_refused_where_no_text_is_made(wishes):
    with pytest.raises(ValueError, match=f"detokenize is False beside {next(iter(wishes))}, which needs the text"):
        SamplingParams(detokenize=False, **wishes)


@pytest.mark.parametrize(
    "name, value, harmless, words",
    [
        ("best_of", 4, 1, "best_of is 4, a setting that is not here: ask for n choices"),
        ("logits_processors", [len], None, "logits_processors is .*: logit_bias, allowed_token_ids, bad_words and"),
        ("guided_decoding", {"json": {}}, None, r"guided_decoding is .*: structured_outputs=StructuredOutputsParams"),
    ],
)
def test_another_engines_name_is_taken_where_it_asks_for_nothing(name, value, harmless, words):
    assert SamplingParams(**{name: harmless}) == SamplingParams()
    with pytest.raises(ValueError, match=words):
        SamplingParams(**{name: value})


def test_an_unknown_parameter_is_told_with_those_that_there_are():
    with pytest.raises(TypeError, match=r"SamplingParams has no temprature; it has allowed_token_ids, .*temperature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("of", [np.int64, np.int32, np.float64, np.float32, float])
def test_whole_numbers_of_columns_with_gaps_and_of_numpy_are_taken(of):
    fields = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
    found = SamplingParams(**dict.fromkeys(fields, of(3)), temperature=of(2), logit_bias={of(3): of(1)})
    assert found == SamplingParams(**dict.fromkeys(fields, 3), temperature=2.0, logit_bias={3: 1.0})
    assert found.with_seed(of(4)).seed == 4 and json.dumps(params_to_json(found))
    for ids in ([of(3), 4], (of(3), of(4)), np.array([3, 4], of)):
        found = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, prompt_logprob_token_ids=[ids, [5]])
        assert [*found.stop_token_ids, *found.allowed_token_ids] == [3, 4, 3, 4]
        assert all(type(each) is int for each in [*found.stop_token_ids, *found.named_rows[0]])
    for wrong in (of(3) + 0.5, np.bool_(True), np.float32("nan")):
        with pytest.raises(ValueError, match=r"max_tokens is .*; it must be a whole number"):
            SamplingParams(max_tokens=wrong)
