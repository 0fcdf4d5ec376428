"""An engine on a mesh says what it says on one device, and the reference. A case is a process with simulated devices.

CPU seconds: llama_linear 76, mistral 100, gpt_oss_mxfp4 144, qwen3_next 174 on all meshes. Run one by one (-k), for two
cores that others use take four times as long.
"""

import json
from types import SimpleNamespace

import pytest

from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from tests.engine.test_goldens import check_equal, golden_prompts
from tests.golden_table import TABLE, goldens
from tests.sharding.same import assert_same, run_on
from tests.support import GOLDENS

# One of each kind on every way to divide four devices: dense, a window, experts, recurrent layers beside experts.
FAMILIES = goldens("mesh", "all")
WAYS = ("tp=2", "tp=4", "dp=2,tp=2", "ep=4")  # "ep=4" is "dp=4"
WAYS_OF_EXPERTS = (*WAYS, "dp=2,tp=2,ep=2")
# Quantised weights: activations rounded by a scale of all devices, an order of inputs across them, packed experts.
QUANTISED = {
    "quantised/w8a8": WAYS,
    "quantised/w8a8_experts": WAYS_OF_EXPERTS,
    "quantised/w4a16_experts": ("tp=2", "dp=2,tp=2", "dp=2,tp=2,ep=2"),  # 64 inputs in groups of 32
    "quantised/fp8_blocks": ("tp=2", "dp=2,tp=2"),
    "quantised/gptq_v2_ordered": ("tp=2", "dp=2,tp=2"),
}

# Every other golden on one of them, as its heads, widths and experts divide. Few KV heads are repeated, an uneven
# vocabulary is padded; there are experts, recurrent layers, sinks, fused projections.
CASES = [(name, row["mesh"]) for name, row in TABLE.items() if name not in FAMILIES]


@pytest.mark.slow
def test_data_shards_with_shared_experts_and_a_window_match_one_device():
    one, many = run_on("mixtral_window", "tp=1", "dp=2,tp=2")
    check("mixtral_window", "dp=2,tp=2", one, many)
    assert many["weights_bytes"] < one["weights_bytes"] / 2


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("golden", "mesh"), CASES)
def test_tokens_and_hits_on_a_mesh_equal_one_device_and_logits_agree(golden, mesh):
    one, many = run_on(golden, "tp=1", mesh)
    check(golden, mesh, one, many)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mesh_of_four_devices_says_the_same_with_hits_and_preemption(family):
    check_all(family, WAYS_OF_EXPERTS if has_experts(family) else WAYS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "golden", [g if g == "quantised/w8a8" else pytest.param(g, marks=pytest.mark.long) for g in QUANTISED]
)
def test_quantised_weights_on_every_mesh_match_one_device(golden):
    check_all(golden, QUANTISED[golden])


def test_every_mesh_has_four_devices_or_two():
    assert {str(mesh) for _, mesh in CASES} == {"tp=4", "tp=2", "dp=2,tp=2", "dp=4", "dp=4,ep=1"}
    assert MeshShape.parse("ep=4") == MeshShape.parse("dp=4")


def check_all(golden: str, ways: tuple[str, ...]) -> None:
    one, *others = run_on(golden, "tp=1", *ways)
    for mesh, many in zip(ways, others, strict=True):
        check(golden, mesh, one, many)


def has_experts(golden: str) -> bool:
    return any(
        config_of(golden).get(name)
        for name in ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts")
    )


def config_of(golden: str) -> dict:
    return json.loads((GOLDENS / golden / "config.json").read_text())


def check(golden: str, mesh: str, one: dict, many: dict) -> None:
    assert_same(golden, mesh, one, many)
    _, tokens, best = golden_prompts(golden)
    for said in (one, many):  # 64 of each prompt
        check_equal([SimpleNamespace(token_ids=row) for row in said["golden"]], tokens, best)
    shape = MeshShape.parse(mesh)
    is_divided = shape.tp > 1 or (has_experts(golden) and shape.ep > 1)
    assert (many["weights_bytes"] < one["weights_bytes"]) == is_divided, mesh
    config = config_of(golden)
    copies = shape.tp if "kv_lora_rank" in config else max(shape.tp // config["num_key_value_heads"], 1)
    assert many["kv_repeated_bytes"] == many["kv_bytes"] * (copies - 1) // copies, "each head on so many devices"
