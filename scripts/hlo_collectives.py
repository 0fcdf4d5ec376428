"""Collectives of a compiled program, counted and named in its text."""

import collections
import math
import re
from collections.abc import Mapping

KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")
_OP = re.compile(rf"^\s*(?:ROOT )?%\S+ = (?P<result>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(", re.MULTILINE)
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")


def count_collectives(text: str) -> tuple[collections.Counter[str], int]:
    """(how many of each kind, bytes of all their results on one device), loops once, of an executable's text.

    The result of an asynchronous one is the larger half of its pair (what it sends, what it gives).
    """
    counts: collections.Counter[str] = collections.Counter()
    total = 0
    for op in _OP.finditer(text):
        counts[op["kind"]] += 1
        arrays = [bytes_of(dtype, dims) for dtype, dims in _ARRAY.findall(op["result"])]
        total += max(arrays, default=0) if op["start"] and op["kind"] != "all-reduce" else sum(arrays)
    return counts, total


def unexpected_collectives(text: str, expected: Mapping[str, int]) -> list[str]:
    """The kinds whose number is not the expected one: that number, and each collective of the kind."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for line in text.splitlines():
        if op := _OP.match(line):
            found[op["kind"]].append(line.split(", channel_id")[0].strip())
    odd = [kind for kind in KINDS if len(found[kind]) != expected.get(kind, 0)]
    return [
        line for kind in odd for line in (f"{len(found[kind])} {kind}, expected {expected.get(kind, 0)}", *found[kind])
    ]


def bytes_of(dtype: str, dims: str) -> int:
    """Bytes of an array of a type as HLO writes it."""
    bits = int(found[0]) if (found := re.search(r"\d+", dtype)) else 8  # of pred
    return math.prod(int(n) for n in dims.split(",") if n) * bits // 8
