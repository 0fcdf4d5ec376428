"""The stages of the TPU's kernel for latents: scores, weights and sums of a step's items, and rows' running states.

Each stage works on another step (see `latent/kernel.py`); t: a step of the schedule, s: an item of it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.chosen_keys import HIDDEN
from pallas_kernels.paged_attention.tpu.decode.config import LANES
from pallas_kernels.paged_attention.tpu.decode.ring import dot, parity, ring_place
from pallas_kernels.paged_attention.tpu.latent.config import LatentConfig
from pallas_kernels.paged_attention.tpu.latent.latent_movement import LatentMovement, LatentScratch, as_dtype

_LOG2_E = math.log2(math.e)
_VALUE_LANES = 256  # of one dot's result, which then fits the registers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentStages:
    """References of one launch and what its arithmetic is specialised to."""

    moves: LatentMovement
    scratch: LatentScratch
    config: LatentConfig
    scale: float
    soft_cap: float | None

    @property
    def unit(self) -> float:
        """Scores are kept in units in which this is one bit."""
        return _LOG2_E * (self.scale if self.soft_cap is None else self.soft_cap)

    def score(self, t: Any, starts: list[Callable[[], None]]) -> None:
        """QK of step t, and the rows' highest scores; `starts` are DMA starts to be issued between the dots."""
        S, N, tiles = self.config.decode.items, self.config.queries, self.config.decode
        x, dots = self.scratch, self.config.decode.tile_kv // self.config.decode.chunk
        many = -(-len(starts) // (S * dots))
        state = x.states[ring_place(t - 1), S - 1]
        for s in range(S):
            at = self.moves.stream.place(t, s) - self.moves.last_lane(t, s)  # of lane 0
            q = x.queries[self.moves.slot(t, s)].reshape(N, self.config.lanes).astype(self.config.compute_dtype)
            tops = []
            for n in range(dots):
                raw = dot(q, self._latents(t, s, n * tiles.chunk), 1)  # [N, chunk]
                for start in starts[(s * dots + n) * many : (s * dots + n + 1) * many]:
                    start()
                if self.soft_cap is not None:
                    raw = jnp.tanh(raw * (self.scale / self.soft_cap))
                raw = self._seen(at, raw, n) if self.moves.limited is None else self._limited(t, s, raw, n)
                x.scores[s, :, pl.ds(n * tiles.chunk, tiles.chunk)] = raw
                tops += [raw[:, lane : lane + LANES] for lane in range(0, tiles.chunk, LANES)]
            top = jnp.max(functools.reduce(jnp.maximum, tops), axis=1, keepdims=True)
            state = jnp.maximum(jnp.where(self.moves.stream.is_first(t, s), HIDDEN, state), top)
            x.states[ring_place(t), s] = jnp.broadcast_to(state, (N, LANES))

    def _seen(self, at: Any, raw: jax.Array, n: int) -> jax.Array:
        """Scores of dot n, hidden where a key is behind the query; at: the last key that the first token sees."""
        N, many = self.config.num_heads, self.config.tile_q
        token = jax.lax.broadcasted_iota(jnp.int32, (N, raw.shape[1]), 1) + n * self.config.decode.chunk
        seen = [jnp.where(token <= at + i, raw[i * N : (i + 1) * N], HIDDEN) for i in range(many)]
        return jnp.concatenate(seen, axis=0) if many > 1 else seen[0]

    def _limited(self, t: Any, s: int, raw: jax.Array, n: int) -> jax.Array:
        """Scores of dot n, hidden where a key is not chosen.

        Before a row's first chosen key the weights are of keys that are hidden; with that key their sums decay to 0.
        """
        assert self.moves.limited is not None
        limits, first = self.moves.limited.limits, n * self.config.decode.chunk // LANES
        pieces = [
            jnp.minimum(raw[:, i * LANES : (i + 1) * LANES], limits[self.moves.buffer(t), s, pl.ds(first + i, 1)])
            for i in range(self.config.decode.chunk // LANES)
        ]
        return jnp.concatenate(pieces, axis=1)

    def softmax(self, t: Any) -> None:
        """Weights of step t, and their sums."""
        x, tile = self.scratch, self.config.decode.tile_kv
        for s in range(self.config.decode.items):
            state, added = x.states[ring_place(t), s], jnp.zeros((self.config.queries, LANES))
            for lane in range(0, tile, LANES):
                weights = jnp.exp2((x.scores[s, :, pl.ds(lane, LANES)] - state) * self.unit)
                x.weights[s, :, pl.ds(lane, LANES)] = weights.astype(x.weights.dtype)
                added += weights
            x.added[parity(t), s] = added

    def weigh(self, t: Any) -> None:
        """PV of step t."""
        x, V, chunk = self.scratch, self.config.value_dim, self.config.decode.chunk
        for s in range(self.config.decode.items):
            for lane in range(0, V, _VALUE_LANES):
                lanes = min(_VALUE_LANES, V - lane)
                acc = jnp.zeros((self.config.queries, lanes))
                for first in range(0, self.config.decode.tile_kv, chunk):
                    values = self._latents(t, s, first, lane, lanes)
                    acc += dot(x.weights[s, :, pl.ds(first, chunk)], values, 0)
                x.sums[s, :, pl.ds(lane, lanes)] = acc

    def merge(self, t: Any) -> None:
        """Adds step t to the rows' sums. Before the first item of a row these are another row's, or nothing: NaN."""
        x, last = self.scratch, self.config.decode.items - 1
        before = x.states[ring_place(t - 1), last]
        for s in range(self.config.decode.items):
            state, earlier = x.states[ring_place(t), s], s - 1 if s else last
            is_first = self.moves.stream.is_first(t, s)
            decay = jnp.exp2((before - state) * self.unit)  # what a new highest score leaves of the sums before it
            added = jnp.broadcast_to(jnp.sum(x.added[parity(t), s], axis=1, keepdims=True), decay.shape)
            x.totals[s] = jnp.where(is_first, 0.0, x.totals[earlier] * decay) + added
            for lane in range(0, self.config.value_dim, LANES):
                lanes = pl.ds(lane, LANES)
                x.results[s, :, lanes] = (
                    jnp.where(is_first, 0.0, x.results[earlier, :, lanes] * decay) + x.sums[s, :, lanes]
                )
            before = state

    def finish(self, t: Any) -> None:
        """Stores the results of rows that end in step t, which was merged last."""
        for s in range(self.config.decode.items):
            pl.when(self.moves.is_last(t, s))(functools.partial(self._finish, t, s))

    def _finish(self, t: Any, s: int) -> None:
        self.moves.free_slot(t, s)
        x, slot = self.scratch, self.moves.slot(t, s)
        of_one = 1.0 / x.totals[s]
        for lane in range(0, self.config.value_dim, LANES):
            lanes = pl.ds(lane, LANES)
            result = (x.results[s, :, lanes] * of_one).astype(x.outs.dtype)
            x.outs[slot, :, :, lanes] = result.reshape(self.config.tile_q, self.config.num_heads, LANES)
        self.moves.store(t, s)

    def _latents(self, t: Any, s: int, token: int, lane: int = 0, lanes: int | None = None) -> jax.Array:
        """Lanes of the latents of a chunk's tokens: [chunk, lanes], all of them where lanes is None."""
        C, chunk, tile = self.config.block_size, self.config.decode.chunk, self.config.decode.tile_kv
        first, many = s * tile + token, max(1, chunk // C)
        within = pl.ds(first % C, chunk) if chunk < C else slice(None)
        lanes = self.config.lanes if lanes is None else lanes
        found = self.scratch.tiles[self.moves.buffer(t), pl.ds(first // C, many), within, pl.ds(lane, lanes)]
        return as_dtype(found.reshape(chunk, lanes), self.config.pool_dtype).astype(self.config.compute_dtype)
