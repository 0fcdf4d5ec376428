"""The whole check: what is here, what it reaches, its kernels and its engine, each in a child process with a deadline.

This process opens no device: a TPU belongs to one process, and what crashes or hangs is to be a line of the report.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.cli.device_check.engine_check import EngineOrder
from ferrum_jax.cli.device_check.estimates import with_estimates
from ferrum_jax.cli.device_check.kernels import KernelOrder
from ferrum_jax.cli.device_check.machine import look, why_no_chip
from ferrum_jax.cli.device_check.op_problems import OPS
from ferrum_jax.cli.device_check.report import Report
from ferrum_jax.cli.device_check.tune import TuneOrder, tuned
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.startup.accelerators import explain
from ferrum_jax.inputs.sizes.tiles import tiles_text
from ferrum_jax.io.child import Ended, run_child
from ferrum_jax.io.paths import install_command
from ferrum_jax.runtime.compile.verdicts import START, Verdict, VerdictKey, VerdictStore, entry_of, together
from ferrum_jax.text.tokenizer import Tokenizer

_ROOT = Path(__file__).parents[3]
_MODEL, _PROMPTS = _ROOT / "checkpoints" / "demo", _ROOT / "scripts" / "demo_prompts.jsonl"
_FEW_PROMPTS, _MAX_PROMPT_TOKENS = 8, 400
_SILENCE_S = 240.0  # a compile of the largest case on a slow machine
_BUDGETS_S = {
    "paged_attention": 100.0,
    "kv_write": 25.0,
    "quantized_matmul": 45.0,
    "grouped_matmul": 30.0,
}  # of cases, where the whole has _SECONDS
_PRODUCTS = ("quantized_matmul", "grouped_matmul")
_BUDGET_S, _SECONDS = 15.0, 300.0
PARTS = (*OPS, "engine")
_ENDLESS_S = 1e9
_MAX_CRASHES = 2  # of an op's child: what comes after is left out
_HERE = "ferrum_jax.cli.device_check."


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """full: all cases, prompts, KV dtypes and meshes, without a limit of time. model: a folder, None is the demo's.

    tune: also the tiles of the model's decode attention on a TPU, with the heads that a device of the mesh has.
    seconds: in which it is to be over, about; without `full`. parts: of PARTS. silence_s: how long a part may say
    nothing. fault: of engine/startup/faults.py, for tests. rehearsal: of TuneOrder, for tests.
    """

    full: bool = False
    tune: bool = False
    model: str | None = None
    mesh: str = "tp=1"
    compilation_cache_dir: str | None = EngineConfig().compilation_cache_dir
    seconds: float = _SECONDS
    silence_s: float = _SILENCE_S
    parts: tuple[str, ...] = PARTS
    fault: str | None = None
    rehearsal: str | None = None

    def __post_init__(self) -> None:
        _ = EngineConfig(mesh=self.mesh).mesh_shape  # refuses what means nothing, before minutes of work
        if self.mesh != "tp=1" and not self.tune:
            raise ValueError(f"mesh is {self.mesh!r}, which only tuning follows; add --tune, or leave it out")
        if unknown := set(self.parts) - set(PARTS):
            raise ValueError(f"parts has {sorted(unknown)}; there are {', '.join(PARTS)}")
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds:g}; it must be more than 0")


def check_device(
    options: CheckOptions | None = None, on_progress: Callable[[str], None] = lambda what: None, **fields: Any
) -> Report:
    """Measures this machine and checks its kernels; verdicts of a chip are kept for engines.

    fields: of CheckOptions. on_progress: called with what is being done. Call it before anything opens a device.
    """
    return _Check(options or CheckOptions(**fields), on_progress).run()


class _Check:
    def __init__(self, options: CheckOptions, on_progress: Callable[[str], None]) -> None:
        self._options, self._say = options, on_progress
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._words: list[str] = []
        self._doing = self._running = ""
        self._until = float("inf") if options.full else time.monotonic() + options.seconds

    def run(self) -> Report:
        started = time.monotonic()
        options = self._options
        machine = look(fault=options.fault)
        self._problems += machine.problems
        devices = self._devices()
        blind = why_no_chip(machine, devices, f"install it: {install_command('{}')}")
        if blind is not None:
            self._problems.append(blind)
        rates = [] if devices is None else self._rates()
        kernels: list[dict[str, Any]] = []
        for op in OPS if devices is not None else ():
            if self._has_time(op):
                kernels += self._op(op, rates)
        tiles = self._tune(devices) if options.tune and devices is not None else []
        engine = self._engine() if devices is not None and self._has_time("engine") else []
        report = Report(
            machine={
                "chips": list(machine.chips.ids),
                "packages": machine.packages,
                "driver": machine.driver,
                "python": machine.python,
                "devices": devices,
            },
            rates=rates,
            kernels=with_estimates(
                [line for line in kernels if "left_out" not in line], None if devices is None else devices["generation"]
            ),
            engine=engine,
            tiles=[line for line in tiles if "median_s" in line],
            problems=self._problems,
            notes=self._notes,
            seconds=time.monotonic() - started,
            words=self._words,
        )
        if devices is not None and devices["platform"] != "cpu":
            store = VerdictStore(options.compilation_cache_dir, VerdictKey.here(machine.chips.name))
            store.forget(START)  # of what a start found, the next finds it anew
            store.keep(verdicts(kernels) | tuned(tiles))
        return report

    def _has_time(self, part: str) -> bool:
        """Whether the part runs; a note says so of one that was asked for and does not."""
        if part not in self._options.parts:
            return False
        if is_late := time.monotonic() > self._until:
            self._notes.append(f"{part} left out for lack of time: --full takes all")
        return not is_late

    def _child(self, function: str, order: object, what: str, on_sent: Callable[[Any], None] = lambda _: None) -> Ended:
        self._say(what)
        self._doing = what
        ended = run_child(_HERE + function, order, silence_s=self._options.silence_s, on_sent=on_sent)
        if ended.problem is not None:
            self._words.append(f"{what}: {ended.problem}\n{ended.text}")
        for sent in ended.sent:
            if isinstance(sent, dict) and "words" in sent:
                self._words.append(f"{what}: {sent['problem']}\n{sent.pop('words')}")
        return ended

    def _devices(self) -> dict[str, Any] | None:
        ended = self._child("machine:describe_devices", self._options.fault, "looking for devices")
        if ended.problem is not None:
            self._problems.append(f"the devices cannot be opened: {explain(ended.problem)}")
        return ended.sent[-1] if ended.sent else None

    def _rates(self) -> list[dict[str, Any]]:
        ended = self._child("rates:measure_rates", None, "measuring what the device reaches")
        if ended.problem is not None:
            self._problems.append(f"its rates cannot be measured: {explain(ended.problem)}")
        return list(ended.sent)

    def _op(self, op: str, rates: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The lines of an op, also of cases left out, and of one with which the child ends: the next goes on behind."""
        options, lines, begun = self._options, [], []
        until = time.monotonic() + _BUDGETS_S.get(op, _BUDGET_S) * options.seconds / _SECONDS
        until = min(until, self._until)
        for _ in range(_MAX_CRASHES):
            order = KernelOrder(
                op=op,
                full=options.full,
                budget_s=_ENDLESS_S if options.full else max(0.0, until - time.monotonic()),
                rates=_by_name(rates),
                done=tuple(line["case"] for line in begun),
                fault=options.fault if op == "paged_attention" else None,
            )
            ended = self._child("kernels:check_op", order, f"checking {op}", lambda sent: self._say_case(op, sent))
            begun += [sent["begins"] for sent in ended.sent if "begins" in sent]
            lines += [sent for sent in ended.sent if "begins" not in sent]
            if ended.problem is None:
                break
            last = begun[-1] if begun else {"op": op, "case": "no case", "implementation": "xla"}
            lines.append(last | {"problem": explain(ended.problem)})
        left = [line for line in lines if "left_out" in line]
        if left:
            cases = "1 case" if len(left) == 1 else f"{len(left)} cases"
            self._notes.append(f"{cases} of {op} left out for lack of time: --full takes all")
        return lines

    def _say_case(self, op: str, sent: Any) -> None:
        if "begins" in sent:
            self._say(f"checking {op}: {sent['begins']['case']} with {sent['begins']['implementation']}")

    def _tune(self, devices: dict[str, Any]) -> list[dict[str, Any]]:
        """The lines of tiles, and what is best of each case. Tiles with which the child ends are not tried again."""
        options = self._options
        if devices["platform"] != "tpu" and options.rehearsal is None:
            self._notes.append("no tiles were tuned: only the TPU's kernel has some to choose from")
            return []
        model = options.model or str(_MODEL)
        order = TuneOrder(model=model, mesh=options.mesh, rehearsal=options.rehearsal)
        ended = self._child("tune:tune_attention", order, "tuning decode attention", self._say_run)
        lines = [sent for sent in ended.sent if "begins" not in sent]
        if ended.problem is not None:
            self._problems.append(f"tuning ended with {_last_begun(ended, 'tiles')}: {explain(ended.problem)}")
        best = {tiles_text(line["best"]) for line in lines if "entry" in line}
        return [line | {"is_best": line.get("tiles") in best} for line in lines]

    def _engine(self) -> list[dict[str, Any]]:
        options = self._options
        model = options.model or str(_MODEL)
        if options.model is None and not _MODEL.is_dir():
            self._notes.append("the engine was not checked: the demo model is not in this installation; name --model")
            return []
        prompts = _prompts(model)
        order = EngineOrder(
            model=model,
            prompts=prompts if options.full else prompts[:_FEW_PROMPTS],
            full=options.full,
            compilation_cache_dir=options.compilation_cache_dir,
            budget_s=max(0.0, min(_ENDLESS_S, self._until - time.monotonic())),
        )
        ended = self._child("engine_check:check_engine", order, "checking the engine", self._say_run)
        lines = [sent for sent in ended.sent if "run" in sent]
        self._notes += [
            f"engine, {sent['left_out']}, left out for lack of time: --full takes all"
            for sent in ended.sent
            if "left_out" in sent
        ]
        if ended.problem is not None:
            name = _last_begun(ended, "no run")
            lines.append({"run": name, "beside": None, "equal": 0, "of": 0, "problem": explain(ended.problem)})
        return lines

    def _say_run(self, sent: Any) -> None:
        """Says which run has begun and, of an engine, how far it is."""
        if "begins" in sent:
            self._running = sent["begins"]
            self._say(f"{self._doing}: {self._running}")
        elif "so_far" in sent:
            self._say(f"{self._doing}: {self._running}, {sent['so_far']}")


def verdicts(lines: Iterable[dict[str, Any]]) -> dict[str, Verdict]:
    """A verdict for each op, dtype and shape class that ran a kernel; speeds are of real sizes alone.

    The class of a product has few tokens and many: it is as fast as the slowest, and has no verdict where some of it
    was left out and nothing was wrong.
    """
    found: dict[tuple[str, str], list[Verdict]] = {}
    incomplete = set()
    for line in lines:
        if "shape" not in line:
            continue
        entry = line["op"], entry_of(line["op"], line["dtype"], line["shape"])
        if "left_out" in line:
            incomplete.add(entry)
        elif line["implementation"] != "xla":
            verdict = Verdict(
                implementation=line["implementation"],
                device_kind=line["device_kind"],
                problem=line["problem"],
                speed=line.get("speed") if line.get("num_bytes") else None,
            )
            found.setdefault(entry, []).append(verdict)
    kept = {entry: together(each, by_slowest=entry[0] in _PRODUCTS) for entry, each in found.items()}
    return {
        name: verdict
        for (op, name), verdict in kept.items()
        if not (verdict.is_right and op in _PRODUCTS and (op, name) in incomplete)
    }


def _last_begun(ended: Ended, otherwise: str) -> str:
    return next((sent["begins"] for sent in reversed(ended.sent) if "begins" in sent), otherwise)


def _by_name(rates: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Bytes and operations a second, of what was measured and of the data sheet."""
    units, found = {"GB/s": 1e9, "Tflop/s": 1e12}, {}
    for rate in rates:
        if rate["unit"] in units and rate["value"]:
            found[rate["what"]] = rate["value"] * units[rate["unit"]]
            if rate["sheet"]:
                found[f"sheet of {rate['what']}"] = rate["sheet"] * units[rate["unit"]]
    return found


def _prompts(model: str) -> tuple[tuple[int, ...], ...]:
    """The demo's prompts as the model's tokens; where either is not to be had, made ones."""
    tokenizer = Tokenizer.load(model)
    if tokenizer is None or not _PROMPTS.is_file():
        return tuple(tuple((7 * i + 13 * n) % 200 + 6 for i in range(20 + 3 * n)) for n in range(_FEW_PROMPTS))
    texts = [json.loads(line)["prompt"] for line in _PROMPTS.read_text(encoding="utf-8").splitlines()]
    return tuple(tuple(tokenizer.encode(text)[:_MAX_PROMPT_TOKENS]) for text in texts)
