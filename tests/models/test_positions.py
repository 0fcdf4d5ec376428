"""Rotary positions of a config.json as transformers reads them: dynamic ones, odd numbers of dimensions that turn."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.families.registry import spec_of
from ferrum_jax.models.layers.rope import frequencies
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.models.spec import RopeSpec
from ferrum_jax.runtime.settled import settle
from scripts.published import config_of

LLAMA3_8B = config_of("Llama-3-8B")
PHI3_MINI_4K = config_of("Phi-3-mini-4k")
QWEN35_35B_A3B = config_of("Qwen3.5-35B-A3B")

DYNAMIC = LLAMA3_8B | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}


def test_a_dynamic_rope_takes_the_theta_of_the_longest_context_that_an_engine_has():
    """As transformers does for a text of that length; up to the trained length it is the plain rope."""
    spec = spec_of(DYNAMIC)
    plain, long = spec.fitted(8192).attention.rope, spec.fitted(32768).attention.rope
    np.testing.assert_array_equal(frequencies(plain, 128), frequencies(RopeSpec(rope_theta=5e5), 128))
    assert frequencies(long, 128)[-1] == pytest.approx(5e5 ** (-126 / 128) / 13, rel=1e-5)  # 4 * 4 - 3
    assert spec.fitted(100).digest_text() == spec.fitted(8192).digest_text() != spec.fitted(8193).digest_text()
    assert spec_of(DYNAMIC | {"rope_scaling": {"rope_type": "dynamic", "factor": 4}}) == spec


def test_a_context_may_be_as_long_as_the_factor_of_a_dynamic_rope_says():
    mesh = make_mesh(MeshShape(), jax.devices("cpu")[:1])
    assert settle(spec_of(DYNAMIC), EngineConfig(), mesh).limits.max_model_len == 8192
    for config, longest in ((DYNAMIC, 32768), (LLAMA3_8B, 8192)):
        settle(spec_of(config), EngineConfig(max_model_len=longest), mesh)
        with pytest.raises(
            ValueError, match=f"max_model_len is {longest + 1}, more than the model's {longest} positions"
        ):
            settle(spec_of(config), EngineConfig(max_model_len=longest + 1), mesh)


def test_of_an_odd_number_of_turning_dimensions_the_last_ones_pair_turns_too():
    """As in transformers: heads of 84 with 0.75 turn 64 dimensions, by exponents of 63."""
    odd = PHI3_MINI_4K | {"hidden_size": 32 * 84, "partial_rotary_factor": 0.75}
    rope = spec_of(odd).attention.rope
    assert rope.rotary_dim(84) == 64
    np.testing.assert_allclose(frequencies(rope, 84), [1e4 ** (-i / 63) for i in range(0, 64, 2)], rtol=1e-6)


def test_a_width_of_dense_layers_changes_nothing_where_there_are_none():
    text = QWEN35_35B_A3B["text_config"]
    wider = QWEN35_35B_A3B | {"text_config": text | {"intermediate_size": 5632}}
    assert spec_of(wider) == spec_of(QWEN35_35B_A3B)
