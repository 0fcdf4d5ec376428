"""Free memory is the least of what the host has and what each cgroup above this process leaves of its limit; all of
it is the least of the host's and the limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrum_jax.pools.host_free import free_host_bytes, host_bytes

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
