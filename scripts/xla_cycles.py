"""What XLA's own cost model says that a compiled TPU program takes, by the text of its HLO."""

import re
from collections.abc import Mapping, Sequence

ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
UNKNOWN_CYCLES = 2**62  # and more: operations that the model does not know
_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_WHILE = re.compile(r" while\(.*condition=%(\S+?), body=%(\S+?)[,\s]")
_CALLED = re.compile(r"\b(?:to_apply|true_computation|false_computation)=%(\S+?)[,\s]")
_CONSTANT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")


def estimated_cycles(hlo: str, turns: Sequence[int] = ()) -> int:
    """The sum over all operations that have an estimate; kernels have none. turns and errors: of loop_trips."""
    bodies, entry = computations(hlo)
    trips = loop_trips(hlo, bodies, turns)

    def cost(name: str) -> int:
        total = 0
        for line in bodies[name]:
            found = ESTIMATE.search(line)
            if found and int(found[1]) < UNKNOWN_CYCLES:
                total += int(found[1])
            if loop := _WHILE.search(line):
                total += trips[loop[1]] * cost(loop[2])
            elif called := _CALLED.search(line):
                total += cost(called[1]) if " call(" in line else 0
        return total

    return cost(entry)


def loop_trips(
    hlo: str, bodies: Mapping[str, Sequence[str]], turns: Sequence[int] = (), *, others: int | None = None
) -> dict[str, int]:
    """How often each loop runs, by the name of its condition.

    turns: of each loop whose end is data, in the order of the text; others: of those beyond. Raises ValueError where
    there are more such loops than turns and no number of others, or fewer.
    """
    left, trips = list(turns), {}
    for line in hlo.splitlines():
        if loop := _WHILE.search(line):
            constants = [int(n) for each in bodies[loop[1]] for n in _CONSTANT.findall(each)]
            if not constants and not left and others is None:
                raise ValueError(
                    f"turns has {len(turns)} numbers, and the loop {loop[2]} is one more whose end is data"
                )
            trips[loop[1]] = constants[0] if constants else left.pop(0) if left else others or 0
    if left:
        raise ValueError(f"turns has {len(turns)} numbers, {len(left)} more than there are loops whose end is data")
    return trips


def computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of that which runs."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if not line.startswith(" ") and (begins := _COMPUTATION.match(line)):
            name = begins[2]
            bodies[name] = []
            entry = name if begins[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry
