"""Which implementation of attention an engine runs: the one that is named, else what a check on this chip found right.

A verdict that is kept is followed. Without one, an engine that would use a kernel on a chip checks it first, in a child
process that has ended before this one opens the device; where this process has opened it already, in this one. So does
process 0 of several, for all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import traceback
from typing import Any

import jax
from jax.sharding import Mesh

from ferrum_jax.config import EngineConfig, tiles_text
from ferrum_jax.executables.reports import keep_report
from ferrum_jax.executables.verdicts import START, Verdict, VerdictKey, VerdictStore
from ferrum_jax.processes.child import first_line, run_child
from ferrum_jax.runtime.fit import PROBE_BLOCKS
from ferrum_jax.runtime.layout import Layout, lay_out
from ferrum_jax.runtime.resolve import lacks_kernels
from ferrum_jax.spec import ModelSpec
from ferrum_jax.startup.accelerators import Chips, explain
from ferrum_jax.startup.check_attention import AttentionOrder, Rehearsal, check_attention, verdict_of
from pallas_kernels.target import Target

SILENCE_S = 300.0  # in which even a slow machine has compiled a step's attention
_KERNELS = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}
_REPORT = "`ferrum-jax check` says more, in a page for a bug report"
_DECIDE = (
    *("dtype", "kv_dtype", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "mesh"),
    "attention_tiles",
)
_UNENDED = "a start that checked it did not come to its end"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """implementation, tiles: what the config is to name, None leaves it to the platform. why: a sentence, or "".

    is_set_aside: a kernel that would have run, or that one expects of such a device, does not. device_kind: the chip of
    which this holds, "" is any.
    """

    implementation: str | None
    tiles: str | None = None
    why: str = ""
    is_set_aside: bool = False
    device_kind: str = ""

    @classmethod
    def recorded(cls, text: str) -> AttentionChoice:
        """The choice that `recorded_as` wrote down, without its sentence."""
        implementation, _, tiles = text.partition(" ")
        return cls(implementation=implementation, tiles=tiles or None)

    def on(self, device: Any) -> AttentionChoice:
        """The choice for a device that is open now: none where what was found is of another."""
        if self.device_kind in ("", device.device_kind):
            return self
        return AttentionChoice(implementation=None)


_ON_XLA = AttentionChoice(
    implementation=None, why="attention runs on 'xla': no kernel was made for one such as this model's"
)


def choose_attention(
    spec: ModelSpec,
    config: EngineConfig,
    *,
    is_bundled: bool = False,
    chips: Chips | None = None,
    rehearsal: Rehearsal | None = None,
    silence_s: float = SILENCE_S,
) -> AttentionChoice:
    """The choice for an engine of this process alone. It opens no device that is not open.

    is_bundled: its executables were compiled for the platform's kernel, which is set aside only where it is wrong.
    chips: of this machine, found where None. Raises ValueError where the config names a kernel that is found wrong.
    """
    if config.implementation is None and lacks_kernels(spec, config):
        return _ON_XLA
    chips = chips or Chips.here()
    platform = Target.named(rehearsal.target).platform if rehearsal is not None else _platform(chips)
    kernel = config.implementation or _KERNELS.get(platform)
    if kernel in (None, "xla") or config.check == "off" or platform == "":
        return AttentionChoice(implementation=config.implementation)
    is_wanted = config.implementation is not None or platform == "tpu"  # a GPU's kernel has to be proven first
    order = AttentionOrder(
        spec=spec,
        config=dataclasses.replace(config, implementation=kernel),
        key=VerdictKey.here(chips.name),
        runs=is_wanted,
        num_chips=len(chips.ids),
        rehearsal=rehearsal,
    )
    store = VerdictStore(None if rehearsal else config.compilation_cache_dir, order.key)
    verdict, report = store.find(_entry(order)), None
    if verdict is None:
        verdict, report = _check(order, store, silence_s)
    return _follow(verdict, kernel, config, is_wanted=is_wanted, is_bundled=is_bundled, report=report)


def choose_with_others(
    spec: ModelSpec,
    config: EngineConfig,
    mesh: Mesh,
    *,
    is_bundled: bool = False,
    rehearsal: Rehearsal | None = None,
) -> AttentionChoice:
    """The choice of process 0 for several processes, whose devices are open: no child can have one of them.

    What is checked here may take this process with it. So a check that begins is kept as one that did not end, until it
    has, and the next start sets the kernel aside. Raises ValueError where the config names one that is found wrong.
    """
    if config.implementation is None and lacks_kernels(spec, config):
        return _ON_XLA
    platform = mesh.devices.flat[0].platform if rehearsal is None else Target.named(rehearsal.target).platform
    kernel = config.implementation or _KERNELS.get(platform)
    if kernel in (None, "xla") or config.check == "off":
        return AttentionChoice(implementation=config.implementation)
    named = dataclasses.replace(config, implementation=kernel)
    is_wanted = config.implementation is not None or platform == "tpu"
    key = VerdictKey.here(Chips.here().name)
    order = AttentionOrder(spec=spec, config=named, key=key, runs=is_wanted, rehearsal=rehearsal)
    probe = dataclasses.replace(named if rehearsal is None else config, num_blocks=PROBE_BLOCKS)
    try:
        layout = lay_out(spec, probe, mesh)
    except ValueError:  # the kernel cannot run here: the start itself says why, or takes another
        return AttentionChoice(implementation=config.implementation)
    store = VerdictStore(config.compilation_cache_dir, key)
    verdict, report = store.find(_entry(order)), None
    if verdict is None:
        verdict, report = _check_here(layout, order, store)
    return _follow(verdict, kernel, config, is_wanted=is_wanted, is_bundled=is_bundled, report=report)


def _check_here(layout: Layout, order: AttentionOrder, store: VerdictStore) -> tuple[Verdict | None, str | None]:
    """The verdict of a check on this process's own device, and the file of a kernel's traceback."""
    implementation, entry = str(order.config.implementation), _entry(order)
    store.keep({entry: Verdict(implementation=implementation, device_kind="", problem=_UNENDED)})
    report = None
    try:
        verdict = verdict_of(layout, order)
    except Exception as error:  # of the compiler or the runtime: it is what the check is for
        report = keep_report(traceback.format_exc())
        problem = explain(f"{type(error).__name__}: {first_line(str(error))}")
        verdict = Verdict(implementation=implementation, device_kind="", problem=problem)
    except BaseException:  # interrupted, which is not the kernel's fault
        store.forget(entry)
        raise
    if verdict is None:
        store.forget(entry)
    else:
        store.keep({entry: verdict})
    return verdict, report


def recorded_as(implementation: str, tiles: str | None) -> str:
    """One text of what attention runs, for the record of a job."""
    return implementation if tiles is None else f"{implementation} {tiles}"


def for_unfamiliar(device: Any) -> AttentionChoice:
    """The choice, with a sentence, for a device for which no kernel was made; for others one that leaves it open."""
    target = Target.of_device(device)
    if target.is_listed and (target.platform != "tpu" or target.runs_tpu_kernels):
        return AttentionChoice(implementation=None)
    memory = f", and jax says that it has {target.memory_bytes / 2**30:.1f} GiB" if not target.is_listed else ""
    why = f"{device.device_kind} runs on 'xla': no kernel was made for it{memory}"
    return AttentionChoice(implementation=None, why=why, is_set_aside=True)


def _platform(chips: Chips) -> str:
    """Of the chips that jax would open: "" where it is told to take the CPU."""
    asked = jax.config.values["jax_platforms"]
    return "" if asked and asked.split(",")[0] == "cpu" else chips.platform


def _entry(order: AttentionOrder) -> str:
    """The name under which a whole start's verdict is kept: of what decides its steps."""
    config, digest = order.config, hashlib.blake2b(digest_size=12)
    for field in _DECIDE:
        digest.update(f"{getattr(config, field)!r} ".encode())
    if config.mesh is None:
        digest.update(f"{order.num_chips} {config.devices} ".encode())
    digest.update(f"{config.implementation} {order.runs} {order.spec.digest_text()}".encode())
    return f"{START}{digest.hexdigest()}"


def _check(order: AttentionOrder, store: VerdictStore, silence_s: float) -> tuple[Verdict | None, str | None]:
    """The verdict of a check that runs now; None where there is none to be had, and the start itself says why.

    With it the file that has the traceback of a kernel that crashed.
    """
    sent: list[Any] = []
    text = ""
    if _is_open() and order.rehearsal is None:
        try:
            check_attention(order, sent.append)
            problem = None
        except Exception as error:  # of the compiler or the runtime: it is what the check is for
            problem, text = f"{type(error).__name__}: {first_line(str(error))}", traceback.format_exc()
    else:
        ended = run_child("ferrum_jax.startup.check_attention:check_attention", order, silence_s=silence_s)
        sent, problem, text = list(ended.sent), ended.problem, ended.text
    last = sent[-1] if sent else None
    if isinstance(last, dict) and "refused" in last:
        return None, None
    if isinstance(last, dict) and "closed" in last:
        held = Verdict(implementation=str(order.config.implementation), device_kind="", problem=explain(last["closed"]))
        return held, None
    found, report = None, None
    if problem is not None:
        report = keep_report(text) if text.strip() else None
        found = Verdict(implementation=str(order.config.implementation), device_kind="", problem=explain(problem))
    elif isinstance(last, dict) and last["verdict"] is not None:
        found = Verdict(**last["verdict"])
    if found is not None:
        store.keep({_entry(order): found})
    return found, report


def _follow(
    verdict: Verdict | None,
    kernel: str,
    config: EngineConfig,
    *,
    is_wanted: bool,
    is_bundled: bool,
    report: str | None = None,
) -> AttentionChoice:
    """report: the file that has what a check that crashed said."""
    if verdict is None:
        return AttentionChoice(implementation=config.implementation)
    about, kind = f"attention {kernel!r}", verdict.device_kind
    if not verdict.is_right:
        text = f"{about} is not right on this chip: {verdict.problem}"
        more = _REPORT if report is None else f"{_REPORT}; {report} holds the traceback"
        if config.implementation is not None:
            raise ValueError(f"{text}; leave implementation out, or take 'xla'. {more}")
        return AttentionChoice(
            implementation="xla",
            why=f"{text}; it is set aside for 'xla'. {more}",
            is_set_aside=True,
            device_kind=kind,
        )
    found = verdict.tiles if config.attention_tiles is None and not is_bundled else None
    tiles = tiles_text(found) if found else config.attention_tiles
    if config.implementation is not None:
        return AttentionChoice(implementation=kernel, tiles=tiles)
    speed = "" if verdict.speed is None else f", {verdict.speed:.2g} times as fast as 'xla'"
    if verdict.speed is not None and verdict.speed < 1 and not is_bundled:
        why = f"{about} is right on this chip{speed}: 'xla' runs instead"
        return AttentionChoice(implementation="xla", why=why, device_kind=kind)
    if is_wanted or verdict.speed is not None:
        why = f"{about}: the check found it right{speed}{f', and tiles {tiles} fastest' if found else ''}"
        return AttentionChoice(implementation=kernel, tiles=tiles, why=why, device_kind=kind)
    return AttentionChoice(implementation=None)


def _is_open() -> bool:
    """Whether this process has opened its devices."""
    from jax._src import xla_bridge  # nothing public says it

    return xla_bridge.backends_are_initialized()
