"""What each operation of a compiled TPU program takes by estimates, in the order in which it runs; nothing ran.

An operation takes the longest of three: XLA's own `estimated_cycles` (of a Pallas kernel cycles of its bundles), its
bytes over HBM, and its bytes over the links. A transfer that runs beside it (`copy-start`, `slice-start`, an all-reduce
of the SparseCore) takes what HBM or the links have left; where its `-done` comes too early, the wait is a line of its
own. A conditional takes its quickest branch. What nobody estimates takes the time of its bytes, and is counted.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from pallas_kernels.target import Target
from scripts.hlo_collectives import KINDS, bytes_of
from scripts.xla_cycles import ESTIMATE, UNKNOWN_CYCLES, computations, loop_trips

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (\(.*?\)(?= [\w-]+\()|\S+) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLS = re.compile(r"\b(?:calls|to_apply)=%([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%(\S+?), false_computation=%(\S+?)[,\s]")
_WHILE = re.compile(r"condition=%([\w.-]+), body=%([\w.-]+)")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[(\d+),(\d+)\])")
_WINDOWED = ("gather", "dynamic-slice", "slice")  # read of an operand what they give
_FREE = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "partition-id", "reshape")
_PRODUCTS = ("convolution", "dot")
_LINKS = {"v5e": 4, "v5p": 6, "v6e": 4, "v7x": 3}  # of a device; of v7x half of a chip's six, for one of its two cores
_LEAST_ARRAY = 1 << 12  # bytes; fewer are scalars, which no bandwidth bounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """A line of a program. shape: the text of its result's type. rest: all behind the operands' bracket."""

    name: str
    kind: str
    shape: str
    operands: tuple[str, ...]
    rest: str
    number: int = 0  # of a parameter

    @property
    def is_kernel(self) -> bool:
        return 'custom_call_target="tpu_custom_call"' in self.rest


Bodies = Mapping[str, list[Instruction]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a kernel's call takes: cycles of its bundles, bytes over HBM, operations at a rate of the matrix unit."""

    cycles: float
    hbm_bytes: float
    flops: float


@dataclasses.dataclass(kw_only=True)
class Line:
    """All operations of one label. seconds: all of them; bound: those in which HBM, links or the matrix unit bind."""

    count: float = 0
    seconds: float = 0
    bound: float = 0

    def add(self, seconds: float, bound: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.bound += min(bound, seconds)

    @property
    def lost(self) -> float:
        """Seconds in which nothing binds."""
        return self.seconds - min(max(self.bound, 0.0), self.seconds)


@dataclasses.dataclass(kw_only=True)
class Walk:
    """A program walked through.

    kernel: the work of a call, by the types of its operands. turns: of every loop whose end is data.
    unknown: operations on arrays for which XLA has no estimate. hbm_bytes, flops: of all that ran.
    """

    target: Target
    kernel: Callable[[Instruction, Mapping[str, str]], Work]
    turns: int = 1
    lines: dict[str, Line] = dataclasses.field(default_factory=dict)
    hbm_bytes: float = 0
    flops: float = 0
    unknown: int = 0
    _pending: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # bytes of HBM, seconds of links

    def through(self, hlo: str) -> Walk:
        """Itself, once all of a program has run."""
        bodies, entry = computations(hlo)
        parsed = {name: [each for line in body if (each := parse(line))] for name, body in bodies.items()}
        self._run(parsed, entry, loop_trips(hlo, bodies, others=self.turns))
        return self

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines.values())

    def _run(self, bodies: Mapping[str, list[Instruction]], name: str, trips: Mapping[str, int]) -> None:
        shapes = {each.name: each.shape for each in bodies[name]}
        for each in bodies[name]:
            if found := _WHILE.search(each.rest):
                for _ in range(trips[found[1]]):
                    self._run(bodies, found[2], trips)
            elif found := _BRANCHES.search(each.rest):
                self._run_quickest([n for group in found.groups() if group for n in _names(group)], bodies, trips)
            elif each.kind == "call":
                self._run(bodies, _CALLS.findall(each.rest)[0], trips)
            elif each.kind.endswith("-start"):
                self._start(each, bodies)
            elif each.kind.endswith("-done"):
                self._await(each)
            elif each.kind not in _FREE and not ("custom-call" in each.kind and not each.is_kernel):
                self._operation(each, bodies, shapes)

    def _run_quickest(self, names: list[str], bodies: Bodies, trips: Mapping[str, int]) -> None:
        def alone(name: str) -> float:
            walk = Walk(target=self.target, kernel=self.kernel, turns=self.turns)
            walk._run(bodies, name, trips)
            return walk.seconds

        self._run(bodies, min(names, key=alone), trips)

    def _operation(self, each: Instruction, bodies: Bodies, shapes: Mapping[str, str]) -> None:
        clock, rate = self.target.clock_hz, self.target.bandwidth_bytes_per_s
        assert clock is not None, self.target.generation
        estimate, by_links, flops = ESTIMATE.search(each.rest), 0.0, 0.0
        if each.is_kernel:
            work = self.kernel(each, shapes)
            cycles, moved, flops = work.cycles, work.hbm_bytes, work.flops
        else:
            cycles = int(estimate[1]) if estimate and int(estimate[1]) < UNKNOWN_CYCLES else 0.0
            moved = _hbm_bytes(each, shapes, bodies)
            flops = product_flops(_called(each, bodies) if each.kind == "fusion" else [each], shapes)
            if each.kind.startswith(KINDS):
                by_links, moved = self._link_seconds(each), 0.0
            elif not cycles:
                self.unknown += array_bytes(each.shape) >= _LEAST_ARRAY
        seconds = max(cycles / clock, moved / rate, by_links)
        self.hbm_bytes += moved
        self.flops += flops
        beside = self._drain(max(0.0, seconds * rate - moved), seconds)
        by_hbm = (moved + beside) / rate
        self._add(label_of(each), seconds, max(by_hbm, by_links, flops / self.target.flops_per_s))

    def _start(self, each: Instruction, bodies: Bodies) -> None:
        """Transfers that run beside others: the larger half of what is sent and given crosses HBM, or the links."""
        inner = [each, *_called(each, bodies)]
        collective = next((one for one in inner if one.kind.startswith(KINDS)), None)
        if collective is not None:
            self._pending[each.name] = [0.0, self._link_seconds(collective)]
            return
        sizes = [bytes_of(*found[:2]) for found in _ARRAY.findall(each.shape)]
        given = sizes[1] if each.kind == "slice-start" and len(sizes) > 1 else min(sizes[:2], default=0)
        self._pending[each.name] = [given, 0.0]
        self.hbm_bytes += given

    def _await(self, each: Instruction) -> None:
        """What is left of a transfer, behind those that began before it."""
        name, rate, waited, moved = each.operands[0], self.target.bandwidth_bytes_per_s, 0.0, 0.0
        while name in self._pending:
            first = next(iter(self._pending))
            left, by_links = self._pending.pop(first)
            moved += left
            waited += max(left / rate, by_links if first == name else 0.0)
        if waited:
            kind = "a collective" if ".call" in name or name.startswith(KINDS) else "a transfer"
            self._add(f"wait for {kind}", waited, waited)

    def _drain(self, room: float, seconds: float) -> float:
        """Bytes of the transfers that an operation leaves room for; those of links run as long as it does."""
        moved = 0.0
        for name, (left, by_links) in list(self._pending.items()):
            taken = min(left, room - moved)
            moved += taken
            self._pending[name] = [left - taken, max(0.0, by_links - seconds)]
        return moved

    def _link_seconds(self, each: Instruction) -> float:
        """A ring's time: an all-reduce sends its bytes twice, but for the part that is its own; others once.

        A ring goes along one link of a device, or along as many as the compiler gave it colours.
        """
        found, colours = _GROUPS.search(each.rest), re.search(r"colors:(\d+)", each.rest)
        size = 1 if found is None else len(found[1].split(",")) if found[1] else int(found[3])
        if size == 1:
            return 0.0
        along = int(colours[1]) if colours else 1
        rate = self.target.link_bytes_per_s * min(1.0, along / _LINKS[self.target.generation])
        given = array_bytes(each.shape) * (size if each.kind.startswith("reduce-scatter") else 1)
        times = 2 if each.kind.startswith("all-reduce") else 1
        return times * given * (size - 1) / size / rate

    def _add(self, label: str, seconds: float, bound: float) -> None:
        self.lines.setdefault(label, Line()).add(seconds, bound)


def parse(line: str) -> Instruction | None:
    """The instruction of a line; None for one that is none."""
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    inside, _, rest = found[4].partition(")")
    number = int(inside) if found[3] == "parameter" else 0
    return Instruction(
        name=found[1], shape=found[2], kind=found[3], operands=tuple(_names(inside)), rest=f"{rest} ", number=number
    )


def label_of(each: Instruction) -> str:
    """Equal for the same operation of several layers: a kernel's name or what the program calls it, and its result."""
    named = re.search(r'op_name="([^"]*)"', each.rest)
    tail = named[1].rpartition("/")[2] if named else ""
    what = re.sub(r"[.\d]+$", "", each.name) if each.is_kernel else each.kind
    first = _ARRAY.search(each.shape)
    result = f"{first[1]}[{first[2]}]" if first else ""
    return " ".join(part for part in (what, "" if each.is_kernel else tail, result) if part)


def product_flops(body: Sequence[Instruction], outer: Mapping[str, str]) -> float:
    """Operations of the products among instructions."""
    shapes, total = {**outer, **{each.name: each.shape for each in body}}, 0.0
    for each in body:
        if each.kind not in _PRODUCTS:
            continue
        result, left = sizes_of(each.shape), sizes_of(shapes.get(each.operands[0], ""))
        if found := re.search(r"dim_labels=(\w+)_\w+->", each.rest):
            inner = math.prod(n for n, label in zip(left, found[1], strict=False) if label == "f" or label.isdigit())
        else:
            axes = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", each.rest)
            inner = math.prod(left[int(axis)] for axis in axes[1].split(",")) if axes else 1
        total += 2 * math.prod(result) * inner
    return total


def array_bytes(shape: str) -> int:
    """Bytes of all arrays of a type, wherever they are."""
    return sum(bytes_of(dtype, dims) for dtype, dims, _ in _ARRAY.findall(shape))


def _hbm_bytes(each: Instruction, shapes: Mapping[str, str], bodies: Bodies) -> float:
    """Bytes of operands and results that are in HBM; of an operand that a fusion looks into, what it reads of it."""
    if each.kind in _WINDOWED:
        return 2.0 * hbm_array_bytes(each.shape)
    if each.kind == "dynamic-update-slice":
        return float(hbm_array_bytes(shapes.get(each.operands[1], "")))
    read, updated = _looked_into(_called(each, bodies) if each.kind == "fusion" else [], bodies)
    total = 0.0
    for number, name in enumerate(each.operands):
        whole = hbm_array_bytes(shapes.get(name, ""))
        total += min(whole, read.get(number, whole))
    return total + (min(hbm_array_bytes(each.shape), updated) if updated else hbm_array_bytes(each.shape))


def _looked_into(body: Sequence[Instruction], bodies: Bodies) -> tuple[dict[int, float], float]:
    """Bytes that a fusion reads of parameters, by number, where it takes windows of them, and those it updates."""
    users: dict[str, list[Instruction]] = {}
    for each in body:
        for name in each.operands:
            users.setdefault(name, []).append(each)
    shapes = {each.name: each.shape for each in body}
    updated = sum(array_bytes(shapes[each.operands[1]]) for each in body if each.kind == "dynamic-update-slice")
    read = {}
    for each in body:
        windows = [_window(*use, bodies) for use in _uses(each.name, users)] if each.kind == "parameter" else []
        sizes = [size for size in windows if size is not None]
        if windows and len(sizes) == len(windows):
            read[each.number] = sum(sizes)
    return read, float(updated)


def _window(user: Instruction, name: str, bodies: Bodies) -> float | None:
    """Bytes that a user reads of a value; None where it reads all of it."""
    if user.kind in _WINDOWED:
        return float(array_bytes(user.shape)) if user.operands[0] == name else 0.0
    if user.kind == "dynamic-update-slice":
        return 0.0 if user.operands[1] != name else None
    inner = _called(user, bodies)
    return _looked_into(inner, bodies)[0].get(user.operands.index(name)) if user.kind == "fusion" and inner else None


def _uses(name: str, users: Mapping[str, list[Instruction]]) -> Iterator[tuple[Instruction, str]]:
    """Who reads a value inside of a fusion, bitcasts left out, and by which name."""
    for user in users.get(name, ()):
        if user.kind in ("bitcast", "reshape"):
            yield from _uses(user.name, users)
        else:
            yield user, name


def _called(each: Instruction, bodies: Bodies) -> list[Instruction]:
    """The instructions of what it calls, none where it calls nothing."""
    return next((bodies[name] for name in _CALLS.findall(each.rest) if name in bodies), [])


def hbm_array_bytes(shape: str) -> int:
    """Bytes of those arrays of a type that are in HBM."""
    return sum(bytes_of(*found[:2]) for found in _ARRAY.findall(shape) if "S(" not in found[2])


def sizes_of(shape: str) -> list[int]:
    """The sizes of the first array of a type."""
    found = _ARRAY.search(shape)
    return [int(n) for n in found[2].split(",") if n] if found else []


def _names(text: str) -> list[str]:
    return _OPERAND.findall(text)


def instructions_of(hlo: str) -> list[tuple[Instruction, dict[str, str]]]:
    """All instructions of a program, each with the types of what its computation has."""
    found = []
    for body in computations(hlo)[0].values():
        parsed = [each for line in body if (each := parse(line))]
        shapes = {each.name: each.shape for each in parsed}
        found += [(each, shapes) for each in parsed]
    return found
