"""The stages of the TPU's decode kernel: scores, weights and sums of a step's items, and the rows' running states.

Each stage works on another step (see `decode/kernel.py`); t: a step of the schedule, s: an item of it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chosen_keys import HIDDEN
from pallas_kernels.paged_attention.tpu.decode.columns import column_scales, load_vectors, tokens_of, words_of
from pallas_kernels.paged_attention.tpu.decode.config import LANES, DecodeConfig, DecodeShape, DotColumns
from pallas_kernels.paged_attention.tpu.decode.movement import Movement
from pallas_kernels.paged_attention.tpu.decode.ring import dot, parity, ring_place
from pallas_kernels.paged_attention.tpu.decode.scratch import ScaleScratch, Scratch

_LOG2_E = math.log2(math.e)
# DMA starts after each of a step's first dots, of one item or of several; more where there are not enough dots. Keys
# are loaded before the starts that follow their dot: the fewer dots have starts, the fewer keys the compiler loads
# early, into registers that then spill. With many starts in one place the dots after them wait.
_STARTS_OF_ONE, _STARTS_OF_SEVERAL = 20, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """References of one launch and what its arithmetic is specialised to."""

    q: Any  # [T, N, lanes of a key]
    sinks: Any  # [N, 128] or None
    moves: Movement
    scratch: Scratch
    scales: ScaleScratch | None
    shape: DecodeShape
    config: DecodeConfig
    scale: float
    soft_cap: float | None
    interpret: bool

    @property
    def unit(self) -> float:
        """Scores are kept in units in which this is one bit."""
        return _LOG2_E * (self.scale if self.soft_cap is None else self.soft_cap)

    @property
    def chunks(self) -> list[DotColumns]:
        return self.shape.chunks(self.config.tile_kv, self.config.chunk)

    @property
    def num_halves(self) -> int:
        """Chunks whose values stand side by side in a dot of PV."""
        return 2 if self.shape.halves else 1

    @property
    def pairs(self) -> int:
        """Dots of PV of an item."""
        return len(self.chunks) // self.num_halves

    @property
    def half(self) -> int:
        """Columns from a chunk to the one beside it."""
        return self.pairs * self.config.chunk

    @property
    def has_one_item(self) -> bool:
        return self.config.items == 1

    def score(self, t: Any, starts: list[Callable[[], None]]) -> None:
        """QK of step t, and the rows' highest scores; `starts` are DMA starts to be issued between the dots."""
        S, N, C, chunks = self.config.items, self.shape.num_heads, self.shape.block_size, self.chunks
        moves, x, xs = self.moves, self.scratch, self.scales
        many = _STARTS_OF_ONE if self.has_one_item else _STARTS_OF_SEVERAL
        many = max(many, -(-len(starts) // (S * len(chunks))))
        # Scores take the place of those of the step before, which softmax loads in pairs: in the same order here, for
        # else it loads some early, to make room, and these wait for the others of their pairs.
        order = [n for first in range(self.pairs) for n in range(first, len(chunks), self.pairs)]
        state = x.states[ring_place(t - 1), S - 1]
        for s in range(S):
            at, low = moves.stream.place(t, s), moves.low(t, s)
            q = self.q[jnp.minimum(moves.stream.token(t, s), self.q.shape[0] - 1)].astype(self.shape.compute_dtype)
            if xs is not None:
                buffer = t & self.config.buffers - 1
                for b in range(self.config.tile_kv // C):
                    xs.tile[:, pl.ds(b * C, C)] = xs.blocks[buffer, s * (self.config.tile_kv // C) + b]
            top = jnp.full((N, LANES), HIDDEN)
            for i, n in enumerate(order, s * len(chunks)):
                raw = dot(q, self._load(t, s, chunks[n], chunks[n].key)[:, : self.shape.key_lanes], 1)  # [N, width]
                for start in starts[i * many : (i + 1) * many]:
                    start()
                ys = []
                for lane in range(0, self.config.chunk, LANES):
                    y = self._visible(raw[:, lane : lane + LANES], (low, at), s, chunks[n], n, lane)
                    x.scores[s, :, pl.ds(n * self.config.chunk + lane, LANES)] = y
                    ys.append(y)
                top = jnp.maximum(top, functools.reduce(jnp.maximum, ys))
            state = jnp.where(self.moves.stream.is_first(t, s), HIDDEN, state)
            state = jnp.maximum(state, jnp.max(top, axis=1, keepdims=True))
            x.states[ring_place(t), s] = state

    def _visible(
        self, y: jax.Array, seen: tuple[Any, Any], s: int, chunk: DotColumns, n: int, lane: int
    ) -> jax.Array:  # [N, 128]
        """Scores y of 128 columns of chunk n where their token is one of those seen. Keeps V's scales.

        seen: the first, None for all from the item's first on, and the last.
        """
        xs, shape, (low, high), column = self.scales, self.shape, seen, chunk.column + lane
        if xs is not None:
            key_scales, value_scales = column_scales(xs.tile, chunk.part, column, shape)
            y = y * key_scales
            token = tokens_of((1, LANES), column, shape)
            is_seen = token <= high if low is None else (token <= high) & (token >= low)
            xs.values[s, :, pl.ds(n * self.config.chunk + lane, LANES)] = jnp.where(is_seen, value_scales, 0.0)
        if self.soft_cap is not None:
            y = jnp.tanh(y * (self.scale / self.soft_cap))
        token = self.scratch.columns[chunk.part, :, pl.ds(column % shape.period, LANES)]
        before = column // shape.period * (shape.period // shape.words)
        visible = token <= high - before
        if low is not None:
            visible &= token >= low - before
        return jnp.where(visible, y, HIDDEN)

    def softmax(self, t: Any) -> None:
        """Weights of step t, and their sums."""
        x, xs, unit, half = self.scratch, self.scales, self.unit, self.half
        columns = half * self.num_halves
        for s in range(self.config.items):
            state = x.states[ring_place(t), s]
            for c in range(0, columns, LANES):  # through scratch: weights that wait to be added and packed would spill
                x.scores[s, :, pl.ds(c, LANES)] = jnp.exp2((x.scores[s, :, pl.ds(c, LANES)] - state) * unit)
            sums = [jnp.zeros((self.shape.num_heads, LANES))] * self.num_halves
            for column in range(0, half, LANES):
                parts = [x.scores[s, :, pl.ds(c, LANES)] for c in range(column, columns, half)]
                sums = [sum_ + part for sum_, part in zip(sums, parts, strict=True)]
                if xs is not None:
                    parts = [part * xs.values[s, :, pl.ds(column + i * half, LANES)] for i, part in enumerate(parts)]
                stacked = jnp.concatenate(parts, axis=0) if len(parts) > 1 else parts[0]
                x.weights[s, :, pl.ds(column, LANES)] = self._words(stacked)
            added = sum(sums[1:], sums[0])
            if not self.has_one_item:
                added = jnp.broadcast_to(jnp.sum(added, axis=1, keepdims=True), added.shape)
            x.added[parity(t), s] = added

    def weigh(self, t: Any) -> None:
        """PV of step t."""
        x, shape, width, N = self.scratch, self.shape, self.config.chunk, self.shape.num_heads
        for s in range(self.config.items):
            first, lanes = shape.lanes - shape.value_lanes, shape.value_lanes
            acc = jnp.zeros((self.num_halves * N, self.num_halves * lanes))
            for n in range(self.pairs):
                v = [self._load(t, s, chunk, chunk.value)[:, first:] for chunk in self.chunks[n :: self.pairs]]
                v = jnp.concatenate(v, axis=1) if len(v) > 1 else v[0]
                weights = x.weights[s, :, pl.ds(n * width, width)]
                if weights.dtype == jnp.uint32:
                    weights = pltpu.bitcast(weights, shape.compute_dtype)
                acc += dot(weights, v, 0)
            x.sums[s] = acc[:N, :lanes] + acc[N:, lanes:] if shape.halves else acc

    def merge(self, t: Any) -> None:
        """Adds step t to the rows' sums and stores their results as they stand."""
        x, unit = self.scratch, self.unit
        acc, total, before = x.sum[...], x.total[...], x.states[ring_place(t - 1), self.config.items - 1]
        for s in range(self.config.items):
            is_first, state, added = (
                self.moves.stream.is_first(t, s),
                x.states[ring_place(t), s],
                x.added[parity(t), s],
            )
            if self.has_one_item:
                added = jnp.sum(added, axis=1, keepdims=True)
            decay = jnp.exp2((before - state) * unit)  # what a new highest score leaves of the sums before it
            total = jnp.where(is_first, 0.0, total * decay) + added
            acc = jnp.where(is_first, x.sums[s], acc * self._repeated(decay) + x.sums[s])
            sink = 0.0 if self.sinks is None else jnp.exp2(self.sinks[...] * _LOG2_E - state * unit)
            # Broadcasting one lane is slow. With one item that is wanted: softmax, on which it waits, is then so urgent
            # that the compiler does not load values long before their weights are there.
            divisor = (total + sink)[:, :1] if self.has_one_item else self._repeated(total + sink)
            x.outs[self.moves.stream.token(t, s)] = (acc / divisor).astype(x.outs.dtype)
            before = state
        x.sum[...] = acc
        x.total[...] = total

    def _words(self, weights: jax.Array) -> jax.Array:
        """Weights as they are kept: two rows of 16 bits in a word, which fill whole tiles on all generations."""
        weights = weights.astype(self.shape.compute_dtype)
        return weights if weights.dtype == jnp.float32 else pltpu.bitcast(weights, jnp.uint32)

    def _repeated(self, y: jax.Array) -> jax.Array:
        """y of [N, 128], lanes alike, as [N, Vp]."""
        lanes = self.shape.value_lanes
        return jnp.concatenate([y] * -(-lanes // LANES), axis=1)[:, :lanes]

    def _load(self, t: Any, s: int, chunk: DotColumns, vector: int) -> jax.Array:
        """Keys or values of a chunk: [width, Hp]."""
        words = None if self.interpret else words_of(self.scratch.tiles, self.shape)
        buffer = t & self.config.buffers - 1
        token = s * self.config.tile_kv + chunk.token
        vectors = load_vectors(
            self.scratch.tiles,
            words,
            buffer,
            token,
            self.config.chunk,
            self.shape,
            vector,
            widens_words=self.config.widens_words,
        )
        return vectors.astype(self.shape.compute_dtype)
