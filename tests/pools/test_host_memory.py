"""Blocks as buffers, and the host memory that keeps them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from ferrum_jax.pools.host_blocks import blocks_of, from_buffers, host_block_bytes, to_buffers
from ferrum_jax.pools.host_memory import MOST_ARRIVING, HostMemory, host_memory_kind
from tests.pools.test_blocks import FORMS, filled_pool, gather, leaves, zeros


@pytest.mark.parametrize(("implementation", "head_dim", "dtype"), FORMS)
def test_a_block_goes_through_its_buffers_bit_for_bit_and_to_files_in_their_form(implementation, head_dim, dtype):
    pool = filled_pool(implementation, head_dim, dtype)
    other = dataclasses.replace(pool, values=pool.values[::-1].copy())
    pools = (pool, other)
    blocks = jax.jit(to_buffers)(pools, np.array([3, 5]))
    assert sum(buffer.nbytes for buffer in blocks[0]) == host_block_bytes(pools)
    back = jax.jit(from_buffers)(zeros(pools), np.array([1, 2]), blocks)
    for old, new in zip(leaves(pools), leaves(back), strict=True):
        assert np.array_equal(new[[1, 2]], old[[3, 5]]) and not new[[0, 3, 4, 5]].any()
    found = blocks_of(pools, [[[buffer] for buffer in block] for block in blocks], head_copies=1)
    for array, wanted in zip(leaves(found), leaves(gather(pools, np.array([3, 5]), head_copies=1)), strict=True):
        assert array.dtype == wanted.dtype and np.array_equal(array, wanted)


def test_two_devices_parts_of_a_block_join_and_a_shared_head_is_kept_once():
    pools = (filled_pool("xla", 16, "int8"),) * 2  # [P, C, 4, 16] and [P, 4, C]
    halves = [
        tuple(dataclasses.replace(p, values=p.values[:, :, part], scales=p.scales[:, part]) for p in pools)
        for part in (slice(0, 2), slice(2, 4))
    ]
    each = [jax.jit(to_buffers)(half, np.array([4]))[0] for half in halves]
    (block,) = [list(zip(*each, strict=True))]
    for copies in (1, 2):
        wanted = gather(pools, np.array([4]), head_copies=copies)
        for array, expected in zip(leaves(blocks_of(pools, [block], copies)), leaves(wanted), strict=True):
            assert np.array_equal(array, expected)


def test_later_blocks_take_the_place_of_earlier_ones_in_pinned_memory():
    memory = HostMemory(host_memory_kind(jax.devices()[0]))
    assert memory.kind == "pinned_host"

    def block(value: int):
        return ((jax.device_put(np.full(8, value, np.int8)),),)

    for batch in range(MOST_ARRIVING + 3):
        memory.put([3, 10 + batch], [block(batch), block(50 + batch)])
    last = MOST_ARRIVING + 2
    for found, kind in ((memory.get([12, 3]), "pinned_host"), (memory.on_devices([12, 3]), "device")):
        buffers = [buffer for ((buffer,),) in found]
        assert [int(np.asarray(buffer)[0]) for buffer in buffers] == [52, last]
        assert {buffer.sharding.memory_kind for buffer in buffers} == {kind}
    memory.clear()
    with pytest.raises(KeyError):
        memory.get([3])


def test_unpinned_memory_is_taken_where_there_is_no_other():
    def device(*kinds: str):
        return SimpleNamespace(addressable_memories=lambda: [SimpleNamespace(kind=kind) for kind in kinds])

    assert host_memory_kind(device("device", "unpinned_host", "pinned_host")) == "pinned_host"
    assert host_memory_kind(device("device", "unpinned_host")) == "unpinned_host"
    with pytest.raises(ValueError, match=r"host_cache_bytes wants memory of the host, and .* has device alone"):
        host_memory_kind(device("device"))
