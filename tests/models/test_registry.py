"""Specs from published config.json values, parameter counts, and keys that are refused by name."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints.formats import without_forms
from checkpoints.placement import whole_targets
from checkpoints.rules import expand
from ferrum_jax.models.families import registry
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.layers.attention import ForwardContext
from ferrum_jax.models.layers.embedding import Embedding
from ferrum_jax.models.spec import AttentionSpec, ExpertsSpec, KimiDeltaSpec, Mamba2Spec, MlpSpec, RopeSpec
from scripts.published import FAST, PUBLISHED
from tests.models.tiny import TINY
from tests.rows import rows_beside

# whatever the dtype
_FLOAT32 = (
    ".mlp.correction",
    ".a_log",
    ".a_log_by_head",
    ".skip",
    "rope_weights",
    "streams.mix",
    "streams.base",
    "streams.scale",
)
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED]


@functools.cache
def published(name: str):
    """(spec, parameters as structs) of a published config."""
    spec = registry.spec_of(PUBLISHED[name][0])
    return spec, registry.abstract_parts(spec, "bfloat16")[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_published_config_gives_the_published_number_of_parameters(name: str):
    spec, parameters = published(name)
    weights = whole_targets(parameters)
    assert sum(math.prod(x.shape) for x in weights.values()) == PUBLISHED[name][1]
    dtypes = {target: x.dtype for target, x in weights.items() if target not in dict(spec.forms)}
    ends = (*_FLOAT32, ".dt_bias") if isinstance(spec.recurrence, Mamba2Spec | KimiDeltaSpec) else _FLOAT32
    ends = (*ends, "head.weight") if spec.wide_head else ends
    exact = {target: dtypes.pop(target) for target in list(dtypes) if target.endswith(ends)}
    assert set(dtypes.values()) == {jnp.dtype("bfloat16")}
    assert set(exact.values()) <= {jnp.dtype("float32")}, "what chooses experts and what decays is never rounded"


@pytest.mark.parametrize("name", NAMES)
def test_weight_rules_name_every_parameter_once(name: str):
    spec, parameters = published(name)
    assert set(expand(registry.family_of(spec.architecture).weight_rules(spec))) == set(whole_targets(parameters))


@pytest.mark.parametrize("architecture", registry.FAMILIES)
def test_a_family_reads_every_key_that_it_has_a_default_of(architecture: str):
    family, read = registry.FAMILIES[architecture], set()
    for config, _ in PUBLISHED.values():
        if config["architectures"] == [architecture]:
            reader = ConfigReader(family.respell(without_forms(config)), family.defaults, architecture)
            family.read(reader)
            read |= reader.asked
    assert set(family.defaults) <= read


@pytest.mark.parametrize("model_type", registry.NOT_SERVED)
def test_a_family_that_is_asked_for_and_not_served_is_refused_with_what_is_missing(model_type: str):
    for read in (registry.spec_of, registry.is_encoder):
        with pytest.raises(ValueError, match=f"model_type is '{model_type}': its .* not served yet"):
            read({"architectures": ["SomeForCausalLM"], "model_type": model_type})


@pytest.mark.parametrize("architecture", registry.FAMILIES)
def test_an_unknown_key_is_an_error_that_names_it(architecture: str):
    config = next(config for config, _ in PUBLISHED.values() if architecture in config["architectures"])
    registry.spec_of(config)
    with pytest.raises(ValueError, match=r"keys that this architecture does not understand: logit_slope = 0\.5"):
        registry.spec_of(config | {"logit_slope": 0.5})
    registry.spec_of(config | {"logit_slope": None})


@pytest.mark.parametrize(
    ("key", "value", "named"), rows_beside(__file__)["quantised weights are refused by their format"]
)
def test_quantised_weights_are_refused_by_their_format(key, value, named):
    with pytest.raises(ValueError, match=f"{key} of config.json says {named}.*, which is not supported yet") as error:
        registry.spec_of(TINY | {key: value})
    assert "remove" not in str(error.value) and "give the checkpoint in bfloat16" in str(error.value)


def test_a_bound_model_can_be_differentiated_in_every_parameter():
    spec = registry.spec_of(TINY | {"num_hidden_layers": 1})
    graph, structs = registry.unbind(registry.abstract_model(spec))
    rng = np.random.default_rng(0)
    parameters = {name: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype) for name, x in structs.items()}
    ids = jnp.asarray([3, 1, 4, 1, 5], jnp.int32)

    @jax.jit
    @jax.grad
    def gradients_of(parameters):
        model = registry.bind(graph, parameters)
        logits = model.logits(model(ids, jnp.arange(5, dtype=jnp.int32), ForwardContext()))
        return jnp.sum(logits**2)

    gradients = gradients_of(parameters)
    assert set(gradients) == set(parameters)
    assert all(bool(np.any(np.asarray(g) != 0)) for g in gradients.values())


def test_random_weights_have_a_standard_deviation_of_two_hundredths():
    table = Embedding(300, 40, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)).weight[...]
    assert 0.018 < float(jnp.std(table)) < 0.022


def test_the_structure_of_a_model_does_not_depend_on_its_weights():
    spec = registry.spec_of(TINY | {"num_hidden_layers": 1})
    drawn = nnx.eval_shape(lambda: registry.family_of(spec.architecture).model(spec, rngs=nnx.Rngs(7)))
    assert registry.unbind(drawn) == registry.unbind(registry.abstract_model(spec))


def heads(**changes) -> AttentionSpec:
    return AttentionSpec(**{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16} | changes)


def experts(**changes) -> ExpertsSpec:
    sizes = {"layers": (0,), "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 12}
    return ExpertsSpec(**sizes | changes)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: heads(attn_logit_softcapping=-1.0), "attn_logit_softcapping is -1.0; it must be above 0"),
        (lambda: heads(rope=RopeSpec(rope_type="yarn", partial_rotary_factor=0.2)), "and 3 of its dimensions turn"),
        (lambda: MlpSpec(intermediate_size=0), "intermediate_size is 0; it must be at least 1"),
        (lambda: experts(intermediate_size=0), "moe_intermediate_size is 0; it must be at least 1"),
    ],
    ids=["cap", "rope", "mlp", "width of experts"],
)
def test_each_group_of_a_spec_refuses_what_cannot_be_by_the_name_of_its_key(made, message):
    with pytest.raises(ValueError, match=message):
        made()
