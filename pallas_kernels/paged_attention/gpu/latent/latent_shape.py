"""The static shape of a launch over latents."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.gpu.config import LANES, Form
from pallas_kernels.paged_attention.gpu.ops import MATRIX, Ops
from pallas_kernels.paged_attention.gpu.schedule import Field
from pallas_kernels.paged_attention.gpu.shape import unknown_zero

_CLEARED = 64  # values of a token at once
HALVES = 2  # of a latent's values, one for each warpgroup that computes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentShape:
    """The static shape of a launch.

    groups: of up to 64 heads, each an item's work of its own. rows: of a block or a part of one, that one transfer
    brings.
    """

    form: Form
    programs: int
    groups: int
    value_dim: int
    rope_dim: int
    block_size: int
    rows: int
    scale: float
    soft_cap: float | None
    window: int | None
    ops: Ops

    @property
    def share(self) -> int:
        """Tokens of a stage whose scores one warpgroup computes."""
        return self.form.tile_kv // HALVES

    @property
    def key_dim(self) -> int:
        """Lanes of a latent."""
        return self.value_dim + self.rope_dim

    @property
    def weighs_in_ropes(self) -> bool:
        """Whether a share's weights stand where its keys' last lanes were, which are read before them."""
        return self.share == LANES == self.rope_dim

    @property
    def pieces(self) -> range:
        """Tokens of a stage that begin a transfer."""
        return range(0, self.form.tile_kv, self.rows)

    def stage_of(self, n: jax.Array) -> jax.Array:
        """The stage of a program's n-th tile."""
        return lax.rem(n, self.form.stages) if self.form.stages > 1 else unknown_zero(n)

    def columns(self, half: int) -> Any:
        """The lanes of a half of a latent's values."""
        return pl.ds(half * self.half, self.half)

    def source(self, latents: Any, tables: Any, item: dict[Field, jax.Array], position: jax.Array) -> Any:
        """The rows of the pool with the tokens from a position on, or the nearest inside the context."""
        C, rows = self.block_size, self.rows
        position = lax.clamp(item[Field.OLDEST], position, item[Field.HIGH])
        block, part = tables[item[Field.ROW], lax.div(position, C)], lax.div(lax.rem(position, C), rows)
        return latents.at[block * (C // rows) + part]

    def is_seen(
        self, item: dict[Field, jax.Array], begin: jax.Array, like: tuple[int, ...], axis: int, layout: Any
    ) -> jax.Array:
        """Which tokens, from position `begin` on along the axis, the row's query sees."""
        position = self.ops.iota(like, axis, layout) + begin
        return (position >= item[Field.OLDEST]) & (position <= item[Field.HIGH])

    def clear_unseen(self, values: Any, width: int, begin: jax.Array, item: dict[Field, jax.Array]) -> None:
        """Makes `width` values of tokens that are not seen zero, in shared memory: 0 x NaN is NaN."""
        for first in range(0, width, _CLEARED):
            columns = pl.ds(first, _CLEARED)
            found = self.ops.load(values.at[:, columns], MATRIX)
            is_seen = self.is_seen(item, begin, found.shape, 0, MATRIX)
            values[:, columns] = jnp.where(is_seen, found, jnp.zeros_like(found))

    def over_stages(self, item: dict[Field, jax.Array], one_stage: Callable[..., Any], carry: Any) -> Any:
        """Runs `one_stage(tile, carry, is_edge)` over an item's tiles; at an edge some tokens are not seen."""
        first, end = item[Field.FIRST_KV], item[Field.END_KV]
        first_full = jnp.clip(item[Field.FIRST_FULL], first, end)
        end_full = jnp.clip(item[Field.END_FULL], first_full, end)
        if self.window is not None:
            carry = lax.fori_loop(first, first_full, lambda j, c: one_stage(j, c, True), carry)
        carry = lax.fori_loop(first_full, end_full, lambda j, c: one_stage(j, c, False), carry)
        return lax.fori_loop(end_full, end, lambda j, c: one_stage(j, c, True), carry)

    @property
    def rope_columns(self) -> Any:
        """The lanes that keys have beside."""
        return pl.ds(self.value_dim, self.rope_dim)

    @property
    def half(self) -> int:
        """Values of a latent that one warpgroup sums."""
        return self.value_dim // HALVES
