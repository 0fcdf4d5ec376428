"""The scalars of a step's items in the TPU's decode kernels, and their transfers from HBM. See `records.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.decode.config import RING
from pallas_kernels.paged_attention.tpu.decode.records import CHUNKS, LOOK_BACK, Records
from pallas_kernels.table_lines import LINE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """References of one launch; t: a step of the schedule, s: an item of it. What is resident needs none but ring."""

    ring: Any  # [ring words] int32 in scalar memory, which begins as `Records.ring` says
    shape: Records
    records: Any = None  # [words] int32 in HBM
    tables: Any = None  # [lines, 128] int32 in HBM
    fetched: Any = None  # DMA semaphores, one for each step that waits
    low_bits: int = 1  # of an item's token, 0 but in its row's first item: 1 + the first token that its query sees

    @classmethod
    def of(cls, shape: Records, ring: Any, refs: list[Any]) -> tuple[Stream, list[Any]]:
        """The stream of a kernel's references, and the others of them."""
        if shape.is_resident:
            return cls(ring=ring, shape=shape), refs
        records, tables, *others = refs
        return cls(ring=ring, shape=shape, records=records, tables=tables), others

    def info(self, t: Any) -> Any:
        """2 * blocks to fetch + whether an item has tokens that are not visible."""
        return self.ring[self._record(t)]

    def place(self, t: Any, s: int) -> Any:
        """Where the row's new token stands, counted from the item's first; negative where the item is idle."""
        return self._of_item(t, s, 0)

    def first_block(self, t: Any, s: int) -> Any:
        """Where the ring has the item's first block."""
        return self._of_item(t, s, 1)

    def token(self, t: Any, s: int) -> Any:
        """The flat token of the item's row."""
        return self._of_item(t, s, 2) >> self.low_bits

    def is_first(self, t: Any, s: int) -> Any:
        """Whether the item is its row's first, or idle."""
        return self._mark(t, s) == 1 if self.low_bits == 1 else self._mark(t, s) > 0

    def low(self, t: Any, s: int) -> Any:
        """The first token of the item that its query sees, where `low_bits` have room for it."""
        return jnp.maximum(self._mark(t, s) - 1, 0)

    def begin(self, bring: Callable[[Any], list[Callable[[], None]]], ahead: int) -> None:
        """Starts what the first `ahead` steps wait for. bring: starts of a step's other transfers."""

        def step(t: Any, _: int) -> int:
            self.fetch(t)
            for start in bring(t):
                start()
            return 0

        jax.lax.fori_loop(0, ahead, step, 0)

    def end(self, steps: Any, ahead: int) -> None:
        """Waits for what was started for `ahead` steps behind the last."""
        for t in range(ahead):
            self.arrive(steps + t)

    def fetch(self, t: Any) -> None:
        """Starts the transfers that step t waits for: lines of the items of step t + ahead, and a chunk of records."""
        if self.shape.is_resident:
            return
        shape, fetched = self.shape, self._fetched(t)
        lines = [
            self._of_item(t + shape.ahead, s, 3) for s in range(shape.items)
        ]  # before what may seem to change them
        slot = shape.first_line + (t + shape.ahead & shape.slots - 1) * shape.step_words
        for s, line in enumerate(lines):
            for i in range(shape.item_words // LINE):
                here = self.ring.at[pl.ds(slot + s * shape.item_words + i * LINE, LINE)]
                pltpu.make_async_copy(self.tables.at[line + i], here, fetched).start()
        # In each step the same chunk, so that nothing asks where one begins.
        step = (t - shape.ahead + LOOK_BACK & -shape.chunk_steps) + 3 * shape.chunk_steps
        words, many = shape.words, shape.chunk_words
        there = pl.ds(pl.multiple_of(step * words, many), many)
        here = pl.ds(pl.multiple_of((step & CHUNKS * shape.chunk_steps - 1) * words, many), many)
        pltpu.make_async_copy(self.records.at[there], self.ring.at[here], fetched).start()

    def arrive(self, t: Any) -> None:
        """Waits for them."""
        if self.shape.is_resident:
            return
        all_of_them = self.ring.at[pl.ds(0, self.shape.chunk_words + self.shape.step_words)]
        pltpu.make_async_copy(all_of_them, all_of_them, self._fetched(t)).wait()

    def _mark(self, t: Any, s: int) -> Any:
        return self._of_item(t, s, 2) & (1 << self.low_bits) - 1

    def _fetched(self, t: Any) -> Any:
        return self.fetched.at[t & self.shape.buffers - 1]

    def _record(self, t: Any) -> Any:
        step = t + LOOK_BACK
        return (step if self.shape.is_resident else step & CHUNKS * self.shape.chunk_steps - 1) * self.shape.words

    def _of_item(self, t: Any, s: int, field: int) -> Any:
        return self.ring[self._record(t) + (1 + field * self.shape.items + s)]


def ring_place(t: Any) -> Any:
    """Where score leaves the states of step t."""
    return t & RING - 1


def parity(t: Any) -> Any:
    """Where softmax of step t leaves its sums, which merge reads after the next step's softmax."""
    return t & 1


def dot(a: jax.Array, b: jax.Array, contracted: int) -> jax.Array:
    """a and this dimension of b multiplied, summed in float32; float32 operands in full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
