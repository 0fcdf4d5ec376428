"""This machine: chips on the bus, packages and whether they fit, devices as jax sees them, and why it sees none.

Nothing here names the machine, a path or a user: what is found goes into a page for a bug report.
"""

import dataclasses
import importlib.metadata
import platform
import re
from pathlib import Path
from typing import Any

import jax

from ferrum_jax.cli.device_check.rates import target_of
from ferrum_jax.engine.startup.accelerators import Chips, holder, version_of
from ferrum_jax.engine.startup.faults import open_devices
from ferrum_jax.io.child import Send

_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy")
_CUDA = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_EXTRAS = {"tpu": "tpu", "gpu": "gpu"}
_MAKERS = {"tpu": "a TPU", "gpu": "a GPU"}
_WANTED = re.compile(r"libtpu\s*\(?(==|>=)\s*([\d.]+)")
_OLD_LIBTPU = "0.0.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts known without opening a device. packages: version by name. problems: sentences on what does not fit."""

    chips: Chips
    packages: dict[str, str]
    driver: str | None
    python: str
    problems: tuple[str, ...]


def look(root: Path = Path("/"), fault: str | None = None) -> Machine:
    """The machine. root: of the file system, for tests. fault: of engine/startup/faults.py."""
    packages = {name: version for name in _PACKAGES if (version := version_of(name)) is not None}
    if fault == "old_libtpu":
        packages["libtpu"] = _OLD_LIBTPU
    return Machine(
        chips=Chips.here(root),
        packages=packages,
        driver=_driver(root),
        python=platform.python_version(),
        problems=tuple(misfits(packages)),
    )


def misfits(packages: dict[str, str]) -> list[str]:
    """A sentence for each package of an accelerator whose version is not the one that jax or jaxlib asks for."""
    found = []
    wanted = _wanted_libtpu()
    if "libtpu" in packages and wanted is not None and not _fits(packages["libtpu"], *wanted):
        found.append(
            f"libtpu {packages['libtpu']} does not fit jax {packages.get('jax')}, which asks for "
            f"{wanted[1]}: pip install -U 'jax[tpu]'"
        )
    for name in _CUDA:
        if name in packages and packages[name] != packages.get("jaxlib"):
            found.append(
                f"{name} {packages[name]} does not fit jaxlib {packages.get('jaxlib')}, whose number it must have: "
                f"pip install -U 'jax[{'cuda13' if '13' in name else 'cuda12'}]'"
            )
    return found


def _wanted_libtpu() -> tuple[str, str] | None:
    """How jax asks for libtpu in its own description: an operator and a version."""
    for line in importlib.metadata.requires("jax") or ():
        asked = _WANTED.match(line)
        if asked:
            return asked[1], asked[2].rstrip(".")
    return None


def _fits(version: str, operator: str, wanted: str) -> bool:
    have, need = ([int(part) for part in text.split(".") if part.isdecimal()] for text in (version, wanted))
    return have[: len(need)] == need if operator == "==" else have >= need


def _driver(root: Path) -> str | None:
    """The version of NVIDIA's driver, as it says itself."""
    try:
        said = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", said)
    return found[1] if found else None


def describe_devices(fault: str | None, send: Send) -> None:
    """Sends one object: what jax sees once it has opened the devices. fault: of engine/startup/faults.py, for tests."""
    devices = open_devices(fault)
    first = devices[0]
    target = target_of(first)
    stats = first.memory_stats() or {}
    send(
        {
            "platform": first.platform,
            "kind": first.device_kind,
            "generation": None if target is None else target.generation,
            "count": len(devices),
            "compiler": first.client.platform_version.partition("\n")[0],
            "memory_used_bytes": stats.get("bytes_in_use"),
            "memory_bytes": stats.get("bytes_limit"),
            "asked_for": jax.config.values["jax_platforms"] or None,
        }
    )


def why_no_chip(machine: Machine, devices: dict[str, Any] | None, install: str, root: Path = Path("/")) -> str | None:
    """The sentence about a machine whose accelerator jax does not see; None where there is none, or it is seen.

    devices: what `describe_devices` sent, None where it failed. install: what installs the extra {}.
    """
    chips = machine.chips
    if not chips.platform or (devices is not None and devices["platform"] not in ("cpu",)):
        return None
    here = f"{_MAKERS[chips.platform]} is here and jax sees only the CPU"
    if devices is not None and devices["asked_for"] == "cpu":
        return f"{here}, because JAX_PLATFORMS=cpu asks for it"
    needed = ("libtpu",) if chips.platform == "tpu" else _CUDA
    if not any(name in machine.packages for name in needed):
        return f"{here}: {' or '.join(needed)} is not installed; {install.format(_EXTRAS[chips.platform])}"
    if machine.problems:
        return f"{here}: {machine.problems[0]}"
    pid = holder(root) if chips.platform == "tpu" else None
    if pid is not None:
        return f"{here}: process {pid} holds the chip; end it, or wait for it"
    return f"{here}: its package is installed and could not open it; `python -c 'import jax; jax.devices()'` says why"
