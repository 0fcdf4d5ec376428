"""Accelerators: which packages for them are installed, which chips this machine has, and who holds them.

Without a chip jax falls back to the CPU after each package has printed how it failed. A command that knows beforehand
asks for the CPU and says so in one sentence. Wherever there may be a chip, jax and its packages speak for themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

_PACKAGES = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
_PLUGINS = {"xla_cuda13", "xla_cuda12"}  # what the last two bring into jax_plugins
_DEVICES = ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd", "accel*", "vfio/[0-9]*")  # of GPUs and TPUs, below /dev
_NVIDIA, _GOOGLE = "0x10de", "0x1ae0"
_NEVER_TPUS = ("0x01", "0x02")  # classes of Google's other devices: storage and network
_TPU_FILES = ("accel*", "vfio/[0-9]*")  # below /dev; a process that has one of them open holds the chip
_LOCK = "tmp/libtpu_lockfile"
_TAKEN = re.compile(r"already in use by (?:process with pid|pid|process) (\d+)", re.IGNORECASE)
_OLD = re.compile(
    r"libtpu.{0,60}(too old|out of date|version)|(unsupported|incompatible).{0,40}(mosaic|libtpu|pjrt).{0,40}version",
    re.IGNORECASE | re.DOTALL,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chips:
    """The accelerators that the PCI bus shows. platform: "tpu", "gpu" or "", for none. ids: vendor:device of each."""

    platform: str
    ids: tuple[str, ...]

    @property
    def name(self) -> str:
        """For keys of what holds on such chips alone; it says not how many there are."""
        return " ".join(sorted(set(self.ids))) or self.platform

    def has_package(self) -> bool:
        """Whether a package for these chips is installed, so that jax will open them."""
        return any(_is_installed(name) for name in _PACKAGES if (name == "libtpu") == (self.platform == "tpu"))

    @classmethod
    def here(cls, root: Path = Path("/")) -> Chips:
        """Found without opening any device. A container may hide its bus; then it is by the drivers' files."""
        found = [device for device in _pci_devices(root) if _is_chip(*device[:2])]
        ids = tuple(f"{vendor[2:]}:{device[2:]}" for vendor, _, device in found)
        for vendor, platform in ((_GOOGLE, "tpu"), (_NVIDIA, "gpu")):
            if any(at == vendor for at, _, _ in found):
                return cls(platform=platform, ids=tuple(i for i in ids if i.startswith(vendor[2:])))
        for platform, patterns in (("tpu", _TPU_FILES), ("gpu", ("nvidia[0-9]*",))):
            if any(next((root / "dev").glob(pattern), None) for pattern in patterns):
                return cls(platform=platform, ids=())
        return cls(platform="", ids=())


def holder(root: Path = Path("/")) -> int | None:
    """The process that has a TPU open, as far as this user may see: by its open files, else by libtpu's lock file."""
    files = {str(path) for pattern in _TPU_FILES for path in (root / "dev").glob(pattern)}
    for link in (root / "proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if str(link.readlink()) in files:
                return int(link.parts[-3])
    with contextlib.suppress(OSError, ValueError):
        pid = int((root / _LOCK).read_text().split()[0])
        return pid if (root / "proc" / str(pid)).exists() else None
    return None


def explain(problem: str) -> str:
    """The clause that a person needs, of an error of a runtime; the error itself where it is not a known one."""
    taken = _TAKEN.search(problem)
    if taken or "libtpu_lockfile" in problem:
        pid = taken[1] if taken else holder()
        return f"the chip is held by {f'process {pid}' if pid else 'another process'}; end it, or wait for it"
    if _OLD.search(problem):
        return f"libtpu {version_of('libtpu') or ''} does not fit jax {version_of('jax')}; install what jax asks for"
    return problem


def version_of(package: str) -> str | None:
    """The version of a package that is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def idle_packages(root: Path = Path("/")) -> list[str]:
    """The packages for accelerators that are installed on a machine without any; none where there may be a chip.

    root: of the file system, for tests.
    """
    found = [name for name in _PACKAGES if _is_installed(name)]
    return [] if not found or _may_have_chip(root) or _has_other_plugins() else found


def _is_installed(name: str) -> bool:
    return bool(version_of(name))


def _may_have_chip(root: Path) -> bool:
    """Whether a driver or the PCI bus shows a GPU or a TPU. A driver may make its /dev entries only when it is used."""
    if any(next((root / "dev").glob(pattern), None) for pattern in _DEVICES):
        return True
    return (root / "proc/driver/nvidia").exists() or any(_is_chip(*device[:2]) for device in _pci_devices(root))


def _pci_devices(root: Path) -> Iterator[tuple[str, str, str]]:
    """(vendor, class, device) of each device."""
    for folder in (root / "sys/bus/pci/devices").glob("*"):
        try:
            device = folder / "device"
            identity = device.read_text().strip() if device.is_file() else "0x0"
            yield (folder / "vendor").read_text().strip(), (folder / "class").read_text().strip(), identity
        except OSError:  # it was taken out
            continue


def _is_chip(vendor: str, kind: str) -> bool:
    return (vendor == _NVIDIA and kind.startswith("0x03")) or (vendor == _GOOGLE and not kind.startswith(_NEVER_TPUS))


def _has_other_plugins() -> bool:
    """Whether jax has plugins for devices that are not known here."""
    spec = importlib.util.find_spec("jax_plugins")
    places = spec.submodule_search_locations if spec is not None else None
    names = {name for _, name, _ in pkgutil.iter_modules(places or [])}
    names |= {entry.value.rpartition(".")[2] for entry in importlib.metadata.entry_points(group="jax_plugins")}
    return not names <= _PLUGINS
