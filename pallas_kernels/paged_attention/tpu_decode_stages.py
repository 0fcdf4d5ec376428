"""The stages of the TPU's decode kernel: scores, weights and sums of a step's items, and the rows' running states.

Each stage works on another step (see `tpu_decode`); t: a step of the schedule, s: an item of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.tpu_config import LANES, LOOK_BACK, Chunk, DecodeConfig, DecodeShape
from pallas_kernels.paged_attention.tpu_decode_columns import column_scales, load_vectors, tokens_of, words_of
from pallas_kernels.paged_attention.tpu_decode_movement import Movement
from pallas_kernels.paged_attention.tpu_decode_scratch import ScaleScratch, Scratch

_HIDDEN = -1e30  # finite: the difference of two is 0, not NaN
_LOG2_E = math.log2(math.e)
# DMA starts after each of a step's first dots, more where there are not enough dots. Keys are loaded before the starts
# that follow their dot: with starts after all dots the compiler loads all keys early, into registers that then spill.
_STARTS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """References of one launch and what its arithmetic is specialised to."""

    q: Any  # [T, N, Hp]
    sinks: Any  # [N, 128] or None
    moves: Movement
    scratch: Scratch
    scales: ScaleScratch | None
    shape: DecodeShape
    config: DecodeConfig
    scale: float
    soft_cap: float | None
    window: int | None
    interpret: bool

    @property
    def unit(self) -> float:
        """Scores are kept in units of which this is one bit."""
        return _LOG2_E * (self.scale if self.soft_cap is None else self.soft_cap)

    @property
    def chunks(self) -> list[Chunk]:
        return self.shape.chunks(self.config.tile_kv, self.config.chunk)

    def score(self, t: Any, starts: list[Callable[[], None]]) -> None:
        """QK of step t; `starts` are DMA starts to be issued between the dots."""
        S, N, C, chunks = self.config.items, self.shape.num_heads, self.shape.block_size, self.chunks
        moves, xs = self.moves, self.scales
        many = max(_STARTS, -(-len(starts) // (S * len(chunks))))
        for s in range(S):
            at = moves.places[moves.item(t, s)]
            q = self.q[jnp.minimum(moves.token(t, s), self.q.shape[0] - 1)].astype(self.shape.compute_dtype)
            if xs is not None:
                buffer = jax.lax.rem(t, self.config.buffers)
                for b in range(self.config.tile_kv // C):
                    xs.tile[:, pl.ds(b * C, C)] = xs.blocks[buffer, s * (self.config.tile_kv // C) + b]
            top = jnp.full((N, LANES), _HIDDEN)
            for n, chunk in enumerate(chunks):
                raw = self._dot(q, self._load(t, s, chunk, chunk.key), 1)  # [N, width]
                dot = s * len(chunks) + n
                for start in starts[dot * many : (dot + 1) * many]:
                    start()
                for lane in range(0, self.config.chunk, LANES):
                    y = self._visible(raw[:, lane : lane + LANES], at, s, chunk, n, lane)
                    self.scratch.scores[s, :, pl.ds(n * self.config.chunk + lane, LANES)] = y
                    top = jnp.maximum(top, y)
            self.scratch.tops[s] = jnp.broadcast_to(jnp.max(top, axis=1, keepdims=True), (N, LANES))

    def _visible(self, y: jax.Array, at: Any, s: int, chunk: Chunk, n: int, lane: int) -> jax.Array:  # [N, 128]
        """Scores y of 128 columns of chunk n, of the row at position `at`, where it may see them. Keeps V's scales."""
        xs, shape, window, column = self.scales, self.shape, self.window, chunk.column + lane
        if xs is not None:
            key_scales, value_scales = column_scales(xs.tile, chunk.part, column, shape)
            y = y * key_scales
            token = tokens_of((1, LANES), column, shape)
            seen = token <= at if window is None else (token <= at) & (token > at - window)
            xs.values[s, :, pl.ds(n * self.config.chunk + lane, LANES)] = jnp.where(seen, value_scales, 0.0)
        if self.soft_cap is not None:
            y = jnp.tanh(y * (self.scale / self.soft_cap))
        token = self.scratch.columns[chunk.part, :, pl.ds(column % shape.period, LANES)]
        high = at - column // shape.period * (shape.period // shape.words)
        visible = token <= high
        if window is not None:
            visible &= token > high - window
        return jnp.where(visible, y, _HIDDEN)

    def softmax(self, t: Any) -> None:
        """Weights of step t, and what they leave of the rows' states."""
        x, xs, unit, width = self.scratch, self.scales, self.unit, self.config.chunk
        columns = len(self.chunks) * width
        half = columns // (2 if self.shape.halves else 1)
        state, total, parity = x.top[...], x.total[...], self._parity(t)
        for s in range(self.config.items):
            before = jnp.where(self._is_first(t, s), _HIDDEN, state)
            state = jnp.maximum(before, x.tops[s])
            decay = jnp.exp2((before - state) * unit)
            sum_ = jnp.zeros((self.shape.num_heads, LANES))
            for c in range(0, columns, LANES):  # through scratch: weights that wait to be added and packed would spill
                x.scores[s, :, pl.ds(c, LANES)] = jnp.exp2((x.scores[s, :, pl.ds(c, LANES)] - state) * unit)
            for column in range(0, half, LANES):
                parts = [x.scores[s, :, pl.ds(c, LANES)] for c in range(column, columns, half)]
                sum_ += sum(parts[1:], parts[0])
                if xs is not None:
                    parts = [part * xs.values[s, :, pl.ds(column + i * half, LANES)] for i, part in enumerate(parts)]
                stacked = jnp.concatenate(parts, axis=0) if len(parts) > 1 else parts[0]
                x.weights[s, :, pl.ds(column, LANES)] = stacked.astype(x.weights.dtype)
            total = jnp.where(self._is_first(t, s), 0.0, total * decay) + jnp.sum(sum_, axis=1, keepdims=True)
            x.decays[parity, s] = decay
            sink = 0.0 if self.sinks is None else jnp.exp2(self.sinks[...] * _LOG2_E - state * unit)
            x.totals[parity, s] = total + sink
        x.top[...] = state
        x.total[...] = total

    def weigh(self, t: Any) -> None:
        """PV of step t."""
        x, shape, width, N = self.scratch, self.shape, self.config.chunk, self.shape.num_heads
        pairs = len(self.chunks) // (2 if shape.halves else 1)
        for s in range(self.config.items):
            acc = jnp.zeros((x.weights.shape[1], shape.lanes * (2 if shape.halves else 1)))
            for n in range(pairs):
                v = [self._load(t, s, chunk, chunk.value) for chunk in self.chunks[n::pairs]]
                v = jnp.concatenate(v, axis=1) if len(v) > 1 else v[0]
                acc += self._dot(x.weights[s, :, pl.ds(n * width, width)], v, 0)
            x.sums[s] = acc[:N, : shape.lanes] + acc[N:, shape.lanes :] if shape.halves else acc

    def merge(self, t: Any) -> None:
        """Adds step t to the rows' states and stores their results as they stand."""
        x, parity = self.scratch, self._parity(t)
        acc = x.sum[...]
        for s in range(self.config.items):
            acc = jnp.where(self._is_first(t, s), x.sums[s], acc * x.decays[parity, s][:, :1] + x.sums[s])
            x.outs[self.moves.token(t, s)] = (acc / x.totals[parity, s][:, :1]).astype(x.outs.dtype)
        x.sum[...] = acc

    def _parity(self, t: Any) -> Any:
        """Where softmax of step t leaves what merge reads after the next step's softmax."""
        return jax.lax.rem(t + LOOK_BACK, 2)

    def _is_first(self, t: Any, s: int) -> Any:
        return (self.moves.tokens[self.moves.item(t, s)] & 1) == 1

    def _load(self, t: Any, s: int, chunk: Chunk, vector: int) -> jax.Array:
        """Keys or values of a chunk: [width, Hp]."""
        words = None if self.interpret else words_of(self.scratch.tiles, self.shape)
        buffer = jax.lax.rem(t + self.config.buffers, self.config.buffers)
        token = s * self.config.tile_kv + chunk.token
        vectors = load_vectors(self.scratch.tiles, words, buffer, token, self.config.chunk, self.shape, vector)
        return vectors.astype(self.shape.compute_dtype)

    def _dot(self, a: jax.Array, b: jax.Array, contracted: int) -> jax.Array:
        """a and this dimension of b multiplied, summed in float32; float32 operands in full precision."""
        precision = jax.lax.Precision.HIGHEST if self.shape.compute_dtype == jnp.float32 else None
        dimensions = (((1,), (contracted,)), ((), ()))
        return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
