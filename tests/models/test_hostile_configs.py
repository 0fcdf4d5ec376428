"""A config.json that means harm, or is damaged, ends at once in one error by name, whatever stands in it."""

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import open_checkpoint
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.io.files.json_files import read_json
from ferrum_jax.models.families import registry
from ferrum_jax.models.families.bounds import BOUNDS
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.layers.rope import frequencies
from ferrum_jax.models.spec import ModelSpec
from scripts.published import FAST, PUBLISHED, PUBLISHED_ENCODERS, config_of
from tests.distributed.folder import write_model

QWEN3_30B_A3B = config_of("Qwen3-30B-A3B")

NAMES = (*FAST, "Llama-3.2-1B", "Phi-3-mini-128k", "BERT-base-uncased", "BGE-M3")  # every family, every kind of rope
CONFIGS = [(PUBLISHED | PUBLISHED_ENCODERS)[name][0] for name in dict.fromkeys(NAMES)]
KINDS = [config["architectures"] for config in CONFIGS]
LATER = [config for config, _ in PUBLISHED.values() if config["architectures"] not in KINDS]
SLOW = [pytest.param(config, marks=pytest.mark.slow) for config in LATER]
HOSTILE = [0, -1, 10**9, 10**12, 10**400, 0.0, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf, True, None]
HOSTILE += ["x", "", [], {}, [[]], [None], [math.nan], [10**30], ["x"] * 3, [0] * 100_000, {"a": {}}, 2.5]


def read(config: dict[str, Any]) -> Any:
    return registry.encoder_spec_of(config) if registry.is_encoder(config) else registry.spec_of(config)


def places(config: dict[str, Any], *before: str) -> Iterator[tuple[str, ...]]:
    """The path of every value in a config."""
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from places(value, *before, key)


def changed(config: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    inner = config
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return config


@pytest.mark.parametrize("config", [*CONFIGS, *SLOW], ids=lambda config: config["architectures"][0])
def test_every_value_is_taken_or_refused_and_never_breaks_the_reader(config):
    for place in places(config):
        for value in HOSTILE:
            try:
                spec = read(changed(config, place, value))
            except ValueError as error:
                assert len(str(error)) < 5000
                continue
            if isinstance(spec, ModelSpec):
                ropes = {spec.attention_of(layer).rope for layer in range(min(spec.num_hidden_layers, 100))} - {None}
                for rope in ropes:
                    assert all(map(math.isfinite, frequencies(rope, spec.attention.head_dim))), (place, value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(HOSTILE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(BOUNDS)), inner, max_size=4),
    max_leaves=6,
)


@given(
    st.sampled_from(CONFIGS), st.dictionaries(st.sampled_from(sorted({*BOUNDS, *QWEN3_30B_A3B})), VALUES, max_size=4)
)
def test_whatever_values_a_config_has_it_is_read_or_refused(config, values):
    with contextlib.suppress(ValueError):
        read(config | values)


def test_a_number_that_a_family_reads_without_bounds_is_found():
    with pytest.raises(AssertionError, match="new_width is read as a number and has no BOUNDS"):
        ConfigReader({"new_width": 3}).get("new_width", 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "nested too deeply"),
        ('{"rms_norm_eps": NaN}', "NaN, which is not a number"),
        ('{"rope_theta": -Infinity}', "-Infinity, which is not a number"),
        ('{"rope_theta": 1e999}', "1e999, which is not a number"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "cannot be read as JSON"),
    ],
)
def test_a_file_that_is_no_plain_json_is_an_error_that_names_it(tmp_path, text, says):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config.json cannot be read as JSON .*{says}|config.json {says}"):
        read_json(tmp_path / "config.json")


def test_numbers_that_nobody_reads_may_be_as_large_as_they_are_in_the_field(tmp_path):
    values = {"model_max_length": 1000000000000000019884624838656}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    assert read_json(tmp_path / "tokenizer_config.json") == values


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_token_that_the_model_cannot_draw_is_refused_by_its_file(tmp_path, file):
    folder = write_model(tmp_path / "model")
    values = json.loads((folder / file).read_text()) if file == "config.json" else {}
    (folder / file).write_text(json.dumps(values | {"eos_token_id": [303, 304]}))
    with pytest.raises(
        ValueError, match=rf"{file}'s eos_token_id names \[304\], and the model's token ids are 0 to 303"
    ):
        ModelSource.of_checkpoint(open_checkpoint(folder))
