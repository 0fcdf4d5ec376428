"""Memory that this process may take of its host, now or at all: the least of what the host has and its cgroups allow.

A container reads its host's /proc/meminfo; its own limit stands in its cgroup, and each cgroup above may have a lower
one. Source: the kernel's documents cgroup-v2 and cgroup-v1/memory, and proc(5).
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Files:
    """Names of a memory cgroup's files. reclaimable: the line of memory.stat that counts what can be had back."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_V1 = _Files(limits=("memory.limit_in_bytes",), usage="memory.usage_in_bytes", reclaimable="total_inactive_file")
_V2 = _Files(limits=("memory.max", "memory.high"), usage="memory.current", reclaimable="inactive_file")


def free_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may still take (Linux). root: of the file system, for tests.

    Files that were read, such as weights, count as free where the kernel may drop them, as MemAvailable counts them.
    Raises ValueError where the system does not say.
    """
    return max(min([_of_host(root, "MemAvailable:"), *(limit - held for limit, held in _limits(root))]), 0)


def host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process might take if nobody had taken any: the same at each start. Raises as above."""
    return min([_of_host(root, "MemTotal:"), *(limit for limit, _ in _limits(root))])


def _of_host(root: Path, what: str) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise ValueError("the host does not say how much memory is free; set kv_memory_bytes")


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(bytes, bytes that are taken) of each limit, of this process's memory cgroups and the visible ones above them."""
    own = _own_cgroups(root)
    for mount, top, files in _mounts(root):
        path = own.get(files)
        if path is None:
            continue
        inside = path.relative_to(top) if path.is_relative_to(top) and ".." not in path.parts else PurePosixPath()
        for folder in (inside, *inside.parents):
            yield from _limits_in(mount / folder, files)


def _own_cgroups(root: Path) -> dict[_Files, PurePosixPath]:
    """The path of this process's cgroup in each hierarchy that may limit memory."""
    found = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found[_V2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            found[_V1] = PurePosixPath(path)
    return found


def _mounts(root: Path) -> Iterator[tuple[Path, PurePosixPath, _Files]]:
    """(where it is mounted, the cgroup that is seen there, its files) of each such hierarchy."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        place, _, system = line.partition(" - ")
        top, mount = place.split(" ")[3:5]
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup2":
            yield root / mount.lstrip("/"), PurePosixPath(top), _V2
        elif kind == "cgroup" and "memory" in options.split(","):
            yield root / mount.lstrip("/"), PurePosixPath(top), _V1


def _limits_in(folder: Path, files: _Files) -> Iterator[tuple[int, int]]:
    usage = _text(folder / files.usage).strip()
    limits = [_text(folder / name).strip() for name in files.limits]
    if usage.isdecimal():  # the root has no such files
        stat = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines())
        held = int(usage) - int(stat.get(files.reclaimable, 0))
        yield from ((int(limit), held) for limit in limits if limit.isdecimal())  # "max" is none


def _text(path: Path) -> str:
    """The file's text; nothing where there is none, or this process may not read it."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
