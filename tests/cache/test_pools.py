"""What a block takes of a device's memory, its padding included. tests/aot compares it with what libtpu allocates."""

from __future__ import annotations

import pytest

from ferrum_jax.cache.pools import block_bytes
from ferrum_jax.models.registry import spec_of
from pallas_kernels.kv_pool import KV_DTYPES
from pallas_kernels.target import Target
from tests.models.published import LLAMA3_8B


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
