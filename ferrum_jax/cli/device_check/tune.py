"""Tuning on a chip: of the tiles of a model's decode attention, its own and neighbours, the fastest right ones."""

import dataclasses
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ferrum_jax.cli.device_check.problem import interpreter, options_of
from ferrum_jax.cli.device_check.timing import measure
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.startup.check_attention import cases_of
from ferrum_jax.engine.startup.faults import open_devices
from ferrum_jax.inputs.sizes.tiles import tiles_text
from ferrum_jax.io.child import Send, first_line
from ferrum_jax.io.files.json_files import read_json
from ferrum_jax.models.families import registry
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.runtime.compile.verdicts import Verdict, entry_of
from ferrum_jax.runtime.layout import lay_out
from ferrum_jax.runtime.placing.fit import PROBE_BLOCKS
from pallas_kernels.paged_attention import TpuConfig, run_case
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.fastest_tiles import fastest
from pallas_kernels.paged_attention.tpu.decode.config import DecodeConfig
from pallas_kernels.target import Target
from pallas_kernels.tolerance import difference, tolerance_of

_KERNEL = "mosaic_tpu"
_ROWS, _CONTEXT = 64, 2048  # of a decode step whose tiles are timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOrder:
    """model: a folder. mesh: for which the heads of a device are tuned. rehearsal: a TPU whose kernel is interpreted on
    the CPU, for tests; then all is tiny and the times are the interpreter's."""

    model: str
    mesh: str = "tp=1"
    rehearsal: str | None = None


def tune_attention(order: TuneOrder, send: Send) -> None:
    """Sends for each tiles {"begins": text}, then its line, {"tiles", "median_s", "problem", ..}, and at the end of a
    case {"entry", "own", "best", "device_kind"}. Raises ValueError where the model cannot run here."""
    devices = open_devices(None)
    config = EngineConfig(mesh=order.mesh, num_blocks=PROBE_BLOCKS, max_num_seqs=_ROWS, max_model_len=_CONTEXT)
    if order.rehearsal is None:
        config = dataclasses.replace(config, implementation=_KERNEL)
    spec = registry.spec_of(read_json(Path(order.model) / "config.json"))
    most = min(_CONTEXT, spec.max_position_embeddings)
    layout = lay_out(spec, dataclasses.replace(config, max_model_len=most), make_mesh(config.mesh_shape, devices))
    target = layout.options.target if order.rehearsal is None else Target.named(order.rehearsal)
    for case, bucket in cases_of(layout):
        if bucket.decode_only and case.rope_dim is None:  # tiles of latents are the kernel's own
            _tune(case if order.rehearsal else _timed(case, most), target, devices[0], send)


def tuned(sent: Sequence[dict[str, Any]]) -> dict[str, Verdict]:
    """From what was sent, a verdict for each entry that was tuned: with tiles where others than its own are best."""
    return {
        line["entry"]: Verdict(
            implementation=_KERNEL,
            device_kind=line["device_kind"],
            problem=line["problem"],
            tiles=None if line["best"] == line["own"] else line["best"],
        )
        for line in sent
        if "entry" in line
    }


def _timed(case: Case, context: int) -> Case:
    """The case with rows for which a time says something."""
    return dataclasses.replace(
        case, rows=((context - 1, 1),) * _ROWS, num_tokens=_ROWS, num_rows=_ROWS, tiny=False, name="decode"
    )


def _tune(case: Case, target: Target, device: Any, send: Send) -> None:
    expected = _run(case, "xla", None, device.platform)[0]
    pool = run_case.make_inputs(case, _KERNEL).pool
    config = run_case.choose_config(case, _KERNEL, target, pool)
    assert isinstance(config, TpuConfig)
    if device.platform == "cpu":
        config = run_case.smallest_tiles(config, case.block_size)
    problems: dict[str, str | None] = {}

    def seconds_of(decode: DecodeConfig) -> float | None:
        tiles = tiles_text(decode.tiles)
        send({"begins": f"tiles {tiles}"})
        line: dict[str, Any] = {"tiles": tiles, "shape": case.shape_class, "median_s": None}
        try:
            with_tiles = dataclasses.replace(config, decode=decode)
            found, line["median_s"] = _run(case, _KERNEL, with_tiles, device.platform)
            line["problem"] = difference(found, expected, tolerance_of(case.dtype, device.platform)).problem
        except Exception as error:  # of the compiler or the runtime: other tiles may do
            line |= {"problem": f"{type(error).__name__}: {first_line(str(error))}", "words": traceback.format_exc()}
        problems[tiles] = line["problem"]
        send(line)
        return line["median_s"] if line["problem"] is None else None

    own = config.decode
    best = fastest(own, own.neighbours(config.shape), seconds_of)
    entry = entry_of("paged_attention", f"{case.dtype}/{case.kv_dtype}", case.shape_class)
    ends = {"entry": entry, "own": own.tiles, "best": best.tiles, "device_kind": device.device_kind}
    send(ends | {"problem": problems[tiles_text(best.tiles)]})


def _run(case: Case, implementation: str, config: TpuConfig | None, platform: str) -> tuple[np.ndarray, float]:
    """The result of real tokens, and the median seconds of a call."""
    arguments = run_case.make_inputs(case, implementation)
    chosen = config or run_case.choose_config(case, implementation, Target.named("cpu"), arguments.pool)
    interpret = interpreter() if implementation == _KERNEL and platform == "cpu" else False
    call = run_case.make_attend(
        case, arguments, chosen, implementation, interpret=interpret, compiler_options=options_of(platform)
    )
    started = time.perf_counter()
    result = np.asarray(call())[: len(case.rows)].astype(np.float64)
    if implementation == "xla" or platform == "cpu":  # nobody reads the time of these, or it means nothing
        return result, time.perf_counter() - started
    return result, measure(call).median_s
