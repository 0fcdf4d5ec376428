"""What forms take of memory, counted by shapes of published models."""

import json
import math

import jax
import pytest

from checkpoints.stored_weight import weight_of
from ferrum_jax.config import EngineConfig
from ferrum_jax.models.families.registry import abstract_model, quantised_spec, spec_of, unbind
from ferrum_jax.planning.offline.bundle_order import BundleOrder
from scripts.published import config_of
from tests.support import GOLDENS

LLAMA3_8B = config_of("Llama-3-8B")


def bytes_of(targets: dict[str, jax.ShapeDtypeStruct]) -> dict[str, int]:
    """By weight, all its leaves together."""
    found: dict[str, int] = {}
    for name, target in targets.items():
        found[weight_of(name)] = found.get(weight_of(name), 0) + math.prod(target.shape) * target.dtype.itemsize
    return found


@pytest.mark.parametrize(
    ("form", "of_all", "of_layers"), [("int4-g128", 0.36, 0.26), ("int8", 0.57, 0.502), ("fp8", 0.57, 0.502)]
)
def test_a_quantised_llama_3_8b_takes_this_share_of_bfloat16(form, of_all, of_layers):
    spec = spec_of(LLAMA3_8B | {"num_hidden_layers": 2})
    quantised = quantised_spec(spec, form)
    dense, own = (bytes_of(unbind(abstract_model(s, "bfloat16"))[1]) for s in (spec, quantised))
    names = {name for name, _ in quantised.forms}
    layers, ends = (
        [sum(b for n, b in sizes.items() if (n in names) == is_in) for sizes in (own, dense)] for is_in in (True, False)
    )
    assert of_layers - 0.003 < layers[0] / layers[1] <= of_layers
    assert ends[0] == ends[1], "embedding, head and norms stay"
    whole = [16 * a + b for a, b in zip(layers, ends, strict=True)]  # of 32 layers
    assert of_all - 0.01 < whole[0] / whole[1] <= of_all


def test_a_plan_knows_the_forms_of_a_converted_folder_and_those_that_are_asked_for(tmp_path):
    """config.json of a folder that `convert --weights` made is the dense model's."""
    config = (GOLDENS / "qwen3" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    forms = {
        name: {"kind": "int8", "activations": "int8"}
        for name, _ in quantised_spec(spec_of(json.loads(config)), "int8").forms
    }
    about = {"format": 2, "dtype": "float32", "parameters": {}, "files": {}, "groups": []}

    def weights_bytes(folder, weights: str = "auto") -> int:
        order = EngineConfig(weights=weights, dtype="float32", max_model_len=64, num_blocks=16)
        return (
            BundleOrder(model=str(folder), target="cpu", config=order)
            .laid_out(lambda layout: 0)
            .layout.ledger.weights_bytes
        )

    dense = weights_bytes(tmp_path)
    (tmp_path / "ferrum_jax.json").write_text(json.dumps(about | {"forms": forms}))
    assert weights_bytes(tmp_path) == weights_bytes(GOLDENS / "qwen3", "int8") < dense
