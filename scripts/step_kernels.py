"""The work of the Pallas kernels of a compiled decode step: what they move and multiply, and cycles of their bundles.

Loops run as often as a batch of equal rows makes them, whose tokens choose all experts evenly.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from scripts import tpu_attention, tpu_static  # isort: skip  # before jax: they set what libtpu reads

import jax.numpy as jnp
import numpy as np

from ferrum_jax.runtime.layout import Layout
from pallas_kernels.grouped_matmul.tiles_of_experts import TilesOfExperts, tiles_of_experts
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.cases import Work as AttentionWork
from pallas_kernels.target import Target
from scripts import tpu_prefetch
from scripts.step_ops import Instruction, Work, array_bytes, hbm_array_bytes, sizes_of
from scripts.tpu_steps import Step

_ATTENTION = ("paged_attention_decode", "latent_attention_decode")
_Shape = tuple[str, tuple[str, ...]]  # a kernel's name, the types of its operands


@dataclasses.dataclass(kw_only=True)
class StepKernels:
    """The kernels of the programs of a step. width: of block tables, in blocks."""

    step: Step
    layout: Layout
    target: Target
    width: int
    _cycles: dict[_Shape, float] = dataclasses.field(default_factory=dict)

    def learn(self, instructions: Sequence[tuple[Instruction, Mapping[str, str]]]) -> None:
        """Counts the kernels among instructions that were compiled since `tpu_static.forget`."""
        calls = {each.name: (each, shapes) for each, shapes in instructions if each.is_kernel}
        shorts = {_short(each): (each, shapes) for each, shapes in calls.values()}
        printed = tpu_static.printed_kernels(
            self.target.generation, lambda name: self._operands(*shorts[name]) if name in shorts else None
        )
        for name, result in printed.items():
            if name in calls:
                self._cycles[_shape(*calls[name])] = result.cycles

    def work(self, each: Instruction, shapes: Mapping[str, str]) -> Work:
        """The work of a call. Raises KeyError for a kernel that was not printed."""
        cycles, name = self._cycles[_shape(each, shapes)], _short(each)
        types = [shapes.get(operand, "") for operand in each.operands]
        moved = sum(map(hbm_array_bytes, (*types, each.shape)))
        if name in _ATTENTION:
            work = AttentionWork.of(self._case(each, shapes))
            return Work(cycles=cycles, hbm_bytes=work.kv_bytes, flops=work.flops)
        if name.startswith("grouped"):
            tiles, used = self._tiles(each)
            of_experts = [kind for kind in types if sizes_of(kind)[:1] == [self.experts_here]]
            codes, run = max(of_experts, key=array_bytes), int(tiles.num_tiles)
            weights = sum(map(hbm_array_bytes, of_experts))
            moved = weights * used / self.experts_here + (moved - weights) * run / len(tiles.expert_ids)
            return Work(cycles=cycles, hbm_bytes=moved, flops=2 * run * tiles.rows * math.prod(sizes_of(codes)[1:]))
        codes = max(types, key=array_bytes)
        return Work(cycles=cycles, hbm_bytes=moved, flops=2 * self.step.rows * math.prod(sizes_of(codes)))

    def _operands(self, each: Instruction, shapes: Mapping[str, str]) -> list[np.ndarray | None] | None:
        """The operands that decide how often a kernel's loops run."""
        name = _short(each)
        if name in _ATTENTION:
            fn, args = tpu_attention.launch(self._case(each, shapes), self.target)
            return next(values for called, values in tpu_prefetch.known_operands(fn, args) if called == name)
        if name.startswith("grouped"):
            tiles, _ = self._tiles(each)
            return [np.asarray(tiles.num_tiles), np.asarray(tiles.expert_ids), *[None] * len(each.operands)]
        return None

    def _case(self, each: Instruction, shapes: Mapping[str, str]) -> Case:
        """Attention of the step's rows with the heads that the call has."""
        out, pool, rows = sizes_of(each.shape), sizes_of(shapes[each.operands[-1]]), self.step.rows
        given: dict[str, Any] = {"num_kv_heads": pool[-2] // 2, "head_dim": out[-1]}
        if _short(each) == "latent_attention_decode":
            given = {"num_kv_heads": 1, "head_dim": out[-1], "rope_dim": pool[-1] - out[-1]}
        return Case(
            name=self.step.name,
            rows=((self.step.context - 1, 1),) * rows,
            num_tokens=rows,
            num_rows=rows,
            num_heads=out[1],
            block_size=pool[1],
            decode_only=True,
            max_context=self.width * pool[1],
            **given,
        )

    @property
    def turns(self) -> int:
        """The turns of XLA's loop over experts: one for each that has a pair, as few as a decode step gives it."""
        return 1 if self.layout.options.spec.experts is None else len(self._used(self._pairs()))

    def _pairs(self) -> np.ndarray:
        """The experts that all tokens choose, evenly: [tokens, X]."""
        experts = self.layout.options.spec.experts
        assert experts is not None, f"{self.step.name} has no experts"
        pairs = np.arange(self.step.tokens * experts.num_experts_per_tok, dtype=np.int32) % experts.num_experts
        return pairs.reshape(self.step.tokens, -1)

    def _used(self, pairs: np.ndarray) -> set[int]:
        return set(pairs.ravel().tolist()) & set(range(self.experts_here))

    def _tiles(self, each: Instruction) -> tuple[TilesOfExperts, int]:
        """Where the pairs stand whose experts are here, and how many experts here have one."""
        pairs = self._pairs()
        ids = jnp.asarray(np.minimum(pairs, self.experts_here))
        tiles = tiles_of_experts(ids, num_here=self.experts_here, rows=sizes_of(each.shape)[1])
        return tiles, len(self._used(pairs))

    @property
    def experts_here(self) -> int:
        """Experts of one device."""
        (stack, *_) = (
            target.sharding.shard_shape(target.shape)
            for name, target in self.layout.targets.items()
            if ".experts." in name and len(target.shape) == 3
        )
        return stack[0]


def _short(each: Instruction) -> str:
    return re.sub(r"[.\d]+$", "", each.name)


def _shape(each: Instruction, shapes: Mapping[str, str]) -> _Shape:
    return _short(each), tuple(shapes.get(name, "") for name in each.operands)
