"""Blocks as buffers, and the host memory that keeps them.

Free memory is the least of what the host has and what each cgroup above this process leaves of its limit; all of
it is the least of the host's and the limits.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from ferrum_jax.runtime.pools.host_blocks import blocks_of, from_buffers, host_block_bytes, to_buffers
from ferrum_jax.runtime.pools.host_free import free_host_bytes, host_bytes
from ferrum_jax.runtime.pools.host_memory import MAX_ARRIVING, HostMemory, host_memory_kind
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

    for batch in range(MAX_ARRIVING + 3):
        memory.put([3, 10 + batch], [block(batch), block(50 + batch)])
    last = MAX_ARRIVING + 2
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


V1 = "30 23 0:27 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2 = "31 23 0:28 {top} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
UNLIMITED_V1 = 2**63 - 4096


def host(root: Path, *, cgroup: str, mounts: str, files: dict[str, object] | None = None) -> Path:
    """A file system of a host with 1,000 kB of 1024 bytes available."""
    texts = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    1000 kB\n",
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/vda rw\n" + mounts,
        **(files or {}),
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n".lstrip("\n").replace("\n\n", "\n"))
    return root


def v2(folder: str, limit: object, usage: int, *, reclaimable: int = 0, high: object = "max") -> dict[str, object]:
    stat = f"anon 5\ninactive_file {reclaimable}\nactive_file 7"
    names = {"memory.max": limit, "memory.high": high, "memory.current": usage, "memory.stat": stat}
    return {f"sys/fs/cgroup/{folder}{name}": value for name, value in names.items()}


def v1(folder: str, limit: int, usage: int, *, reclaimable: int = 0) -> dict[str, object]:
    stat = f"inactive_file 1\ntotal_inactive_file {reclaimable}"
    names = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}
    return {f"sys/fs/cgroup/memory/{folder}{name}": value for name, value in names.items()}


def test_without_cgroups_it_is_what_the_host_has(tmp_path):
    assert free_host_bytes(host(tmp_path, cgroup="", mounts="")) == 1000 * 1024


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (v2("a/b/", 50_000, 20_000), 30_000),
        (v2("a/b/", "max", 20_000), 1000 * 1024),
        (v2("a/b/", 2**40, 20_000), 1000 * 1024),  # more than the host has
        (v2("a/b/", 50_000, 20_000, reclaimable=15_000), 45_000),  # files that were read
        (v2("a/b/", 50_000, 20_000, high=40_000), 20_000),
        (v2("a/b/", 50_000, 60_000), 0),
        (v2("a/b/", 50_000, 20_000) | v2("a/", 45_000, 44_000), 1_000),  # the one above is nearly full
        (v2("a/b/", 50_000, 20_000) | v2("", 40_000, 30_000), 10_000),
        (v2("x/", 10, 5), 1000 * 1024),  # another one
    ],
)
def test_the_second_kind_of_cgroup_limits_it_at_every_level(tmp_path, files, expected):
    assert free_host_bytes(host(tmp_path, cgroup="0::/a/b", mounts=V2.format(top="/"), files=files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (v1("a/b/", 50_000, 20_000), 30_000),
        (v1("a/b/", 50_000, 20_000, reclaimable=15_000), 45_000),
        (v1("a/b/", UNLIMITED_V1, 20_000), 1000 * 1024),
        (v1("a/b/", 50_000, 20_000) | v1("", 45_000, 44_000), 1_000),
    ],
)
def test_the_first_kind_of_cgroup_limits_it_at_every_level(tmp_path, files, expected):
    own = "5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/"  # both kinds are mounted
    mounts = V1.format(top="/") + "38 31 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    assert free_host_bytes(host(tmp_path, cgroup=own, mounts=mounts, files=files)) == expected


@pytest.mark.parametrize(("own", "top"), [("0::/", "/"), ("0::/docker/ab", "/docker/ab"), ("0::/../../x", "/")])
def test_a_container_finds_its_own_limit_where_its_cgroup_is_mounted(tmp_path, own, top):
    files = v2("", 50_000, 20_000)
    assert free_host_bytes(host(tmp_path, cgroup=own, mounts=V2.format(top=top), files=files)) == 30_000


@pytest.mark.parametrize("usage", [0, 20_000, 60_000])
def test_all_memory_is_the_lowest_limit_whatever_is_taken_of_it(tmp_path, usage):
    files = v2("a/b/", "max", usage) | v2("a/", 50_000, usage, high=45_000)
    assert host_bytes(host(tmp_path, cgroup="0::/a/b", mounts=V2.format(top="/"), files=files)) == 45_000


def test_all_memory_is_what_the_host_has_where_no_limit_is_lower(tmp_path):
    files = v2("a/b/", 2**40, 20_000)
    assert host_bytes(host(tmp_path, cgroup="0::/a/b", mounts=V2.format(top="/"), files=files)) == 9000 * 1024


def test_a_host_that_says_nothing_is_an_error_with_the_repair(tmp_path):
    with pytest.raises(ValueError, match="does not say how much memory is free; set kv_memory_bytes"):
        free_host_bytes(tmp_path)
