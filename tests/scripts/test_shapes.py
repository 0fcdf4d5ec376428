"""Random weights of a published shape are a checkpoint that loads whole."""

import jax
import jax.numpy as jnp
import pytest

from checkpoints import Expansion, open_checkpoint
from ferrum_jax.models.families import registry
from scripts import shapes


def test_a_shape_with_random_weights_loads(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "small", shapes.small(shapes.SHAPES["qwen3-0.6b"]))

    folder = shapes.write_random_checkpoint("small", tmp_path)
    checkpoint = open_checkpoint(folder)
    spec = registry.spec_of(checkpoint.config)
    _, targets = registry.unbind(registry.abstract_model(spec, "float32"))
    weights = registry.weights_of(checkpoint.config)
    loaded = checkpoint.load(rules=weights.rules, harmless=weights.harmless, targets=targets)

    assert loaded.keys() == targets.keys()
    assert all((loaded[name] == 1).all() for name in loaded if "norm" in name)
    assert all(0.01 < float(loaded[name].std()) < 0.03 for name in loaded if "norm" not in name)


def test_weights_are_made_once(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "small", shapes.small(shapes.SHAPES["qwen3-0.6b"]))
    weights = shapes.write_random_checkpoint("small", tmp_path) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    shapes.write_random_checkpoint("small", tmp_path)
    assert weights.stat().st_mtime_ns == written


def test_weights_are_made_where_and_as_the_engine_wants_them():
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        "layers.0.norm.weight": jax.ShapeDtypeStruct((24,), jnp.bfloat16, sharding=where),
        "head.weight": jax.ShapeDtypeStruct((96, 24), jnp.bfloat16, sharding=where),
        "embed.weight": jax.ShapeDtypeStruct((96, 24), jnp.bfloat16, sharding=where),
    }
    source = shapes.random_source(shapes.small(shapes.SHAPES["qwen3-0.6b"]))
    made = source.read(wanted)
    assert {name: (x.shape, x.dtype, x.sharding) for name, x in made.items()} == {
        name: (x.shape, x.dtype, x.sharding) for name, x in wanted.items()
    }
    assert (made["layers.0.norm.weight"] == 1).all()
    assert 0.018 < float(made["head.weight"].astype(jnp.float32).std()) < 0.022
    assert (made["head.weight"] != made["embed.weight"]).any()
    with pytest.raises(ValueError, match=r"does not divide \['head.weight'\]"):
        source.read(wanted, {"head.weight": Expansion(rows=90, size=96)})
