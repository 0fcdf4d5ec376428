"""Adapters: LoRA in a folder that PEFT saved, as a plain value.

`adapter_config.json` says ranks and scales, `adapter_model.safetensors` holds A [r, in] and B [out, r] of each module
that is adapted, by the module's name in a Hugging Face model. The family's weight rules say which of our weights that
is, so a fused tensor's A serves several of them and each has its rows of B. Experts come as modules of their own, or
as one parameter of all of them: then A has E * r rows, expert by expert, and B as many columns, the expert innermost.
Source: Hu et al. 2021, section 4.1; Kalajdzievski 2023 (alpha over the root of the rank).
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from checkpoints.adapters.peft_config import CONFIG, AdapterConfig
from checkpoints.names.problems import listed
from checkpoints.rules import HEAD, Rule, Shape, TensorSlice, expand

WEIGHTS = "adapter_model.safetensors"
HEAD_PART = "head.weight"  # also of a model whose head is its embedding
_PREFIX = "base_model.model."
_COPY_OF_HEAD = "lm_head.base_layer.weight"  # the base's own, which PEFT saves beside the A and B of a head
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """Adds scale * B (A x) to what a weight gives. a: [r, in]; b: [out, r]; of stacked experts both with E before."""

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def delta(self) -> np.ndarray:
        """scale * B A in float32, [out, in] or [E, out, in]."""
        return np.float32(self.scale) * (self.b.astype(np.float32) @ self.a.astype(np.float32))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """parts: by the name of the weight. head: the matrix that takes the place of the base's, where one was saved.

    digest: of all that decides what it computes, hexadecimal.
    """

    parts: Mapping[str, LowRank]
    head: np.ndarray | None
    digest: str

    @property
    def rank(self) -> int:
        """The largest of its parts."""
        return max((part.rank for part in self.parts.values()), default=0)


class _PartPlace(NamedTuple):
    """Where the weight of a module goes: a weight of ours, the rows of B that it takes, and which expert it is."""

    target: str
    part: TensorSlice | None
    expert: int | None


def take_apart(
    path: str,
    config: AdapterConfig,
    tensors: Mapping[str, Any],
    *,
    rules: Sequence[Rule],
    weights: Mapping[str, Shape],
    max_rank: int | None,
) -> Adapter:
    """The adapter of these tensors, of a model with these rules and weights; see `checkpoints.read_adapter`."""
    return _AdapterReader(config, rules, weights, max_rank).read(path, tensors)


class _AdapterReader:
    """Takes an adapter apart, and lists what is wrong with it."""

    def __init__(
        self, config: AdapterConfig, rules: Sequence[Rule], weights: Mapping[str, Shape], max_rank: int | None
    ) -> None:
        self._config, self._weights, self._max_rank = config, dict(weights), max_rank
        self._problems = list(config.problems)
        stacked = {target for rule in rules if rule.experts for target, _ in rule.expand()}
        self._places: dict[str, list[_PartPlace]] = defaultdict(list)  # by the name of the source tensor
        for target, sources in expand(rules).items():
            for expert, source in enumerate(sources):
                place = _PartPlace(target, source.part, expert if target in stacked else None)
                self._places[source.name].append(place)
        if HEAD not in self._places:  # the embedding is the head
            self._places[HEAD] = [_PartPlace(HEAD_PART, None, None)]
            self._weights[HEAD_PART] = self._weights["embed.weight"]

    def read(self, path: str, tensors: Mapping[str, Any]) -> Adapter:
        head, halves = None, defaultdict[str, dict[str, np.ndarray]](dict)
        for name, tensor in tensors.items():
            found = _PART.fullmatch(name.removeprefix(_PREFIX))
            if found is not None:
                if found["half"] in halves[found["module"]]:
                    self._problems.append(f"tensor {name} is there twice, with and without {_PREFIX!r}")
                halves[found["module"]][found["half"]] = self._finite(name, tensor)
            elif name.removeprefix(_PREFIX) == HEAD and self._config.saves_head:
                head = self._finite(name, tensor)
                self._check_head(name, head)
            elif name.removeprefix(_PREFIX) == _COPY_OF_HEAD:
                self._check_head(name, tensor)
            else:
                self._problems.append(f"tensor {name} {list(tensor.shape)} is not the A or B of a LoRA")
        found = defaultdict[str, dict[int | None, LowRank]](dict)
        for module, pair in halves.items():
            if missing := {"A", "B"} - pair.keys():
                self._problems.append(f"{module} has no lora_{missing.pop()}: a half of it is missing")
            else:
                for target, expert, part in self._parts_of(module, pair["A"], pair["B"]):
                    self._check(module, target, expert, part)
                    found[target][expert] = part
        biases = [name for name in self._places if "bias" in name.rpartition(".")[2]]
        if (problem := self._config.bias_problem(biases, halves.keys())) is not None:
            self._problems.append(problem)
        if self._config.saves_head and head is None:
            self._problems.append(f"modules_to_save names lm_head, and {WEIGHTS} has no {HEAD}")
        if not found and head is None and not self._problems:
            self._problems.append(f"{WEIGHTS} holds no LoRA")
        if self._problems:
            raise ValueError(
                f"adapter {path} does not fit this model, {len(self._problems)} problems "
                f"(its base is said to be {self._config.base[:200]!r}):\n  " + listed(self._problems)
            )
        parts = {target: self._stacked(target, own) for target, own in sorted(found.items())}
        return Adapter(parts=parts, head=head, digest=_digest(parts, head))

    def _check_head(self, name: str, tensor: Any) -> None:
        if tuple(tensor.shape) != tuple(self._weights[HEAD_PART]):
            self._problems.append(f"{name} is {list(tensor.shape)}, {list(self._weights[HEAD_PART])} is wanted")

    def _finite(self, name: str, tensor: Any) -> np.ndarray:
        array = np.asarray(tensor)
        if "float" not in array.dtype.name:
            self._problems.append(f"tensor {name} is of {array.dtype.name}; A and B are of floating-point numbers")
            return array
        with np.errstate(over="ignore"):  # of float64, what float32 cannot hold
            is_finite = np.isfinite(array.astype(np.float32)).all()
        if not is_finite:
            self._problems.append(f"tensor {name} holds NaN or infinity")
        return array

    def _parts_of(self, module: str, a: np.ndarray, b: np.ndarray) -> list[tuple[str, int | None, LowRank]]:
        """(weight, expert, part) of all weights that a module's A and B are of."""
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            self._problems.append(f"{module} has A {list(a.shape)} and B {list(b.shape)}, whose ranks differ")
            return []
        places = self._places.get(f"{module}.weight", [])
        if not places:
            return self._experts_of(module, a, b)
        low = self._low_rank(module, a, b)
        return [(place.target, place.expert, _rows(low, place.part)) for place in places]

    def _low_rank(self, module: str, a: np.ndarray, b: np.ndarray) -> LowRank:
        rank, scale = self._config.rank_and_scale(module)
        if a.shape[-2] != rank and not self._config.problems:  # which stand for themselves: ranks are not known then
            self._problems.append(f"{module} has rank {a.shape[-2]}, and {CONFIG} says {rank}")
        return LowRank(a=a, b=b, scale=scale)

    def _experts_of(self, module: str, a: np.ndarray, b: np.ndarray) -> list[tuple[str, int | None, LowRank]]:
        """Low-rank parts of a parameter that holds all experts of a layer; its shape tells which of the two."""
        block, layer = re.sub(r"(\.base_layer)+$", "", module), re.search(r"\.layers\.(\d+)\.", f".{module}")
        names = {x: f"layers.{layer[1] if layer else ''}.mlp.experts.{x}" for x in ("gate", "up", "down")}
        if not block.endswith("experts") or names["gate"] not in self._weights:
            self._problems.append(f"{module} is adapted, and the model has no such weight")
            return []
        E, F, D = self._weights[names["gate"]]
        if (a.shape[1], b.shape[0]) == (D, 2 * F):
            name, wanted = "gate_up_proj", ("gate", "up")
        elif (a.shape[1], b.shape[0]) == (F, D):
            name, wanted = "down_proj", ("down",)
        else:
            self._problems.append(f"{module} has A {list(a.shape)} and B {list(b.shape)}; experts are of {D} and {F}")
            return []
        if a.shape[0] % E:
            self._problems.append(f"{module} has {a.shape[0]} ranks in all, no multiple of {E} experts")
            return []
        stacked = a.reshape(E, -1, a.shape[1]), b.reshape(b.shape[0], -1, E).transpose(2, 0, 1)
        low = self._low_rank(f"{block}.{name}", *stacked)
        own = {place.target: place.part for place in self._places.get(f"{block}.{name}", ())}  # one tensor in files too
        halves = {names["gate"]: TensorSlice(stop=F), names["up"]: TensorSlice(start=F)}
        rows = own or (halves if name == "gate_up_proj" else {})
        return [(names[x], None, _rows(low, rows.get(names[x]))) for x in wanted]

    def _check(self, module: str, target: str, expert: int | None, part: LowRank) -> None:
        shape = self._weights[target][1:] if expert is not None else self._weights[target]
        made = (*part.b.shape[:-1], part.a.shape[-1])
        if made != tuple(shape):
            self._problems.append(f"{module} makes {list(made)}; {target} of this model is {list(shape)}")
        if self._max_rank is not None and part.rank > self._max_rank:
            self._problems.append(
                f"{module} has rank {part.rank}, above max_adapter_rank, {self._max_rank}; raise it to {part.rank}"
            )

    def _stacked(self, target: str, own: Mapping[int | None, LowRank]) -> LowRank:
        """One part of those of single experts; experts that have none, and missing ranks, are zeros."""
        if None in own:
            return own[None]
        (E, O, I), first = self._weights[target], next(iter(own.values()))
        rank = max(part.rank for part in own.values())
        a, b = np.zeros((E, rank, I), first.a.dtype), np.zeros((E, O, rank), first.b.dtype)
        if len({part.scale for part in own.values()}) > 1:  # so that one number scales all
            a, b = a.astype(np.float32), b.astype(np.float32)
        for expert, part in own.items():
            ratio = part.scale / first.scale
            a[expert, : part.rank] = part.a
            b[expert, :, : part.rank] = part.b if ratio == 1 else part.b.astype(np.float32) * np.float32(ratio)
        return LowRank(a=a, b=b, scale=first.scale)


def _rows(low: LowRank, part: TensorSlice | None) -> LowRank:
    """The part of a weight that is these rows of the tensor."""
    return low if part is None else dataclasses.replace(low, b=low.b[..., part.rows, :])


def _digest(parts: Mapping[str, LowRank], head: np.ndarray | None) -> str:
    state = blake2b(digest_size=16)
    for name, part in parts.items():
        state.update(f"{name} {part.scale!r}".encode())
        for array in (part.a, part.b):
            state.update(f"{array.shape} {array.dtype.name}".encode() + np.ascontiguousarray(array).tobytes())
    if head is not None:
        state.update(f"head {head.shape} {head.dtype.name}".encode() + np.ascontiguousarray(head).tobytes())
    return state.hexdigest()


def merged(adapter: Adapter, name: str, sources: Sequence[Any]) -> list[Any]:
    """The sources of a weight, in float32 with the adapter's product added."""
    if name == HEAD_PART and adapter.head is not None:
        return [adapter.head]
    part = adapter.parts.get(name)
    if part is None:
        return list(sources)
    delta = part.delta()
    rows = delta if math.prod(np.shape(sources[0])) != delta.size else delta[None]
    return [np.asarray(source).astype(np.float32) + row for source, row in zip(sources, rows, strict=True)]
