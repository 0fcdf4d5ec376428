"""The machine code of a Hopper kernel: its instructions, its loops, and what a trip of a loop takes.

It is read from what `nvdisasm` prints, with control codes as jaxlib writes them or with the encodings that `-hex` adds.
A control code says how many cycles its warp stalls before the next instruction, and which scoreboards it waits for
first; the former are counted as cycles, the latter only as waits.

A loop is all that leads from a block back to it. Its trip is the way round that multiplies and fetches most and, among
those, stalls least: spinning at a barrier that is not ready lies off that way, and a nested loop is passed once. So a
trip counts nothing that a warp need not run.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Sequence

_KERNEL = re.compile(r"^\.text\.(\S+):$")
_LABEL = re.compile(r"^(\.L_\S+):$")
_INSTRUCTION = re.compile(
    r"^(?P<control>.*?)/\*[0-9a-f]{4,}\*/\s+(?:(?P<guard>@\S+)\s+)?(?P<opcode>[\w.]+)(?P<rest>.*)$"
)
_CONTROL = re.compile(r"([\d&-]+):[\d-]:[\d-]:[YN-]:(\d+)")
_ENCODING = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_TARGET = re.compile(r"`\((\.L_\S+?)\)")
_GROUP_PRODUCT = re.compile(r"([HQI])GMMA\.(\d+)x(\d+)x(\d+)\.(\S+)")
_WARP_PRODUCT = re.compile(r"([HQI])MMA\.168(\d+)\.")
_CONSTANT = re.compile(r"(?:IMAD\.MOV\.U32|MOV) R\d+, (?:RZ, RZ, )?(0x[0-9a-f]+)$")
_ENDS = ("BRA", "EXIT", "BRX", "RET", "JMP")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}  # bytes of a thread; 4 where nothing is said


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """guard: its predicate, or "". stall: cycles until its warp's next. waits: whether for a scoreboard first."""

    guard: str
    opcode: str
    operands: str
    stall: int
    waits: bool

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def target(self) -> str | None:
        """The label that it may jump to."""
        found = _TARGET.search(self.operands) if self.name in ("BRA", "JMP") else None
        return found[1] if found else None

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow it."""
        has_condition = self.name == "BRA" and not self.operands.startswith("`(")
        return self.name not in _ENDS or self.guard != "" or has_condition

    @property
    def is_group_product(self) -> bool:
        """Whether a warpgroup issues it together: wgmma."""
        return _GROUP_PRODUCT.match(self.opcode) is not None

    @property
    def operations(self) -> int:
        """Multiplications and additions of a warpgroup's product (wgmma) or a warp's (mma)."""
        if group := _GROUP_PRODUCT.match(self.opcode):
            return 2 * int(group[2]) * int(group[3]) * int(group[4])
        warp = _WARP_PRODUCT.match(self.opcode)
        return 2 * 16 * 8 * int(warp[2]) if warp else 0

    @property
    def columns(self) -> int:
        """A warpgroup's product's columns, else 0."""
        group = _GROUP_PRODUCT.match(self.opcode)
        return int(group[3]) if group else 0

    @property
    def fetches(self) -> bool:
        """Whether it starts a transfer into shared memory."""
        return self.name in ("UTMALDG", "LDGSTS") or self.opcode.startswith("UBLKCP.S.G")

    @property
    def shared_bytes(self) -> int:
        """What a warp, for wgmma the warpgroup, moves into or out of shared memory; nothing for transfers."""
        parts = self.opcode.split(".")
        if group := _GROUP_PRODUCT.match(self.opcode):
            m, n, k = (int(group[i]) for i in (2, 3, 4))
            size = 1 if group[1] in "QI" else 4 if "TF32" in group[5] else 2
            left = m if self.operands.split(", ")[1].startswith("gdesc") else 0
            return (left + n) * k * size
        if self.name in ("LDSM", "STSM"):
            return 128 * next((int(part) for part in parts if part in ("2", "4")), 1)
        if self.name in ("LDS", "STS", "ATOMS", "LDGSTS"):
            return 32 * next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4)
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Count:
    """What some code takes of one warp. group_*: of its warpgroup together.

    stalls: cycles of a warp, if it never waits. columns: of the widest product of the warpgroup. has_bytes: factors are
    bytes, and a cycle has twice as many operations. announced: bytes that a thread tells barriers to expect. waits: for
    scoreboards and products. barriers: waits and arrivals. local: loads and stores of spilled registers.
    """

    instructions: int
    stalls: int
    group_operations: int
    columns: int
    operations: int
    has_bytes: bool
    mufu: int
    group_shared_bytes: int
    shared_bytes: int
    transfers: int
    announced: int
    waits: int
    barriers: int
    local: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """blocks: of the kernel, all that lie in it. path: indices of a trip's instructions. arms: of those off its way.

    What spins is in neither.
    """

    blocks: frozenset[int]
    path: tuple[int, ...]
    arms: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel's machine code. labels: the index of the instruction behind each."""

    name: str
    code: tuple[Instruction, ...]
    labels: dict[str, int]

    @functools.cached_property
    def blocks(self) -> list[range]:
        """The straight pieces of the code."""
        ends = {i + 1 for i, one in enumerate(self.code) if one.name in _ENDS}
        starts = sorted(start for start in {0, *self.labels.values(), *ends} if start < len(self.code))
        return [range(a, b) for a, b in zip(starts, [*starts[1:], len(self.code)], strict=True)]

    @functools.cached_property
    def successors(self) -> list[list[int]]:
        """The blocks that may follow each block."""
        at = {block.start: b for b, block in enumerate(self.blocks)}
        found = []
        for b, block in enumerate(self.blocks):
            last = self.code[block[-1]]
            after = [b + 1] if last.goes_on and b + 1 < len(self.blocks) else []
            place = self.labels.get(last.target or "")
            found.append([*after, at[place]] if place in at else after)
        return found

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """All loops, smaller ones first."""
        above = _dominators(self.successors)
        tails: dict[int, list[int]] = {}
        for b, after in enumerate(self.successors):
            for head in after:
                if head in above[b]:
                    tails.setdefault(head, []).append(b)
        bodies = {head: _body(head, ends, self.successors) for head, ends in tails.items()}
        found = []
        for head, body in sorted(bodies.items(), key=lambda item: len(item[1])):
            path = self._path(head, tails[head], body)
            inner = {b for loop in found if loop.blocks < body for b in loop.blocks}
            off = [i for b in sorted(body - inner) for i in self.blocks[b]]
            found.append(Loop(body, path, tuple(sorted(set(off) - set(path)))))
        return found

    def innermost(self, *, multiplies: bool) -> list[Loop]:
        """The loops that multiply, or that fetch without multiplying, and hold no smaller one that does."""
        found: list[Loop] = []
        for loop in self.loops:
            code = [self.code[i] for i in loop.path]
            has_products = any(one.operations for one in code)
            fits = has_products if multiplies else not has_products and any(one.fetches for one in code)
            if fits and not any(inner.blocks < loop.blocks for inner in found):
                found.append(loop)
        return found

    def count(self, places: Collection[int]) -> Count:
        """What these instructions take."""
        code = [self.code[i] for i in places]
        groups = [one for one in code if one.is_group_product]
        single = [one for one in code if not one.is_group_product]
        names = [one.name for one in code]
        return Count(
            instructions=len(code),
            stalls=sum(max(one.stall, 1) for one in code),
            group_operations=sum(one.operations for one in groups),
            columns=max((one.columns for one in groups), default=0),
            operations=sum(one.operations for one in single),
            has_bytes=any(one.operations and one.opcode[0] in "QI" for one in code),
            mufu=names.count("MUFU"),
            group_shared_bytes=sum(one.shared_bytes for one in groups),
            shared_bytes=sum(one.shared_bytes for one in single),
            transfers=sum(one.fetches for one in code),
            announced=sum(self._announced(i) for i in places),
            waits=sum(one.waits or "DEPBAR" in one.opcode for one in code),
            barriers=sum(name in ("BAR", "SYNCS") for name in names),
            local=sum(name in ("LDL", "STL") for name in names),
        )

    def _announced(self, place: int) -> int:
        """The bytes that a thread tells a barrier to expect where they are a constant; else 0."""
        one = self.code[place]
        if not one.opcode.startswith("SYNCS.ARRIVE.TRANS64") or "A1T0" in one.opcode:
            return 0
        register = one.operands.split(", ")[-1]
        for before in reversed(self.code[:place]):
            if before.operands.split(", ")[0] == register:
                constant = _CONSTANT.match(f"{before.opcode} {before.operands}")
                return int(constant[1], 16) if constant else 0
        return 0

    def _path(self, head: int, tails: Collection[int], body: frozenset[int]) -> tuple[int, ...]:
        """The instructions of a trip, see the module."""
        order = _order(head, body, self.successors)
        place = {b: i for i, b in enumerate(order)}
        best: dict[int, tuple[int, int]] = {head: self._worth(head)}
        before: dict[int, int] = {}
        for b in order:
            for after in self.successors[b]:
                if place.get(after, -1) > place[b]:
                    passed, spared = self._worth(after)
                    reached = (best[b][0] + passed, best[b][1] + spared)
                    if after not in best or reached > best[after]:
                        best[after], before[after] = reached, b
        way = [max((tail for tail in tails if tail in best), key=lambda tail: best[tail])]
        while way[-1] != head:
            way.append(before[way[-1]])
        return tuple(i for b in reversed(way) for i in self.blocks[b])

    def _worth(self, block: int) -> tuple[int, int]:
        """What a trip is to pass, and the negative of what it is to spare."""
        code = [self.code[i] for i in self.blocks[block]]
        return sum(one.operations > 0 or one.fetches for one in code), -sum(max(one.stall, 1) for one in code)


def read_kernels(text: str) -> list[Kernel]:
    """The kernels of a disassembly, in its order."""
    found: list[tuple[str, list[Instruction], dict[str, int]]] = []
    for line in text.splitlines():
        if kernel := _KERNEL.match(line):
            found.append((kernel[1], [], {}))
        if not found:
            continue
        _, code, labels = found[-1]
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif encoding := _ENCODING.match(line):
            code[-1] = _with_encoding(code[-1], int(encoding[1], 16))
        elif one := _INSTRUCTION.match(line):
            code.append(_instruction(one))
    return [Kernel(name, tuple(code), labels) for name, code, labels in found]


def _instruction(found: re.Match[str]) -> Instruction:
    """The instruction of a line; one with an encoding gets its control code from the next line."""
    control = _CONTROL.search(found["control"])
    return Instruction(
        guard=(found["guard"] or "").replace("@PT", ""),
        opcode=found["opcode"],
        operands=found["rest"].split(";")[0].strip(),
        stall=int(control[2]) if control else 0,
        waits=control is not None and control[1] != "-",
    )


def _with_encoding(one: Instruction, high: int) -> Instruction:
    """The instruction with the control code of its encoding, whose upper 64 bits are given."""
    return dataclasses.replace(one, stall=high >> 41 & 15, waits=high >> 52 & 63 != 0)


def _dominators(successors: Sequence[Sequence[int]]) -> list[set[int]]:
    """For each block the blocks that every way from the first one passes; empty for what nothing leads to."""
    order = _order(0, range(len(successors)), successors)
    before: dict[int, list[int]] = {b: [] for b in order}
    for b in order:
        for after in successors[b]:
            before[after].append(b)
    above: list[set[int]] = [set() for _ in successors]
    for b in order:
        above[b] = set(order)
    above[0], changed = {0}, True
    while changed:
        changed = False
        for b in order[1:]:
            passed = set.intersection(*(above[p] for p in before[b])) | {b}
            changed |= passed != above[b]
            above[b] = passed
    return above


def _body(head: int, tails: Collection[int], successors: Sequence[Sequence[int]]) -> frozenset[int]:
    """The blocks that lead to one of the tails without passing the head, and the head."""
    before: dict[int, list[int]] = {}
    for b, after in enumerate(successors):
        for one in after:
            before.setdefault(one, []).append(b)
    body, open_ = {head, *tails}, [tail for tail in tails if tail != head]
    while open_:
        new = [b for b in before.get(open_.pop(), ()) if b not in body]
        body.update(new)
        open_.extend(new)
    return frozenset(body)


def _order(first: int, among: Collection[int], successors: Sequence[Sequence[int]]) -> list[int]:
    """The blocks that the first one leads to, each before those that follow it unless by a loop."""
    finished: list[int] = []
    seen, stack = {first}, [(first, iter(successors[first]))]
    while stack:
        b, rest = stack[-1]
        after = next((one for one in rest if one in among and one not in seen), None)
        if after is None:
            finished.append(b)
            stack.pop()
        else:
            seen.add(after)
            stack.append((after, iter(successors[after])))
    return finished[::-1]
