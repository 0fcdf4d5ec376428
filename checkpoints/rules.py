"""Weight rules: which tensors of a Hugging Face checkpoint make which of our parameters.

A `Rule` is one line of a family's table. It names a source tensor and a target parameter; `{i}` in both
stands for the layer, `{e}` in the source for the expert. Parameters have the Hugging Face layout of a linear
layer, [out, in]. A rule renames, stacks experts on a new leading axis, and takes a `TensorSlice` of a tensor that holds
several parameters or has its axes the other way round; a slice is a view, so only the bytes that are used are read.
`match` proves that tensors and parameters correspond one to one, both ways, before a byte is read. An `Expansion`
says how a parameter on a mesh is longer than its tensor.
Harmless leftovers are glob patterns over source names ("*.rotary_emb.inv_freq").
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from checkpoints.names.problems import listed

Shape = tuple[int, ...]
BASE = "model."  # prefix of the names of a decoder's tensors, except the head's
HEAD = "lm_head.weight"
MISTRALS_HEAD = "output.weight"  # what it is called where a checkpoint has Mistral's own names
CLASSES = "score."  # prefix of the names of a head that tells classes apart
TOWER = "vision_tower.vision_model."  # prefix of the names of a SigLIP tower's tensors
BESIDE_TOWER = "model.language_model."  # prefix of a text part's names in the reference, but for the head's
THINKER = "thinker."  # prefix of all names in Qwen's own files of models that hear
# What names of the reference begin with, and what is there in its place in such files.
_IN_THINKER = {
    "model.language_model.": "model.",
    "model.audio_tower.": "audio_tower.",
    "model.multi_modal_projector.linear_": "audio_tower.proj",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """The slice of a tensor that a parameter takes: rows start, start + step, ... of one axis below stop, None the end.

    transposed: the last two axes are exchanged afterwards. alone: the one row that is taken is given without its axis.
    """

    axis: int = 0
    start: int = 0
    stop: int | None = None
    step: int = 1
    transposed: bool = False
    alone: bool = False

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop, self.step)

    def of(self, tensor: Any) -> Any:
        """The view of an array, or of anything that is sliced and transposed like one."""
        part = tensor[(slice(None),) * self.axis + (self.start if self.alone else self.rows,)]
        return part.swapaxes(-1, -2) if self.transposed else part

    def shape_of(self, shape: Shape) -> Shape:
        """The shape of the view, without an array."""
        return self.of(np.broadcast_to(np.False_, shape)).shape


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor, or a part of one."""

    name: str
    part: TensorSlice | None = None

    def of(self, tensors: Mapping[str, Any]) -> Any:
        """The tensor or its part, as an array or what stands for one."""
        return tensors[self.name] if self.part is None else self.part.of(tensors[self.name])

    def shape_of(self, shape: Shape) -> Shape:
        """Its shape, given the shape of the whole tensor."""
        return shape if self.part is None else self.part.shape_of(shape)

    def __str__(self) -> str:
        if self.part is None:
            return self.name
        rows = ":".join("" if n in (None, 0) else str(n) for n in (self.part.start, self.part.stop))
        rows += f":{self.part.step}" if self.part.step != 1 else ""
        return f"{self.name}[{', '.join([':'] * self.part.axis + [rows])}]{'.T' if self.part.transposed else ''}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """source tensor(s) -> target parameter.

    source: Hugging Face name, with {i} when `layers` is given and {e} when `experts` is.
    target: dotted path of our parameter, with {i} when `layers` is given.
    layers: the layers that have it; empty for a tensor outside the layers.
    experts: more than 0 stacks the tensors of experts 0 .. experts - 1: [E, *shape of one].
    part: the slice of each source, or None for the whole tensor. The parts of a tensor must cover it, each row once.
    shift: by how much the number of a layer is less in the source than in the target.
    instead: tensors or parts that some checkpoints have in place of `source`, such as one that holds all experts.

    Raises ValueError when the placeholders do not fit `layers` and `experts`.
    """

    source: str
    target: str
    layers: tuple[int, ...] = ()
    experts: int = 0
    part: TensorSlice | None = None
    instead: tuple[StoredTensor, ...] = ()
    shift: int = 0

    def __post_init__(self) -> None:
        wanted = (bool(self.layers), bool(self.layers), self.experts > 0, False)
        found = ("{i}" in self.source, "{i}" in self.target, "{e}" in self.source, "{e}" in self.target)
        if wanted != found:
            raise ValueError(
                f"rule {self.source!r} -> {self.target!r} with layers {self.layers} and {self.experts} experts: "
                "{i} belongs in both names if there are layers, {e} in the source if there are experts, else neither"
            )

    def renamed(self, rename: Callable[[str], str]) -> Rule:
        """The rule of tensors that have other names."""
        instead = tuple(StoredTensor(rename(other.name), other.part) for other in self.instead)
        return dataclasses.replace(self, source=rename(self.source), instead=instead)

    def expand(self) -> list[tuple[str, tuple[StoredTensor, ...]]]:
        """(target, sources) of every layer; there is one source, or one for each expert."""
        return [self.at(layer) for layer in self.layers] if self.layers else [self.at(0)]

    def in_source(self, name: str, layer: int) -> str:
        """The name of a source tensor with the number of a layer in it."""
        return name.replace("{i}", str(layer - self.shift))

    def at(self, layer: int) -> tuple[str, tuple[StoredTensor, ...]]:
        """(target, sources) of one layer."""
        source = self.in_source(self.source, layer)
        target = self.target.replace("{i}", str(layer))
        if not self.experts:
            return target, (StoredTensor(source, self.part),)
        return target, tuple(StoredTensor(source.replace("{e}", str(e)), self.part) for e in range(self.experts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expansion:
    """A parameter that is longer along its first axis than its stored tensor.

    Its `size` rows are the `rows` stored ones, each run of `run` rows `repeats` times, and then zeros.
    """

    rows: int
    size: int
    run: int = 1
    repeats: int = 1

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape of the stored tensor, given the parameter's."""
        return (self.rows, *shape[1:])

    def stored(self, row: np.ndarray) -> np.ndarray:
        """The stored row of each row; `rows` or more for those that are zero."""
        return row // (self.run * self.repeats) * self.run + row % self.run

    def places(self, stored: np.ndarray) -> np.ndarray:
        """The first row at which each stored row stands."""
        return stored // self.run * self.run * self.repeats + stored % self.run


def expand(rules: Iterable[Rule]) -> dict[str, tuple[StoredTensor, ...]]:
    """{target: sources} of all rules.

    Raises ValueError naming targets or sources that appear twice.
    """
    pairs = [pair for rule in rules for pair in rule.expand()]
    sources = [source for _, sources in pairs for source in sources]
    whole = {source.name for source in sources if source.part is None}
    used = (str(source) if source.name not in whole else source.name for source in sources)
    twice = _repeated(target for target, _ in pairs) + _repeated(used)
    if twice:
        raise ValueError(f"weight rules name these more than once: {twice}")
    return dict(pairs)


def touching(rules: Iterable[Rule], names: Collection[str]) -> tuple[Rule, ...]:
    """The rules of parameters with at least one source among the names, layer by layer."""
    found = []
    for rule in rules:
        layers = tuple(i for i in rule.layers or (0,) if any(source.name in names for source in rule.at(i)[1]))
        if layers:
            found.append(dataclasses.replace(rule, layers=layers if rule.layers else ()))
    return tuple(found)


def as_stored(rules: Sequence[Rule], names: Iterable[str]) -> tuple[Rule, ...]:
    """The rules for tensors of these names.

    "model." is dropped if a base model was saved alone and none has it, and so is "vision_model." of a tower, which
    later versions of the reference write without it. A text part's names may be those of the reference. Names of Qwen's
    own files are under "thinker.". A rule takes the first of its `instead` that is there.
    """
    names = set(names)
    if any(name.startswith(THINKER) for name in names):
        return tuple(_as_found(rule.renamed(in_thinker), names) for rule in rules)
    if not any(name.startswith(TOWER) for name in names):
        rules = [rule.renamed(lambda name: name.replace(TOWER, TOWER.partition(".")[0] + ".")) for rule in rules]
    if any(name.startswith(BESIDE_TOWER) for name in names):
        rules = [rule.renamed(_beside_tower) for rule in rules]
    if saved_alone(names):
        rules = [rule.renamed(lambda name: name.removeprefix(BASE)) for rule in rules]
    return tuple(_as_found(rule, names) for rule in rules)


def in_thinker(name: str) -> str:
    """The name in Qwen's own files of a tensor of a model that hears."""
    for theirs, own in _IN_THINKER.items():
        if name.startswith(theirs):
            return THINKER + own + name.removeprefix(theirs)
    return THINKER + name


def _beside_tower(name: str) -> str:
    """The reference's name of a text part's tensor that other checkpoints have under "language_model."."""
    own = name.removeprefix("language_model.")
    return name if own == name else own.replace(BASE, BESIDE_TOWER, 1)


def _as_found(rule: Rule, names: set[str]) -> Rule:
    for other in rule.instead:
        if any(rule.in_source(other.name, layer) in names for layer in rule.layers or (0,)):
            return dataclasses.replace(rule, source=other.name, part=other.part, experts=0, instead=())
    return rule


def saved_alone(names: Iterable[str]) -> bool:
    """True if these are the tensors of a base model that was saved without its head."""
    return not any(name.startswith(BASE) for name in names)


def match(
    rules: Sequence[Rule],
    harmless: Iterable[str],
    source_shapes: Mapping[str, Shape],
    target_shapes: Mapping[str, Shape],
) -> dict[str, tuple[StoredTensor, ...]]:
    """{target: sources}, proven one to one with both sides.

    harmless: glob patterns of source tensors that may be left over.
    Raises one ValueError that lists every tensor missing, left over, taken in part or of the wrong shape and every
    parameter without a rule.
    """
    patterns = tuple(harmless)
    plan = expand(rules)
    stacked = {target for rule in rules if rule.experts for target, _ in rule.expand()}
    problems = [f"parameter {name} has no weight rule" for name in sorted(set(target_shapes) - set(plan))]
    problems += [
        f"weight rule for {name}: the model has no such parameter" for name in plan if name not in target_shapes
    ]
    for target, sources in plan.items():
        lead = (len(sources),) if target in stacked else ()
        if target in target_shapes:
            problems += _check_sources(target, sources, lead, source_shapes, tuple(target_shapes[target]))
    used = {source.name for sources in plan.values() for source in sources}
    left = [
        name for name in sorted(set(source_shapes) - used) if not any(fnmatch.fnmatchcase(name, p) for p in patterns)
    ]
    problems += [f"tensor {name} {list(source_shapes[name])} is left over: no parameter takes it" for name in left]
    if not problems:
        problems = _check_parts(plan, source_shapes)
    if problems:
        raise ValueError(
            f"the checkpoint does not fit the model, {len(problems)} mismatches "
            "(does config.json belong to these weights?):\n  " + listed(problems)
        )
    return plan


def _check_sources(
    target: str, sources: tuple[StoredTensor, ...], lead: Shape, source_shapes: Mapping[str, Shape], wanted: Shape
) -> list[str]:
    problems = []
    for source in sources:
        if source.name not in source_shapes:
            problems.append(f"tensor {source.name} is missing: parameter {target} needs it")
            continue
        shape = source_shapes[source.name]
        axes = 0 if source.part is None else max(source.part.axis + 1, 2 * source.part.transposed)
        if len(shape) < axes or lead + source.shape_of(tuple(shape)) != wanted:
            stack = f", {lead[0]} of them stacked" if lead else ""
            what = f" and {source} is taken" if source.part is not None else ""
            problems.append(
                f"tensor {source.name} is {list(shape)}{stack}{what}; parameter {target} wants {list(wanted)}"
            )
    return problems


def _check_parts(plan: Mapping[str, tuple[StoredTensor, ...]], source_shapes: Mapping[str, Shape]) -> list[str]:
    """Tensors with a row that no parameter takes, or that two take."""
    parts: dict[str, list[TensorSlice]] = collections.defaultdict(list)
    for sources in plan.values():
        for source in sources:
            if source.part is not None:
                parts[source.name].append(source.part)
    problems = []
    for name, taken in parts.items():
        counts = np.zeros(source_shapes[name][taken[0].axis], np.int64)
        for part in taken:
            assert part.axis == taken[0].axis, f"{name} is cut along several axes: {taken}"
            counts[part.rows] += 1
        if np.any(counts != 1):
            row = int(np.flatnonzero(counts != 1)[0])
            problems.append(
                f"tensor {name} {list(source_shapes[name])}: row {row} of axis {taken[0].axis} "
                f"is taken by {counts[row]} parameters"
            )
    return problems


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in collections.Counter(names).items() if count > 1)
