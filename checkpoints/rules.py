"""Weight rules: which tensors of a Hugging Face checkpoint make which of our parameters.

A `Rule` is one line of a family's table. It names a source tensor and a target parameter; `{i}` in both
stands for the layer, `{e}` in the source for the expert. Tensors keep the Hugging Face layout ([out, in]
for a linear layer): a rule never transposes, it only renames and stacks experts on a new leading axis.
`match` proves that tensors and parameters correspond one to one, both ways, before a byte is read. A `Stretch`
says how a parameter on a mesh is longer than its tensor.
Harmless leftovers are glob patterns over source names ("*.rotary_emb.inv_freq").
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """source tensor(s) -> target parameter.

    source: Hugging Face name, with {i} when `layers` is given and {e} when `experts` is.
    target: dotted path of our parameter, with {i} when `layers` is given.
    layers: the layers that have it; empty for a tensor outside the layers.
    experts: more than 0 stacks the tensors of experts 0 .. experts - 1: [E, *shape of one].

    Raises ValueError when the placeholders do not fit `layers` and `experts`.
    """

    source: str
    target: str
    layers: tuple[int, ...] = ()
    experts: int = 0

    def __post_init__(self) -> None:
        wanted = (bool(self.layers), bool(self.layers), self.experts > 0, False)
        found = ("{i}" in self.source, "{i}" in self.target, "{e}" in self.source, "{e}" in self.target)
        if wanted != found:
            raise ValueError(
                f"rule {self.source!r} -> {self.target!r} with layers {self.layers} and {self.experts} experts: "
                "{i} belongs in both names if there are layers, {e} in the source if there are experts, else neither"
            )

    def expand(self) -> list[tuple[str, tuple[str, ...]]]:
        """(target, sources) of every layer; sources has one name, or one for each expert."""
        return [self._at(layer) for layer in self.layers] if self.layers else [self._at(0)]

    def _at(self, layer: int) -> tuple[str, tuple[str, ...]]:
        source = self.source.replace("{i}", str(layer))
        target = self.target.replace("{i}", str(layer))
        if not self.experts:
            return target, (source,)
        return target, tuple(source.replace("{e}", str(e)) for e in range(self.experts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """A parameter that is longer along its first axis than what is stored of it.

    Its `size` rows are the `rows` stored ones, in runs of `run` of which each stands there `repeats` times, then
    zeros.
    """

    rows: int
    size: int
    run: int = 1
    repeats: int = 1

    def stored_shape(self, shape: Shape) -> Shape:
        """What is stored of a parameter of this shape."""
        return (self.rows, *shape[1:])

    def stored(self, row: np.ndarray) -> np.ndarray:
        """The stored row of each row; `rows` or more for those that are zero."""
        return row // (self.run * self.repeats) * self.run + row % self.run

    def places(self, stored: np.ndarray) -> np.ndarray:
        """The first row at which each stored row stands."""
        return stored // self.run * self.run * self.repeats + stored % self.run


def expand(rules: Iterable[Rule]) -> dict[str, tuple[str, ...]]:
    """{target: (source names, ...)} of all rules.

    Raises ValueError naming targets or sources that appear twice.
    """
    pairs = [pair for rule in rules for pair in rule.expand()]
    twice = _repeated(target for target, _ in pairs) + _repeated(name for _, names in pairs for name in names)
    if twice:
        raise ValueError(f"weight rules name these more than once: {twice}")
    return dict(pairs)


def match(
    rules: Sequence[Rule],
    harmless: Iterable[str],
    source_shapes: Mapping[str, Shape],
    target_shapes: Mapping[str, Shape],
) -> dict[str, tuple[str, ...]]:
    """{target: (source names, ...)}, proven one to one with both sides.

    harmless: glob patterns of source tensors that may be left over.
    Raises one ValueError that lists every tensor missing, left over or of the wrong shape and every
    parameter without a rule.
    """
    patterns = tuple(harmless)
    plan = expand(rules)
    stacked = {target for rule in rules if rule.experts for target, _ in rule.expand()}
    problems = [f"parameter {name} has no weight rule" for name in sorted(set(target_shapes) - set(plan))]
    problems += [
        f"weight rule for {name}: the model has no such parameter" for name in plan if name not in target_shapes
    ]
    for target, names in plan.items():
        lead = (len(names),) if target in stacked else ()
        if target in target_shapes:
            problems += _check_sources(target, names, lead, source_shapes, tuple(target_shapes[target]))
    used = {name for names in plan.values() for name in names}
    left = [
        name for name in sorted(set(source_shapes) - used) if not any(fnmatch.fnmatchcase(name, p) for p in patterns)
    ]
    problems += [f"tensor {name} {list(source_shapes[name])} is left over: no parameter takes it" for name in left]
    if problems:
        raise ValueError(
            f"the checkpoint does not fit the model, {len(problems)} mismatches "
            "(is config.json the one that belongs to these weights?):\n  " + "\n  ".join(problems)
        )
    return plan


def _check_sources(
    target: str, names: tuple[str, ...], lead: Shape, source_shapes: Mapping[str, Shape], wanted: Shape
) -> list[str]:
    problems = []
    for name in names:
        if name not in source_shapes:
            problems.append(f"tensor {name} is missing: parameter {target} needs it")
        elif lead + tuple(source_shapes[name]) != wanted:
            stack = f", {lead[0]} of them stacked" if lead else ""
            problems.append(
                f"tensor {name} is {list(source_shapes[name])}{stack}; parameter {target} wants {list(wanted)}"
            )
    return problems


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in collections.Counter(names).items() if count > 1)
