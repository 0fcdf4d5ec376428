"""Every published format of quantised weights says what transformers says of the decoded weights, in float64."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import open_checkpoint
from ferrum_jax.models.families.registry import abstract_model, bind, spec_of, unbind
from ferrum_jax.models.layers.attention import ForwardContext
from scripts.published import config_of
from tests.models.test_goldens import parameters_of
from tests.rows import rows_beside
from tests.support import GOLDENS

DEEPSEEK_V3 = config_of("DeepSeek-V3")

FOLDER = GOLDENS / "quantised"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/golden.npz"))
FAST = ("w4a16_zeros", "w8a8_experts")
ERROR = 1e-5  # of the largest logit; where activations are rounded too, for no input lies on a tie (see SEEDS)


def test_there_is_a_golden_of_every_format():
    methods = [json.loads((FOLDER / name / "config.json").read_text())["quantization_config"] for name in NAMES]
    assert {method["quant_method"] for method in methods} == {"awq", "compressed-tensors", "fp8", "gptq"}
    assert len(NAMES) == 21


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_logits_and_greedy_tokens_are_those_of_the_decoded_weights(name: str):
    """The reference's own tokens go in; each next one must come out, unless its two best logits nearly tie."""
    checkpoint, golden = open_checkpoint(FOLDER / name), dict(np.load(FOLDER / name / "golden.npz"))
    spec = spec_of(checkpoint.config, stored=checkpoint.stored_forms)
    parameters = parameters_of(FOLDER / name, spec)

    @jax.jit
    def forward(parameters, ids):
        model = bind(unbind(abstract_model(spec))[0], parameters)
        return model.logits(model(ids, jnp.arange(len(ids), dtype=jnp.int32), ForwardContext()))

    for i, last in enumerate(golden["last_logits"]):
        prompt, tokens, best = golden[f"prompt_{i}"], golden[f"tokens_{i}"], golden[f"best_{i}"]
        ids = np.zeros(80, np.int32)
        ids[: len(prompt) + 63] = np.concatenate((prompt, tokens[:-1]))
        after = np.asarray(forward(parameters, ids))[len(prompt) - 1 : len(prompt) + 63]
        allowed = ERROR * np.max(np.abs(last))
        assert np.max(np.abs(after[0] - last)) < allowed
        assert np.max(np.abs(np.max(after, axis=-1) - best[:, 0])) < allowed
        clear = best[:, 0] - best[:, 1] >= 1e-4
        np.testing.assert_array_equal(after.argmax(axis=-1)[clear], tokens[clear])


@pytest.mark.parametrize(
    ("weights", "others", "message"),
    rows_beside(__file__)["a config that does not fit the model is refused before a weight is read"],
)
def test_a_config_that_does_not_fit_the_model_is_refused_before_a_weight_is_read(weights, others, message):
    config = json.loads((FOLDER / "w4a16" / "config.json").read_text())
    said = config["quantization_config"]
    (group,) = said["config_groups"].values()
    group["weights"] |= weights
    group["targets"] = others.get("targets", group["targets"])
    said["ignore"] = others.get("ignore", said["ignore"])
    with pytest.raises(ValueError, match=message):
        abstract_model(spec_of(config))


def test_deepseek_v31_is_read_as_it_is_published():
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    spec = spec_of(DEEPSEEK_V3 | {"num_hidden_layers": 4, "quantization_config": said | {"scale_fmt": "ue8m0"}})
    assert all(form.has_power_scales and form.activation_group == 128 for _, form in spec.forms) and spec.forms


def test_experts_that_config_json_rounds_differently_are_refused():
    config = json.loads((FOLDER / "w8a8_experts" / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = groups["group_0"] | {"targets": ["re:.*experts.1.*"], "input_activations": None}
    with pytest.raises(ValueError, match=r"mlp\.experts\.\w+ is of one form, and config.json says that"):
        spec_of(config)
