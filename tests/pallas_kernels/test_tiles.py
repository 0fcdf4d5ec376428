"""Tiles of the TPU's decode kernel: the formula's, those that are given, those that were counted, and the walk."""

import json

import jax.numpy as jnp
import pytest

from pallas_kernels.kv_pool import pool_shape
from pallas_kernels.paged_attention.fastest_tiles import fastest
from pallas_kernels.paged_attention.tpu.decode import config as module
from pallas_kernels.paged_attention.tpu.decode.config import DecodeConfig, DecodeShape
from pallas_kernels.target import Target

V6E = Target.named("tpu:v6e")


def shape(num_heads: int = 32, num_kv_heads: int = 8, block_size: int = 16, dtype: str = "bfloat16") -> DecodeShape:
    pool = pool_shape(
        num_blocks=1,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        dtype=jnp.dtype(dtype),
        implementation="mosaic_tpu",
    )
    return DecodeShape.of(num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=jnp.dtype("bfloat16"), pool=pool)


@pytest.mark.parametrize("sizes", [(32, 8, 16), (16, 8, 128), (8, 1, 64), (64, 8, 256)])
@pytest.mark.parametrize("generation", ["v5e", "v5p", "v6e", "v7x"])
def test_neighbours_are_few_and_legal_and_may_be_given(sizes, generation):
    target = Target.named(f"tpu:{generation}")
    own = DecodeConfig.by_formula(shape(*sizes), target)
    neighbours = own.neighbours(shape(*sizes))
    assert own.fits(shape(*sizes)) and 2 <= len(neighbours) <= 6 and own not in neighbours
    for other in neighbours:
        assert other.fits(shape(*sizes))
        assert DecodeConfig.choose(shape(*sizes), target, other.tiles) == other


def test_tiles_that_the_kernel_does_not_take_are_refused_with_what_it_takes():
    with pytest.raises(ValueError, match=r"name \['tile_q'\]; decode has \['tile_kv', 'items'\]"):
        DecodeConfig.choose(shape(), V6E, {"tile_q": 8})
    for tiles in ({"tile_kv": 100}, {"items": 999}):
        with pytest.raises(ValueError, match="do not fit N=32 K=8 H=128 C=16 bfloat16: tile_kv must be a multiple"):
            DecodeConfig.choose(shape(), V6E, tiles)


def test_tiles_that_were_counted_are_taken_where_none_are_given(tmp_path, monkeypatch):
    found = {"v6e": {shape().name: {"tiles": {"tile_kv": 512, "items": 2}}, shape(16).name: {"tiles": {}}}}
    (tmp_path / "tiles.json").write_text(json.dumps(found))
    monkeypatch.setattr(module, "_TILES", tmp_path / "tiles.json")
    module._counted.cache_clear()
    try:
        assert DecodeConfig.choose(shape(), V6E).tiles == {"tile_kv": 512, "items": 2}
        assert DecodeConfig.choose(shape(), V6E, {"items": 1}).items == 1
        for other, target in ((shape(16), V6E), (shape(), Target.named("tpu:v5e"))):
            assert DecodeConfig.choose(other, target) == DecodeConfig.by_formula(other, target)
    finally:
        module._counted.cache_clear()


def test_the_data_beside_the_kernel_says_what_was_counted_and_only_what_is_better():
    for generation, shapes in json.loads(module._TILES.read_text()).items():
        memory = f"{generation} {list(shapes)}"
        for found in shapes.values():
            cycles = {name: max(count, found["memory_cycles"]) for name, count in found["cycles"].items()}
            own = cycles[_text(found["own"])]
            assert len(cycles) >= 3, memory
            better = found["tiles"] and cycles[_text(found["tiles"])]
            assert better == min(cycles.values()) < 0.97 * own if better else min(cycles.values()) >= 0.97 * own


def _text(tiles: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sorted(tiles.items()))


def test_the_walk_takes_the_fastest_right_tiles_and_its_own_where_little_is_gained():
    times: dict[str, float | None] = {"own": 1.0, "a": 0.9, "b": 0.8, "wrong": None}
    assert fastest("own", ["a", "b", "wrong"], times.get) == "b"
    assert fastest("own", ["c"], {"own": 1.0, "c": 0.98}.get) == "own"
    assert fastest("own", ["a"], {"own": None, "a": 0.9}.get) == "a"  # its own are wrong
    assert fastest("own", ["a"], {"own": None, "a": None}.get) == "own"
