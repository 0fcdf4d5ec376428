"""Pieces: a program cut at its calls of one function, so that calls that are alike are compiled once.

    whole     a = f(x);  b = g(w1, a);  c = g(w2, b);  y = h(c)       XLA inlines g twice and compiles it twice
    pieces    [f] [g] [g] [h]                                         three executables, called one after the other

An array that no later piece reads is donated where an output can take its memory, so pools stay where they are. Cores
stand still between two pieces for a tenth of a millisecond, so a piece may be several calls.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.sharding import Sharding

from ferrum_jax.runtime.compile.lowered import Lowered

_JIT = ("jit", "pjit")  # what jax calls the call of a jitted function, by version


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """One call of a piece, with the places of its arguments and results among all arrays of the program.

    dead: places that no later step reads.
    """

    piece: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    dead: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallPlan:
    """The steps of a program. results: places of what it returns, in the order of out_tree."""

    steps: tuple[_Step, ...]
    num_places: int
    results: tuple[int, ...]
    in_tree: Any
    out_tree: Any


class PiecedExecutable:
    """A program's executables, a piece each; called as one executable of the whole program."""

    def __init__(self, plan: CallPlan, pieces: Sequence[Callable[..., Sequence[jax.Array]]]) -> None:
        self.plan, self.pieces = plan, list(pieces)

    def __call__(self, *arguments: Any) -> Any:
        plan = self.plan
        given, tree = jax.tree.flatten((arguments, {}))
        assert tree == plan.in_tree, f"arguments are {tree}, the program takes {plan.in_tree}"
        places: list[Any] = [*given, *[None] * (plan.num_places - len(given))]
        del arguments, given  # a pool that is held here could not be donated
        for step in plan.steps:
            results = self.pieces[step.piece](*[places[i] for i in step.arguments])
            for place in step.dead:
                places[place] = None
            for place, result in zip(step.results, results, strict=True):
                places[place] = result
        return jax.tree.unflatten(plan.out_tree, [places[i] for i in plan.results])


class LoweredPieces:
    """A program in pieces that XLA has not compiled yet, as `Lowered` is one that is whole."""

    def __init__(self, plan: CallPlan, pieces: Sequence[Lowered]) -> None:
        self._plan, self._pieces = plan, pieces

    def text(self) -> str | None:
        """All that decides the executables beside the environment; see `Lowered`."""
        texts = [str(self._plan)]
        for piece in self._pieces:
            text = piece.text()
            if text is None:
                return None
            texts.append(text)
        return "\n".join(texts)

    def compile(self) -> PiecedExecutable:
        """Compiled for the devices for which it was lowered."""
        return PiecedExecutable(self._plan, [piece.compile() for piece in self._pieces])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Piece:
    """A function of flat arrays, the avals that it takes, and which of these are donated."""

    function: Callable[..., list[jax.Array]]
    avals: tuple[Any, ...]
    donated: tuple[int, ...]


def lower_pieces(
    traced: jax.stages.Traced,
    at: str,
    together: int,
    lower: Callable[[jax.stages.Traced], Lowered],
    *,
    sharding: Sharding,
    compiler_options: Mapping[str, Any] | None,
) -> LoweredPieces:
    """A traced program, cut at its calls of the jitted function of this name, each piece lowered.

    together: calls that are one piece, where nothing stands between them. sharding: of every array, which is whole on
    one device. compiler_options: of the program.
    """
    closed: Any = traced.jaxpr
    plan, pieces = _Cutting(closed.jaxpr, closed.consts, at, together, _donated(traced)).result(traced)
    lowered = []
    for piece in pieces:
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding) for aval in piece.avals]
        options = None if compiler_options is None else dict(compiler_options)
        how: Any = {"donate_argnums": piece.donated, "out_shardings": sharding, "compiler_options": options}
        lowered.append(lower(jax.jit(piece.function, **how).trace(*structs)))
    return LoweredPieces(plan, lowered)


def _donated(traced: jax.stages.Traced) -> set[int]:
    return {i for i, argument in enumerate(jax.tree.leaves(traced.args_info)) if argument.donated}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """Operations that run together: neighbouring calls, or what stands between two."""

    eqns: Sequence[Any]
    inputs: Sequence[Any]
    results: Sequence[Any]
    is_call: bool


class _Cutting:
    """A cut program: operations that depend on the first n calls alone stand in glue n, which runs before call n."""

    def __init__(self, jaxpr: Any, consts: Sequence[Any], at: str, together: int, donated: set[int]) -> None:
        self._jaxpr, self._at, self._together = jaxpr, at, together
        self._constants = dict(zip(jaxpr.constvars, consts, strict=True))
        self._kept = {v for i, v in enumerate(jaxpr.invars) if i not in donated} | set(jaxpr.outvars)
        self._places: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars)}
        self._pieces: list[_Piece] = []
        self._known: dict[Any, int] = {}

    def result(self, traced: jax.stages.Traced) -> tuple[CallPlan, list[_Piece]]:
        blocks = self._blocks()
        last_read = {v: n for n, block in enumerate(blocks) for v in block.inputs}
        steps = []
        for n, block in enumerate(blocks):
            free = [v for v in block.inputs if last_read[v] == n and v not in self._kept]
            piece = self._piece(block, set(free))
            arguments, results, dead = (
                tuple(map(self._place, variables)) for variables in (block.inputs, block.results, free)
            )
            steps.append(_Step(piece=piece, arguments=arguments, results=results, dead=dead))
        plan = CallPlan(
            steps=tuple(steps),
            num_places=len(self._places),
            results=tuple(map(self._place, self._jaxpr.outvars)),
            in_tree=traced.in_tree,
            out_tree=jax.tree.structure(traced.out_info),
        )
        return plan, self._pieces

    def _is_call(self, eqn: Any) -> bool:
        return eqn.primitive.name in _JIT and eqn.params["name"] == self._at

    def _place(self, variable: Any) -> int:
        return self._places.setdefault(variable, len(self._places))

    def _in_order(self) -> list[tuple[list[Any], bool]]:
        """The operations of each block, and whether it is a call."""
        calls: list[Any] = []
        glues: list[list[Any]] = [[]]
        depths: dict[Any, int] = {}  # by variable, how many calls it depends on
        for eqn in self._jaxpr.eqns:
            if self._is_call(eqn):
                calls.append(eqn)
                glues.append([])
                depth = len(calls)
            else:
                depth = max((depths.get(v, 0) for v in _variables(eqn.invars)), default=0)
                glues[depth].append(eqn)
            depths |= dict.fromkeys(eqn.outvars, depth)
        assert calls, f"the program does not call {self._at}"
        found: list[tuple[list[Any], bool]] = [(glues[0], False)]
        for call, glue in zip(calls, glues[1:], strict=True):
            last, is_call = found[-1]
            if is_call and len(last) < self._together:
                last.append(call)
            else:
                found.append(([call], True))
            found += [(glue, False)] if glue else []
        return found

    def _blocks(self) -> list[_Block]:
        wanted = set(self._jaxpr.outvars)
        blocks = []
        for n, (eqns, is_call) in reversed([*enumerate(self._in_order())]):
            made = {v: None for eqn in eqns for v in eqn.outvars} | (dict.fromkeys(self._constants) if n == 0 else {})
            results = [v for v in made if v in wanted]
            if not results:
                continue
            own = made if is_call else {**made, **self._constants}
            read = dict.fromkeys(v for eqn in eqns for v in _variables(eqn.invars))
            inputs = [v for v in read if v not in own]
            wanted |= set(inputs)
            blocks.append(_Block(eqns=eqns, inputs=inputs, results=results, is_call=is_call))
        return blocks[::-1]

    def _piece(self, block: _Block, free: set[Any]) -> int:
        """The index of the block's piece: of calls, that of earlier ones which are alike."""
        room = Counter(map(_form, block.results))
        donated = []
        for variable in sorted(free & set(block.inputs), key=self._place):  # the program's own arguments first: pools
            if room[_form(variable)]:
                room[_form(variable)] -= 1
                donated.append(block.inputs.index(variable))
        key: Any = (_likeness(block), *sorted(donated)) if block.is_call else object()
        if key not in self._known:
            self._known[key] = len(self._pieces)
            avals = tuple(v.aval for v in block.inputs)
            self._pieces.append(_Piece(function=self._function(block), avals=avals, donated=tuple(sorted(donated))))
        return self._known[key]

    def _function(self, block: _Block) -> Callable[..., list[jax.Array]]:
        how: Any = {"invars": list(block.inputs), "outvars": list(block.results), "eqns": list(block.eqns)}
        constants = {} if block.is_call else self._constants
        jaxpr = self._jaxpr.replace(constvars=list(constants), **how)
        return lambda *arguments: eval_jaxpr(jaxpr, list(constants.values()), *arguments)


def _likeness(block: _Block) -> Any:
    """A value that calls share if they run the same block on equal inputs."""
    numbers = {v: i for i, v in enumerate(block.inputs)}
    calls = []
    for call in block.eqns:
        operands = tuple(repr(v) if _is_literal(v) else numbers[v] for v in call.invars)
        calls.append((id(call.params["jaxpr"]), operands))
        for result in call.outvars:
            numbers[result] = len(numbers)
    return tuple(calls), tuple(numbers[v] for v in block.results)


def _variables(operands: Sequence[Any]) -> list[Any]:
    return [v for v in operands if not _is_literal(v)]


def _is_literal(operand: Any) -> bool:
    return hasattr(operand, "val")


def _form(variable: Any) -> tuple[Any, ...]:
    return variable.aval.shape, variable.aval.dtype
