"""Blocks are counted from bytes: as asked, else as many as fit, never more than all rows could hold.

What a block takes of a device's memory, its padding included. tests/aot compares it with what libtpu allocates.
"""

import dataclasses
import types

import pytest

from ferrum_jax.models.families.registry import spec_of
from ferrum_jax.runtime.pools import budget
from ferrum_jax.runtime.pools.budget import GroupBlocks, Ledger, choose_num_blocks, cpu_pool_bytes
from ferrum_jax.runtime.pools.pools import block_bytes, kv_shapes
from pallas_kernels.kv_pool import KV_DTYPES
from pallas_kernels.target import Target
from scripts.published import config_of

LIMITS = {
    "kv_bytes": lambda n: (n + 1) * 1000,
    "block_size": 16,
    "max_model_len": 100,
    "max_num_seqs": 4,
}  # 7 blocks a row


@pytest.mark.parametrize(
    ("num_blocks", "kv_memory_bytes", "expected"),
    [
        (5, 10**9, 5),
        (500, 0, 500),
        (None, 10**9, 28),
        (None, 10_999, 9),
        (None, 29_000, 28),
        (None, 28_999, 27),
        (None, 2000, 1),
    ],
)
def test_blocks_that_fit_beside_the_null_block_up_to_what_all_rows_need(num_blocks, kv_memory_bytes, expected):
    assert choose_num_blocks(num_blocks=num_blocks, kv_memory_bytes=kv_memory_bytes, **LIMITS) == expected


def test_too_little_memory_for_one_block_is_an_error_with_the_repair():
    with pytest.raises(ValueError, match=r"kv_memory_bytes is 1999; one block of 16 tokens takes 1000 bytes.*raise"):
        choose_num_blocks(num_blocks=None, kv_memory_bytes=1999, **LIMITS)


CPU = types.SimpleNamespace(platform="cpu")


def of_host(monkeypatch, total, free):
    monkeypatch.setattr(budget, "host_bytes", lambda: total)
    monkeypatch.setattr(budget, "free_host_bytes", lambda: free)


def test_a_host_on_which_others_take_and_give_back_memory_gives_pools_of_one_size(monkeypatch):
    sizes = set()
    for gib in range(13, 24):
        of_host(monkeypatch, 24 << 30, gib << 30)
        sizes.add(cpu_pool_bytes([CPU], 2 << 30, 2**60))
    assert sizes == {5 << 30}


@pytest.mark.parametrize(("free_gib", "expected"), [(11, 5 << 29), (6, 5 << 28), (2, 0)])
def test_a_pool_is_halved_until_it_is_within_half_of_what_is_free(monkeypatch, free_gib, expected):
    of_host(monkeypatch, 24 << 30, free_gib << 30)
    assert cpu_pool_bytes([CPU], 2 << 30, 2**60) == expected


@pytest.mark.parametrize(
    ("weights_bytes", "row_bytes", "expected"),
    [(0, 0, 2**30), (2**31, 0, 2**31), (0, 2**31, 2**31), (2**31, 3 << 30, 3 << 30), (0, 2**40, 2**32)],
)
def test_the_cpus_pool_is_the_largest_of_three_within_a_quarter(monkeypatch, weights_bytes, row_bytes, expected):
    of_host(monkeypatch, 2**34 + weights_bytes, 2**34 + weights_bytes)
    assert cpu_pool_bytes([CPU], weights_bytes, row_bytes) == expected


def test_devices_of_the_cpu_share_what_is_free_and_get_never_less_than_nothing(monkeypatch):
    with monkeypatch.context() as patch:
        of_host(patch, 2**34, 2**34)
        assert cpu_pool_bytes([CPU, CPU], 2**32, 2**40) == 2**30
    assert cpu_pool_bytes([CPU], 2**60, 0) == 0
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < cpu_pool_bytes([CPU], 0, 2**60) <= total // 4


def test_a_ledger_counts_the_null_block_in_bytes_but_not_in_tokens():
    blocks = GroupBlocks(num_blocks=9, block_bytes=1000)
    ledger = Ledger(weights_bytes=1, slots_bytes=2, prompts_bytes=3, groups=(blocks,), block_size=16)
    assert (ledger.kv_bytes, ledger.kv_tokens, ledger.repeated_bytes) == (10_000, 144, 0)
    four = dataclasses.replace(blocks, head_copies=4)
    assert dataclasses.replace(ledger, groups=(blocks, four)).repeated_bytes == 7_500


def test_blocks_of_a_window_that_are_not_needed_make_room_for_others():
    """Two groups of equal layers; one needs 10 blocks at most."""
    fits = choose_num_blocks(
        num_blocks=None,
        kv_memory_bytes=100_000,
        **LIMITS | {"kv_bytes": lambda n: (n + 1 + min(n, 10) + 1) * 1000, "max_num_seqs": 100},
    )
    assert fits == 88


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
