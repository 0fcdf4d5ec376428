"""How often each bundle of a TPU kernel runs, found by running the scalar half of its schedule.

Loop bounds and branches depend on scalars only: on what is prefetched into SMEM, or brought there by transfers, and
on arithmetic. Other transfers and vectors are left out; a scalar that a vector gives counts as 0. Every value is found
by its name, which is assigned once; a phi is the operand assigned last.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_ASSIGN = re.compile(r"%([sp]\d+_[sp]\d+) = ([\w.]+) ?(.*)", re.S)
_GUARD = re.compile(r" ?\((!?%p\w+)(?:, (%\w+))?\),? ?")
_STORE = re.compile(r"sst (?:(\(!?%p\w+\)), )?\[smem:(.*)\] (?:(\(!?%p\w+\)), )?(\S+)$")
_BRANCH = re.compile(r"sbr\.rel (?:\((!?)%(p\w+)\) )?target bundleno = (\d+)")
_PREFETCHED = re.compile(r"#(allocation\d+) .*tag = 'prefetched SMEM operand (\d+)'")
_INLINED = re.compile(r"%(s\w+) = inlined_call_operand\.(<no memory space>)?.*?, index: (\d+)")
_TRANSFER = re.compile(r"= dma\.(?:hbm|vmem)_to_smem (\(!?%p\w+\), )?(\S+), (\S+), (\S+),")
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LANES = 128
_GRANULE = 8  # words of 32 bits
# An operand's address outside of SMEM counts lines of 16 granules, which the program turns into granules before a
# transfer, or granules at once: the number of the operand is in the bits above, and tells which it was.
_OPERAND_BITS, _SHIFT = 23, 4


def count_runs(
    texts: Sequence[str],
    allocations: str,
    delay: int,
    operands: Sequence[np.ndarray | None],
    max_steps: int = 20_000_000,
) -> np.ndarray:  # [bundles] int64
    """texts: of each bundle. delay: slots after a branch. operands: the kernel's; None where only a shape is known.

    Raises ValueError for an instruction it does not know and after max_steps bundles.
    """
    memory = {}
    prefetched = {int(index): name for name, index in _PREFETCHED.findall(allocations)}
    _check_loads(texts, set(prefetched.values()))
    for index, name in prefetched.items():
        for offset, value in enumerate(_as_laid_out(_known(operands, index))):
            memory[_base(name) + offset] = value
    values: dict[str, int] = {}
    written: dict[str, int] = {}
    for text in texts:
        for name, is_value, index in _INLINED.findall(text):  # the others are addresses
            address = (int(index) + 1 << _OPERAND_BITS) + (1 << _OPERAND_BITS - 1)
            values[name] = int(np.ravel(_known(operands, int(index)))[0]) if is_value else address
    program = [_Bundle(text, values, memory, operands) for text in texts]
    runs = np.zeros(len(texts), np.int64)
    at, pending, clock = 0, [], 0
    while at < len(texts):
        clock += 1
        if clock > max_steps:
            raise ValueError(f"more than {max_steps} bundles ran; bundle {at:#x} is in a loop that does not end")
        runs[at] += 1
        bundle = program[at]
        for name, operands_ in bundle.phis:
            values[name] = values[max(operands_, key=lambda o: written.get(o, -1))]
            written[name] = clock
        for name, compute in bundle.assignments:
            value = compute()
            if value is not None:
                values[name] = value
                written[name] = clock
        for store in bundle.stores:
            store()
        for take, target in bundle.branches:
            if take():
                pending.append((clock + delay, target))
        if pending and pending[0][0] <= clock:
            at = pending.pop(0)[1]
        else:
            at += 1
    return runs


def _check_loads(texts: Sequence[str], known: set[str]) -> None:
    """Raises ValueError where scalar memory is read that is neither prefetched nor stored to: its values are data."""
    stores = r"(?:sst .*?\[smem:|scalar_lea\.smem )\[#(allocation\w+)"  # there, or where an address is made of it
    stored = {name for text in texts for name in re.findall(stores, text)}
    loaded = {name for text in texts for name in re.findall(r"sld \[smem:\[#(allocation\w+)", text)}
    if loaded - stored - known:
        raise ValueError(f"scalar memory {sorted(loaded - stored - known)} is read, which something else fills")


class _Bundle:
    """The scalar instructions of one bundle, as functions over values and memory."""

    def __init__(
        self, text: str, values: dict[str, int], memory: dict[int, int], operands: Sequence[np.ndarray | None]
    ) -> None:
        self.operands = operands
        self.phis: list[tuple[str, list[str]]] = []
        self.assignments: list[tuple[str, Callable[[], Any]]] = []
        self.stores: list[Callable[[], None]] = []
        self.branches: list[tuple[Callable[[], bool], int]] = []
        body = _COMMENT.sub("", text)
        body = body[body.index("{") + 1 :].strip()
        for instruction in body.removesuffix("}").split(";;"):
            self._add(instruction.strip(), values, memory)

    def _add(self, text: str, values: dict[str, int], memory: dict[int, int]) -> None:
        branch = _BRANCH.search(text)
        if branch:
            self.branches.append((_predicate(branch[2], bool(branch[1]), values), int(branch[3])))
            return
        store = _STORE.search(text)
        if store:
            taken = _guard(store[1] or store[3], values)
            address, value = _sum(store[2], values), _operand(store[4], values)

            def put() -> None:
                if taken():
                    memory[address()] = value()

            self.stores.append(put)
            return
        transfer = _TRANSFER.search(text)
        if transfer:
            self.stores.append(_copy(transfer, values, memory, self.operands))
            return
        assign = _ASSIGN.match(text)
        if assign is None or assign[2].startswith("inlined_call_operand"):
            return
        name, opcode, rest = assign.groups()
        if opcode == "sphi":
            self.phis.append((name, [o.strip(" %") for o in rest.split(",")]))
            return
        compute = _compute(opcode, _GUARD.sub("", rest), values, memory)
        guard = _GUARD.search(rest)
        if guard:
            values.setdefault(name, 0)  # where it is not taken, others may compute with it what nobody asks for
        self.assignments.append((name, _guarded(compute, guard[1], guard[2], values) if guard else compute))


def _copy(
    transfer: re.Match[str], values: dict[str, int], memory: dict[int, int], operands: Sequence[np.ndarray | None]
) -> Callable[[], None]:
    """A transfer into scalar memory, done when it is started."""
    taken, granules = _guard(transfer[1], values), int(transfer[3])
    source, target = _operand(transfer[2], values), _operand(transfer[4], values)

    def copy() -> None:
        if taken():
            index, first = _operand_at(source())
            words = np.ravel(_known(operands, index))[first : first + granules * _GRANULE]
            memory.update(enumerate(words.tolist(), target()))

    return copy


def _operand_at(address: int) -> tuple[int, int]:
    """The operand that an address is in, and which of its words it is."""
    bits = _OPERAND_BITS if address < 1 << _OPERAND_BITS + _SHIFT else _OPERAND_BITS + _SHIFT
    index, granule = divmod(address, 1 << bits)
    return index - 1, (granule - (1 << bits - 1)) * _GRANULE


def _known(operands: Sequence[np.ndarray | None], index: int) -> np.ndarray:
    found = operands[index]
    if found is None:
        raise ValueError(f"scalars come from operand {index}, which depends on an argument without a value")
    return found


def _guarded(compute: Callable[[], Any], guard: str, other: str | None, values: dict[str, int]) -> Callable[[], Any]:
    """`(%p)`: nothing where p is false. `(%p, %other)`: other."""
    taken = _operand(guard, values)
    if other is None:
        return lambda: compute() if taken() else None
    instead = _operand(other, values)
    return lambda: compute() if taken() else instead()


def _compute(opcode: str, rest: str, values: dict[str, int], memory: dict[int, int]) -> Callable[[], Any]:
    if opcode == "sld":
        address = _sum(rest.strip()[len("[smem:") : -1], values)
        return lambda: memory.get(address(), 0)
    if opcode.startswith(("vpop", "vtos", "spop")):  # semaphores at the end, which are zero; what a vector gives
        return lambda: 0
    rest = re.sub(r"(?<=\w) \[#allocation\d+\]|\[resolvable:\$\w+\]", "", rest)
    a, *others = [_operand(part, values) for part in rest.split(",")]
    b = others[0] if others else None
    kind, _, suffix = opcode.partition(".")
    if kind in ("smov", "int_to_ptr", "pmov"):
        return a
    if kind == "pneg":
        return lambda: not a()
    assert b is not None, f"{opcode} {rest}"
    if kind == "scalar_select":
        c = others[1]
        return lambda: b() if a() else c()
    if kind == "scmp":
        relation, is_unsigned = suffix[:2], ".u32" in suffix
        test = eval(f"lambda x, y: x {_COMPARE[relation]} y")  # of six fixed texts
        mask = 0xFFFFFFFF
        return (lambda: test(a() & mask, b() & mask)) if is_unsigned else (lambda: test(a(), b()))
    if kind in ("smin", "smax") and ".u32" in opcode:
        choose = _ARITHMETIC[kind]
        return lambda: _wrap(choose(a() & 0xFFFFFFFF, b() & 0xFFFFFFFF))
    if kind not in _ARITHMETIC:
        raise ValueError(f"the scalar instruction {opcode!r} ({rest}) is not known; add it to tpu_trace")
    operation = _ARITHMETIC[kind]
    return lambda: operation(a(), b())


def _wrap(x: int) -> int:
    return ((x + 2**31) & 0xFFFFFFFF) - 2**31


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "sadd": lambda a, b: _wrap(a + b),
    "scalar_lea": lambda a, b: _wrap(a + b),
    "ssub": lambda a, b: _wrap(a - b),
    "smul": lambda a, b: _wrap(a * b),
    "smulhi": lambda a, b: _wrap((a & 0xFFFFFFFF) * (b & 0xFFFFFFFF) >> 32),  # of .u32, by which others divide
    "sshll": lambda a, b: _wrap(a << b),
    "sshra": lambda a, b: a >> b,
    "sshrl": lambda a, b: (a & 0xFFFFFFFF) >> b,
    "sand": lambda a, b: a & b,
    "sor": lambda a, b: a | b,
    "sxor": lambda a, b: a ^ b,
    "smin": min,
    "smax": max,
    "por": lambda a, b: a or b,
    "pand": lambda a, b: a and b,
    "pnand": lambda a, b: not (a and b),
    "pnor": lambda a, b: not (a or b),
    "pxor": lambda a, b: a != b,
}


def _predicate(name: str | None, is_negated: bool, values: dict[str, int]) -> Callable[[], bool]:
    if name is None:
        return lambda: True
    return (lambda: not values[name]) if is_negated else (lambda: bool(values[name]))


def _guard(text: str | None, values: dict[str, int]) -> Callable[[], bool]:
    match = re.search(r"(!?)%(p\w+)", text or "")
    return _predicate(match[2], bool(match[1]), values) if match else lambda: True


def _operand(text: str, values: dict[str, int]) -> Callable[[], Any]:
    text = text.strip()
    if text.startswith("["):
        return _sum(text, values)
    if text.startswith("!"):
        name = text[2:]
        return lambda: not values[name]
    if text.startswith("%"):
        name = text[1:]
        return lambda: values[name]
    number = text.removeprefix("$")
    constant = float(number) if "." in number else _wrap(int(number, 0))
    return lambda: constant


def _sum(text: str, values: dict[str, int]) -> Callable[[], int]:
    """An address such as [#allocation9 + %s17] or [#allocation2 + $0x1] or %s17."""
    terms = [term.strip() for term in text.strip("[] ").split("+")]
    constant = sum(_base(t[1:]) if t.startswith("#") else int(t[1:], 0) for t in terms if not t.startswith("%"))
    names = [term[1:] for term in terms if term.startswith("%")]
    return lambda: constant + sum(values[name] for name in names)


def _base(allocation: str) -> int:
    """A place of its own for each allocation; numbers end in _spill where registers are saved."""
    number, _, spill = allocation.removeprefix("allocation").partition("_")
    return (2 * int(number) + bool(spill)) << 18


def _as_laid_out(array: np.ndarray) -> Iterable[int]:
    """The words of a prefetched array: rows of an array of rank 2 are padded to 128 words."""
    array = np.asarray(array, np.int64)
    if array.ndim > 1:
        array = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % _LANES)])
    return (int(x) for x in array.ravel())
