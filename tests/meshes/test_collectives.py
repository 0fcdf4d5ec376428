"""What devices of a mesh send to one another, against bytes counted by hand, and what a forecast makes of it."""

import dataclasses

import pytest

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.families.registry import spec_of
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.planning.meshes.collectives import sent_by_step, sent_by_token
from ferrum_jax.planning.meshes.forecast import forecast
from ferrum_jax.runtime.layout import lay_out
from scripts.published import PUBLISHED, config_of
from tests.meshes.described import V6E_8

LLAMA3_8B = config_of("Llama-3-8B")

DENSE, ROUTED = spec_of(LLAMA3_8B), spec_of(PUBLISHED["Qwen3-30B-A3B"][0])
D, LAYERS, V = 4096, 32, 128256


def layout_of(spec, mesh, **fields):
    shape = MeshShape.parse(mesh)
    config = EngineConfig(mesh=mesh, num_blocks=20_000, **fields)
    return lay_out(spec, config, make_mesh(shape, V6E_8))


def test_one_device_and_data_shards_without_experts_send_nothing():
    for mesh in ("tp=1", "dp=8,tp=1"):
        sent = sent_by_step(layout_of(DENSE, mesh), 100)
        assert (sent.layers, sent.experts) == (0, 0)


@pytest.mark.parametrize("tp", [2, 8])
def test_a_layer_has_two_sums_of_a_vector_the_embedding_one_and_logits_change_hands(tp):
    layout = layout_of(DENSE, f"tp={tp}")
    token = 2 * (tp - 1) / tp * (2 * LAYERS + 1) * D * 2
    assert sent_by_token(layout).layers == pytest.approx(token)
    assert sent_by_step(layout, 10).layers == pytest.approx(10 * (token + 4 * V / tp * (tp - 1) / tp))


def test_tokens_go_to_the_experts_of_all_other_shards_and_their_sums_come_back():
    sent = sent_by_token(layout_of(ROUTED, "dp=4,tp=2"))
    assert sent.experts == 3 * 48 * (2 * 2048 * 2 + 8 * 8)
    assert sent_by_token(layout_of(ROUTED, "dp=4,tp=2,ep=2")).experts == 0


def test_collectives_stand_in_the_step_the_prefill_and_what_limits_the_output():
    layout = layout_of(ROUTED, "dp=8,tp=1")
    target = layout.options.target
    fast = forecast(layout, dataclasses.replace(target, link_bytes_per_s=1e30), tokens_in=1024, tokens_out=256)
    slow = forecast(layout, dataclasses.replace(target, link_bytes_per_s=1e6), tokens_in=1024, tokens_out=256)
    sent = sent_by_step(layout, slow.num_rows // 8).experts
    assert slow.decode_step_s - fast.decode_step_s == pytest.approx(sent / 1e6, rel=1e-6)
    assert slow.prefill_tokens_per_s == pytest.approx(8 * 1e6 / sent_by_token(layout).experts, rel=1e-3)
    assert (slow.decode_bound_by, fast.decode_bound_by) == ("collectives", "memory")
    assert slow.limited_by == "prefill", "whose tokens go to experts too"
    long = forecast(layout, dataclasses.replace(target, link_bytes_per_s=1e6), tokens_in=8, tokens_out=256)
    assert long.limited_by == "experts"


@pytest.mark.parametrize(
    ("fields", "lengths", "limit"),
    [
        ({"max_num_seqs": 4}, (64, 256), "rows"),
        ({"num_blocks": 64}, (64, 1024), "pool"),
        ({}, (1000, 6000), "contexts"),
        ({}, (7000, 10), "prefill"),
    ],
)
def test_what_limits_the_output_is_what_takes_most_of_the_time(fields, lengths, limit):
    layout = layout_of(DENSE, "tp=2")
    layout = lay_out(DENSE, EngineConfig(**{"num_blocks": 20_000, **fields}), layout.mesh)
    found = forecast(layout, layout.options.target, tokens_in=lengths[0], tokens_out=lengths[1])
    assert found.limited_by == limit
    seconds = found.tokens_out * found.decode_step_s + found.num_rows * found.tokens_in / found.prefill_tokens_per_s
    assert found.output_tokens_per_s == pytest.approx(found.num_rows * found.tokens_out / seconds)
    if limit in ("rows", "pool"):
        assert (found.num_rows == found.pool_rows) == (limit == "pool")
