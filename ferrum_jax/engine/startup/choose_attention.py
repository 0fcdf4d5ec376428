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

from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.startup.accelerators import Chips, explain
from ferrum_jax.engine.startup.check_attention import AttentionOrder, Rehearsal, probe_layout, verdict_of
from ferrum_jax.inputs.sizes.tiles import tiles_text
from ferrum_jax.io.child import first_line, run_child
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.runtime.compile.refused_kernel import keep_report
from ferrum_jax.runtime.compile.verdicts import START, Verdict, VerdictKey, VerdictStore
from ferrum_jax.runtime.settled import lacks_kernels
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

    is_set_aside: a kernel that would have run, or that one expects of such a device, does not. device_kind: the chip
    that this holds for, "" is any.
    """

    implementation: str | None
    tiles: str | None = None
    why: str = ""
    is_set_aside: bool = False
    device_kind: str = ""

    @classmethod
    def recorded(cls, text: str) -> AttentionChoice:
        """The choice that was recorded (`StepOptions.recorded`), without its sentence."""
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
    mesh: Mesh | None = None,
    is_bundled: bool = False,
    chips: Chips | None = None,
    rehearsal: Rehearsal | None = None,
    silence_s: float = SILENCE_S,
) -> AttentionChoice:
    """The choice of one process, for all where there are several. It opens no device that is not open.

    mesh: of several processes, whose devices are open, so that no child can have one. is_bundled: its executables were
    compiled for the platform's kernel, which is set aside only where it is wrong. chips: of this machine, found where
    None. Raises ValueError where the config names a kernel that is found wrong.
    """
    chips = chips or Chips.here()
    platform = _platform(chips) if mesh is None else mesh.devices.flat[0].platform
    platform = platform if rehearsal is None else Target.named(rehearsal.target).platform
    if config.implementation is None and lacks_kernels(spec, config.kv_dtype, platform):
        return _ON_XLA
    order = _order(spec, config, platform, chips, rehearsal)
    if order is None:
        return AttentionChoice(implementation=config.implementation)
    store = VerdictStore(None if rehearsal and mesh is None else config.compilation_cache_dir, order.key)
    verdict, report = store.find(_entry(order)), None
    if verdict is None:
        verdict, report = _check(order, store, silence_s) if mesh is None else _check_here(order, store)
    return _follow(verdict, order, config, is_bundled=is_bundled, report=report)


def _order(
    spec: ModelSpec, config: EngineConfig, platform: str, chips: Chips, rehearsal: Rehearsal | None
) -> AttentionOrder | None:
    """The check to run before the kernel does; None if no kernel would run, or the config wants no check."""
    kernel = config.implementation or _KERNELS.get(platform)
    if kernel in (None, "xla") or config.check == "off" or platform == "":
        return None
    return AttentionOrder(
        spec=spec,
        config=dataclasses.replace(config, implementation=kernel if rehearsal is None else "xla"),
        implementation=kernel,
        key=VerdictKey.here(chips.name),
        num_chips=len(chips.ids),
        rehearsal=rehearsal,
    )


def _check_here(order: AttentionOrder, store: VerdictStore) -> tuple[Verdict | None, str | None]:
    """The verdict of a check on this process's own device, and the file of a kernel's traceback.

    It may take this process with it. So a check that begins is kept as one that did not end, until it has, and the next
    start sets the kernel aside.
    """
    try:
        layout = probe_layout(order, jax.devices())
    except ValueError:  # the kernel cannot run here: the start itself says why, or takes another
        return None, None
    entry, report = _entry(order), None
    store.keep({entry: _wrong(order, _UNENDED)})
    try:
        verdict = verdict_of(layout, order)
    except Exception as error:  # of the compiler or the runtime: it is what the check is for
        report = keep_report(traceback.format_exc())
        verdict = _wrong(order, f"{type(error).__name__}: {first_line(str(error))}")
    except BaseException:  # interrupted, which is not the kernel's fault
        store.forget(entry)
        raise
    if verdict is None:
        store.forget(entry)
    else:
        store.keep({entry: verdict})
    return verdict, report


def for_unfamiliar(device: Any) -> AttentionChoice:
    """A choice with its sentence for a device without kernels; for other devices an open choice."""
    target = Target.of_device(device)
    if target.is_listed and (target.platform != "tpu" or target.runs_tpu_kernels):
        return AttentionChoice(implementation=None)
    memory = f", and jax says that it has {target.memory_bytes / 2**30:.1f} GiB" if not target.is_listed else ""
    why = f"{device.device_kind} runs on 'xla': no kernel was made for it{memory}"
    return AttentionChoice(implementation=None, why=why, is_set_aside=True)


def _platform(chips: Chips) -> str:
    """Platform of the chips that jax would open: "" where it is told to take the CPU."""
    asked = jax.config.values["jax_platforms"]
    return "" if asked and asked.split(",")[0] == "cpu" else chips.platform


def _entry(order: AttentionOrder) -> str:
    """The name under which a whole start's verdict is kept: of what decides its steps."""
    config, digest = order.config, hashlib.blake2b(digest_size=12)
    for field in _DECIDE:
        digest.update(f"{getattr(config, field)!r} ".encode())
    if config.mesh is None:
        digest.update(f"{order.num_chips} {config.devices} ".encode())
    digest.update(f"{order.implementation} {order.spec.digest_text()}".encode())
    return f"{START}{digest.hexdigest()}"


def _check(order: AttentionOrder, store: VerdictStore, silence_s: float) -> tuple[Verdict | None, str | None]:
    """The verdict of a check that runs now; None where there is none to be had, and the start itself says why.

    With it the file that has the traceback of a kernel that crashed.
    """
    if _is_open() and order.rehearsal is None:
        return _check_here(order, store)
    ended = run_child("ferrum_jax.engine.startup.check_attention:check_attention", order, silence_s=silence_s)
    last = ended.sent[-1] if ended.sent else None
    if isinstance(last, dict) and "refused" in last:
        return None, None
    if isinstance(last, dict) and "closed" in last:
        return _wrong(order, last["closed"]), None
    found, report = None, None
    if ended.problem is not None:
        report = keep_report(ended.text) if ended.text.strip() else None
        found = _wrong(order, ended.problem)
    elif isinstance(last, dict) and last["verdict"] is not None:
        found = Verdict(**last["verdict"])
    if found is not None:
        store.keep({_entry(order): found})
    return found, report


def _wrong(order: AttentionOrder, problem: str) -> Verdict:
    return Verdict(implementation=order.implementation, device_kind="", problem=explain(problem))


def _follow(
    verdict: Verdict | None,
    order: AttentionOrder,
    config: EngineConfig,
    *,
    is_bundled: bool,
    report: str | None = None,
) -> AttentionChoice:
    """report: the file that has what a check that crashed said."""
    if verdict is None:
        return AttentionChoice(implementation=config.implementation)
    kernel, kind = order.implementation, verdict.device_kind
    about = f"attention {kernel!r}"
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
    why = f"{about}: the check found it right{speed}{f', and tiles {tiles} fastest' if found else ''}"
    return AttentionChoice(implementation=kernel, tiles=tiles, why=why, device_kind=kind)


def _is_open() -> bool:
    """Whether this process has opened its devices."""
    from jax._src import xla_bridge  # nothing public says it

    return xla_bridge.backends_are_initialized()
