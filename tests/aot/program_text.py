"""The text of compiled programs: its ops, and those among them that should not be there."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

LARGE_CONSTANT = 1 << 16  # elements
_COMPUTATION = re.compile(r"^(?:ENTRY )?(%[\w.-]+) \(.*\{$", re.MULTILINE)
_PRODUCTS = ("dot", "convolution", "custom-call")
_IN_VMEM = re.compile(r" = \w+\[[\d,]*\]\S*S\(1\)")
_OP = re.compile(r"^\s*(?:ROOT )?(%\S+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", re.MULTILINE)


class Op(NamedTuple):
    """An op of a compiled program, and the one array that it gives."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.dtype}{list(self.shape)}"


def ops_of(text: str) -> list[Op]:
    return [
        Op(kind, name, dtype, tuple(int(d) for d in dims.split(",") if d))
        for name, dtype, dims, kind in _OP.findall(text)
    ]


def large_constants(ops: list[Op]) -> list[str]:
    return [str(op) for op in ops if op.kind == "constant" and op.size >= LARGE_CONSTANT]


def wide_weights(text: str, weights: set[tuple[int, ...]]) -> list[str]:
    """Arrays in float32 of a weight's shape, or of it turned, in memory or where a product is made of them.

    A product with one row is multiplied and summed by a fusion without a matrix unit, in float32 as vector units do;
    nothing of that is in memory.
    """
    turned = {tuple(sorted(shape)) for shape in weights}
    found = []
    for is_fused, body in computations(text):
        ops = ops_of(body)
        if not is_fused or any(op.kind in _PRODUCTS for op in ops):
            found += [str(op) for op in ops if op.dtype == "f32" and tuple(sorted(op.shape)) in turned]
    return found


def computations(text: str) -> Iterator[tuple[bool, str]]:
    """The computations of a program: whether each is the inside of a fusion, and its text."""
    fused = set(re.findall(r"calls=(%[\w.-]+)", text))
    _, *parts = _COMPUTATION.split(text)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        yield name in fused, body


def dense_weights(text: str, shapes: set[tuple[int, ...]]) -> list[str]:
    """Arrays in memory that are as large as what a weight in a form stands for, and no codes.

    shapes: of those weights on one device. What is inside of a fusion, or in VMEM, is in no memory. Activations may
    have as many elements, so outputs, or experts, have to come first, or to be last of two axes.
    """
    known, found = {(shape[0], math.prod(shape)) for shape in shapes}, []
    turned = {shape[::-1] for shape in shapes if len(shape) == 2}
    for is_fused, body in computations(text):
        if not is_fused:
            lines = "\n".join(line for line in body.splitlines() if not _IN_VMEM.search(line))
            ops = (op for op in ops_of(lines) if op.shape and op.dtype in ("bf16", "f32"))
            ops = (op for op in ops if (op.shape[0], op.size) in known or op.shape in turned)
            found += [str(op) for op in ops if op.kind not in ("parameter", "get-tuple-element", "bitcast")]
    return found
