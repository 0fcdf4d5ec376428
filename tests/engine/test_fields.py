"""LLM takes EngineConfig's fields and vLLM's names for them; what has no meaning here says what to use instead."""

import dataclasses

import pytest

from ferrum_jax.config import EngineConfig
from ferrum_jax.tasks.calls.fields import ELSEWHERE, engine_fields, with_fields
from tests.rows import rows_beside


def test_fields_of_the_config_are_taken_as_they_are():
    values = {field.name: getattr(EngineConfig(), field.name) for field in dataclasses.fields(EngineConfig)}
    assert engine_fields(values) == values
    assert with_fields(None, {"max_model_len": 64, "seed": 7}) == EngineConfig(max_model_len=64, seed=7)
    assert with_fields(None, {}) is None


@pytest.mark.parametrize(("given", "fields"), rows_beside(__file__)["vllms names become fields"])
def test_vllms_names_become_fields(given, fields):
    assert engine_fields(given) == fields
    with_fields(None, fields)


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_a_foreign_name_says_what_to_use_unless_it_asks_for_nothing(name):
    harmless, instead = ELSEWHERE[name]
    assert engine_fields(dict.fromkeys([name], harmless[0]) if harmless else {}) == {}
    with pytest.raises(ValueError, match=f"{name} is 'something', a setting that is not here") as refused:
        engine_fields({name: "something"})
    assert str(refused.value).endswith(instead)


def test_memory_of_a_gpu_is_given_in_bytes_or_blocks():
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 0.9, .* kv_memory_bytes or num_blocks"):
        engine_fields({"gpu_memory_utilization": 0.9})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_model_length": 5}, TypeError, r"no argument max_model_length \(did you mean max_model_len\?\)"),
        ({"mesh": "tp=2", "tensor_parallel_size": 2}, ValueError, "tensor_parallel_size and mesh are both given"),
        ({"kv_dtype": "int8", "kv_cache_dtype": "fp8"}, ValueError, "kv_cache_dtype and kv_dtype are both given"),
        ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size is 0; it must be a whole number"),
        ({"tensor_parallel_size": True}, ValueError, "tensor_parallel_size is True"),
        ({"trust_remote_code": True}, ValueError, "no code of a checkpoint is run"),
        ({"enforce_eager": 0}, ValueError, "enforce_eager is 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        engine_fields(given)


def test_a_config_and_fields_go_together_unless_they_contradict():
    config = EngineConfig(max_num_seqs=16)
    assert with_fields(config, {"max_model_len": 64}) == EngineConfig(max_num_seqs=16, max_model_len=64)
    assert with_fields(config, {"max_num_seqs": 16}) == config
    with pytest.raises(ValueError, match=r"max_num_seqs is 32, and config has max_num_seqs=16; give it once"):
        with_fields(config, {"max_num_seqs": 32})
    drafting = EngineConfig(speculative_config={"method": "ngram"})
    assert with_fields(drafting, {"speculative_config": '{"method": "ngram"}'}) == drafting
    with pytest.raises(ValueError, match=r"speculative_config is .*'mtp'.*; give it once"):
        with_fields(drafting, {"speculative_config": {"method": "mtp"}})
    with pytest.raises(ValueError, match="dtype is 'half'"):
        with_fields(config, {"dtype": "half"})
