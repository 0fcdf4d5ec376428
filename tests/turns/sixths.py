"""Which sixth of the slow tests each of them is in.

A unit is what one process compiles for once: the tests of one golden in a file, else those of the same parameters. The
units of a file are dealt out one by one, in the order of their digests, so that each sixth has as many of each file.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable

from tests.golden_table import TABLE

NUM_SIXTHS = 6
_SALT = "1704"  # among 2,000 the one whose sixths are said to take most nearly as long by seconds.toml


def unit_of(node_id: str) -> tuple[str, str]:
    """The file of a test, and its golden or all of its parameters."""
    parameters = node_id.partition("[")[2].removesuffix("]")
    return file_of(node_id), next((name for name in parameters.split("-") if name in TABLE), parameters)


def file_of(node_id: str) -> str:
    return node_id.partition("::")[0]


def sixths(node_ids: Iterable[str]) -> dict[tuple[str, str], int]:
    """The sixth of each unit."""
    units: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for node_id in node_ids:
        unit = unit_of(node_id)
        units[unit[0]].add(unit)
    found = {}
    for file, its in units.items():
        dealt = sorted(its, key=lambda unit: (_digest("\0".join(unit)), unit))
        found |= {unit: (_digest(_SALT + file) + place) % NUM_SIXTHS for place, unit in enumerate(dealt)}
    return found


def _digest(text: str) -> int:
    return zlib.crc32(text.encode())
