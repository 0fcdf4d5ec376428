"""SpeculativeConfig is vLLM's speculative_config: every key is read by the method that is named, or refused."""

import dataclasses
import json
import math

import pytest

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.speculative import METHODS, SPECULATIVE_ELSEWHERE, SpeculativeConfig, speculative_of
from tests.rows import rows_beside

ROWS = rows_beside(__file__)

OF_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
OF_SUFFIX = ROWS["of suffix"]


def set_fields(config: SpeculativeConfig) -> dict:
    return {name: value for name, value in dataclasses.asdict(config).items() if value is not None}


@pytest.mark.parametrize("given", [OF_NGRAM, OF_SUFFIX, {"method": "mtp", "num_speculative_tokens": 1}])
def test_a_mapping_its_json_text_and_an_instance_are_one_config(given):
    made = SpeculativeConfig(**given)
    assert set_fields(made) == given
    assert repr(made) == f"SpeculativeConfig({', '.join(f'{name}={value!r}' for name, value in given.items())})"
    assert speculative_of(given) == speculative_of(json.dumps(given)) == speculative_of(made) == made
    assert speculative_of(dataclasses.asdict(made)) == made, "what a bundle keeps is read again"
    assert EngineConfig(speculative_config=given) == EngineConfig(speculative_config=json.dumps(given))
    assert hash(EngineConfig(speculative_config=given)) == hash(EngineConfig(speculative_config=made))


def test_nothing_is_drafted_by_default_and_for_a_null():
    assert EngineConfig().speculative_config is None
    assert EngineConfig(speculative_config="null") == EngineConfig()


def test_each_method_has_defaults_of_its_own_keys_alone():
    found = {method: set_fields(SpeculativeConfig(method=method)) for method in METHODS}
    assert found["ngram"] == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
    }
    assert found["suffix"] == ROWS["defaults of suffix"]
    assert found["mtp"] == {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize(("given", "found"), ROWS["one end of the lookup moves the default of the other"])
def test_one_end_of_the_lookup_moves_the_default_of_the_other(given, found):
    config = SpeculativeConfig(method="ngram", **given)
    assert [config.prompt_lookup_min, config.prompt_lookup_max] == found


@pytest.mark.parametrize(("depth", "most"), [(8, 8), (24, 24), (100, 64)])
def test_a_draft_from_the_tree_is_no_longer_than_the_tree_is_deep(depth, most):
    assert SpeculativeConfig(method="suffix", suffix_decoding_max_tree_depth=depth).num_speculative_tokens == most


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp"])
def test_vllms_names_of_a_checkpoints_own_head_are_mtp(name):
    assert speculative_of({"method": name}) == SpeculativeConfig(method="mtp")


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash", "draft_model", "medusa", "mlp_speculator"])
def test_a_method_of_a_second_model_says_what_to_use_instead(name):
    with pytest.raises(ValueError, match=f"method is '{name}', which is not here: no second model .* 'ngram'"):
        EngineConfig(speculative_config={"method": name, "model": "a/draft", "num_speculative_tokens": 3})


@pytest.mark.parametrize("name", sorted(SPECULATIVE_ELSEWHERE))
def test_a_key_of_vllms_that_is_not_here_says_what_to_do_unless_it_asks_for_nothing(name):
    harmless, instead = SPECULATIVE_ELSEWHERE[name]
    for value in harmless:
        assert speculative_of({"method": "ngram", name: value}) == SpeculativeConfig(method="ngram")
    with pytest.raises(ValueError, match=f"speculative_config: {name} is 'x', a setting that is not here") as refused:
        speculative_of({"method": "ngram", name: "x"})
    assert str(refused.value).endswith(instead)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *ROWS["what cannot be meant is refused by its key"],
        ({**OF_NGRAM, "prompt_lookup_min": 4}, "prompt_lookup_min is 4, more than prompt_lookup_max, 3"),
        ({**OF_SUFFIX, "suffix_decoding_min_token_prob": 1.1}, "is 1.1; it must be a number from 0 to 1"),
        ({**OF_SUFFIX, "suffix_decoding_max_spec_factor": math.inf}, "is inf; it must be a number from 0 to 1000000"),
        ({**OF_SUFFIX, "suffix_decoding_max_cached_requests": -1}, "is -1; it must be a whole number, 0 or more"),
        ({**OF_SUFFIX, "prompt_lookup_max": 3}, "prompt_lookup_max is 3, which only the method ngram reads"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_key(given, message):
    with pytest.raises(ValueError, match=f"^speculative_config: .*{message}"):
        EngineConfig(speculative_config=given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *ROWS["what is no object is refused"],
        ("[" * 100_000, r"\(100,000 characters\); it must be JSON"),
    ],
)
def test_what_is_no_object_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(speculative_config=given)
