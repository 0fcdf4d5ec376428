"""What a block takes of a device's memory, its padding included. tests/aot compares it with what libtpu allocates."""

from __future__ import annotations

import pytest

from ferrum_jax.models.registry import spec_of
from ferrum_jax.pools.pools import block_bytes, kv_shapes
from pallas_kernels.kv_pool import KV_DTYPES
from pallas_kernels.target import Target
from scripts.published import config_of

LLAMA3_8B = config_of("Llama-3-8B")


@pytest.mark.parametrize(
    ("kv_dtype", "heads", "on_cpu", "on_tpu"),
    [
        ("bfloat16", 8, 16 * 16 * 256, 16 * 16 * 256),
        ("bfloat16", 3, 16 * 6 * 256, 16 * 8 * 256),  # rows come by eights
        ("fp8_e4m3", 1, 16 * 2 * 128, 16 * 4 * 128),  # four rows to a word
        ("int8", 8, 16 * 16 * 128 + 16 * 16 * 4, 16 * 16 * 128 + 16 * 128 * 4),  # scales of 16 tokens fill 128 lanes
    ],
)
def test_a_tpu_pads_the_last_two_axes_of_a_block(kv_dtype, heads, on_cpu, on_tpu):
    spec = spec_of(LLAMA3_8B | {"num_key_value_heads": heads, "num_attention_heads": 8 * heads, "head_dim": 128})
    sizes = [
        block_bytes(
            spec,
            block_size=16,
            kv_dtype=KV_DTYPES[kv_dtype],
            implementation="xla",
            target=Target.named(target),
        )
        for target in ("cpu", "tpu:v6e")
    ]
    assert sizes == [[32 * on_cpu], [32 * on_tpu]]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize(("head_dim", "lanes"), [(80, 128), (112, 128), (160, 256), (240, 256)])
def test_lanes_that_pad_a_head_for_the_tpus_kernels_are_counted(head_dim, lanes, kv_dtype):
    spec = spec_of(LLAMA3_8B | {"head_dim": head_dim})
    form = {"block_size": 32, "kv_dtype": KV_DTYPES[kv_dtype], "implementation": "mosaic_tpu"}
    values, scales = 32 * 16 * lanes * KV_DTYPES[kv_dtype].itemsize, 16 * 128 * 4 if kv_dtype == "int8" else 0
    assert block_bytes(spec, target=Target.named("tpu:v6e"), **form) == [32 * (values + scales)]
    pools = kv_shapes(spec, num_blocks=[1], **form).values()
    assert sum(pool.padded_bytes for pool in pools) == 32 * values * (lanes - head_dim) // lanes
