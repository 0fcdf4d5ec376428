"""How large pools are on devices that are not here: what fits, and of what does not, the smallest change that would."""

import dataclasses

import pytest

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.runtime.layout import lay_out
from ferrum_jax.runtime.placing import fit
from scripts.slices_page import Described
from tests.runtime.test_layout import spec_of

V5E = [Described("tpu", "TPU v5 lite", number, coords=(number, 0, 0)) for number in range(4)]
# 13.8 GiB of weights, which leave 1.4 of a v5e's 15.25
LARGE_SIZES = {"hidden_size": 8192, "intermediate_size": 300_000, "heads": 16, "kv_heads": 8}
LARGE = spec_of(**LARGE_SIZES)
CONFIG = EngineConfig(mesh="tp=1", max_num_seqs=64, max_num_batched_tokens=128, max_model_len=256)


def never(layout):
    raise AssertionError("asked the compiler, which takes minutes")


def changes(config, devices, spec=LARGE):
    mesh = make_mesh(config.mesh_shape, devices)
    with pytest.raises(fit.TooSmall) as small:
        fit.fit(spec, config, mesh, temporaries_of=fit.expected_temporaries)
    return fit.changes_that_fit(spec, config, devices, small.value)


def test_weights_that_fill_the_memory_are_refused_before_the_compiler_is_asked():
    spec = spec_of(**LARGE_SIZES | {"intermediate_size": 400_000})
    with pytest.raises(fit.TooSmall, match=r"GiB too small: 15.25 GiB for weights of 18.\d\d, a step of 0.00"):
        fit.fit(spec, CONFIG, make_mesh(MeshShape(), V5E[:1]), temporaries_of=never)


def test_what_does_not_fit_is_told_the_nearest_mesh_and_the_largest_steps_that_would():
    mesh, tokens = changes(dataclasses.replace(CONFIG, max_num_batched_tokens=2048), V5E)
    assert mesh == "mesh tp=2"
    name, _, count = tokens.partition("=")
    assert name == "max_num_batched_tokens"
    device = make_mesh(MeshShape(), V5E[:1])
    fit.fit(LARGE, dataclasses.replace(CONFIG, **{name: int(count)}), device, temporaries_of=fit.expected_temporaries)
    with pytest.raises(fit.TooSmall):
        too_many = dataclasses.replace(CONFIG, **{name: int(count) + 1})
        fit.fit(LARGE, too_many, device, temporaries_of=fit.expected_temporaries)


def test_what_no_mesh_of_the_target_holds_is_told_how_many_devices_would():
    sizes = LARGE_SIZES | {"intermediate_size": 2_000_000}
    spec = spec_of(**sizes)
    assert changes(dataclasses.replace(CONFIG, mesh="tp=4"), V5E, spec) == ["mesh tp=8 of a target with 8 devices"]
    nowhere = spec_of(**sizes | {"heads": 1, "kv_heads": 1})
    assert changes(CONFIG, V5E[:1], nowhere) == []


def test_a_mesh_that_leaves_a_host_of_a_slice_idle_is_no_advice():
    """dp=5,tp=3 would fit, and takes 15 of 16 devices; the next that divides 6 KV heads, tp=6, takes 12."""
    spec = spec_of(hidden_size=8192, intermediate_size=720_000, heads=12, kv_heads=6)
    slice_of_hosts = [dataclasses.replace(V5E[0], id=number, coords=(number, 0, 0)) for number in range(16)]
    config = dataclasses.replace(CONFIG, mesh="dp=8,tp=2")
    assert changes(config, slice_of_hosts, spec) == []


def test_a_named_pool_that_is_larger_than_the_device_is_refused_with_what_is_left():
    def of_blocks(num_blocks):
        config = dataclasses.replace(CONFIG, num_blocks=num_blocks)
        return lay_out(spec_of(), config, make_mesh(MeshShape(), V5E[:1]))

    fit.refuse_overfull(of_blocks(1000))
    with pytest.raises(ValueError, match=r"a KV pool of 1,000,000 blocks takes 61.04 GiB.* set kv_memory_bytes to at"):
        fit.refuse_overfull(of_blocks(1_000_000))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_scalar_memory_is_that_of_the_heads_of_one_device(tp):
    def taken(heads, kv_heads, tp):
        spec = spec_of(heads=heads, kv_heads=kv_heads)
        config = dataclasses.replace(CONFIG, num_blocks=9, block_size=16, mesh=f"tp={tp}")
        return fit.scalar_bytes(lay_out(spec, config, make_mesh(MeshShape(tp=tp), V5E[:tp])))

    assert taken(4 * tp, tp, tp) == taken(4, 1, 1)
    assert taken(2 * tp, 2, tp) is not None
