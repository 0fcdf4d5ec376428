"""The static shape of a launch over latents, and the shared memory that it takes."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.config import LANES, Form
from pallas_kernels.paged_attention.gpu import shape as gpu_shape
from pallas_kernels.paged_attention.gpu.ops import Ops

HALVES = 2  # of a latent's values, one for each warpgroup that computes


def unknown_zero(n: jax.Array) -> jax.Array:
    """0 for an n that is not negative, which the compiler does not know.

    What it knows to stay as it is in a loop, the places of all operands, it would keep in registers, which are few.
    """
    return lax.shift_right_logical(n, 31)


class PerLane(enum.IntEnum):
    """What a warpgroup has in shared memory for each lane; in one buffer, because each is padded to 1 KiB."""

    HIGHEST = 0  # logit of its tokens of a stage; at a split's end, the base-2 logarithm of all weights
    TOTAL = 1  # of its tokens' weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentShape:
    """The static shape of a launch.

    groups: of up to 64 heads, each an item's work of its own. rows: of a block or a part of one, that one transfer
    brings. A stage's tokens are cut into two shares, whose scores one of the warpgroups computes each.
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

    @property
    def rope_columns(self) -> Any:
        """The lanes that keys have beside."""
        return pl.ds(self.value_dim, self.rope_dim)

    @property
    def half(self) -> int:
        """Values of a latent that one warpgroup sums."""
        return self.value_dim // HALVES


def scratch_of(shape: LatentShape) -> dict[str, Any]:
    """Shared memory and barriers by name.

    A share of a stage comes in two parts, because they become free one after the other: the half of its values that
    the warpgroup sums which scores the share too, and the rest.
    """
    form, share, half, rope = shape.form, shape.share, shape.half, shape.rope_dim
    swizzled = functools.partial(gpu_shape.swizzled, dtype=jnp.bfloat16, lanes=min(share, rope))
    shares, pieces = (form.stages, HALVES), share // shape.rows
    slots = form.stages * HALVES
    scratch = {
        "queries": swizzled((form.query_slots, HALVES, LANES, half)),
        "rope_queries": swizzled((form.query_slots, LANES, rope)),
        "values": swizzled((*shares, HALVES, share, half)),
        "ropes": swizzled((*shares, share, rope)),
        "lanes": plgpu.SMEM((len(PerLane), HALVES, LANES), jnp.float32),
        "queries_ready": plgpu.Barrier(num_arrivals=HALVES + 1),
        "queries_free": plgpu.Barrier(num_arrivals=HALVES),
        "own_ready": plgpu.Barrier(num_arrivals=pieces, num_barriers=slots),
        "own_free": plgpu.Barrier(num_barriers=slots),
        "rest_ready": plgpu.Barrier(num_arrivals=2 * pieces, num_barriers=slots),
        "rest_free": plgpu.Barrier(num_barriers=slots),
        "together": plgpu.Barrier(num_arrivals=HALVES),
    }
    if not shape.weighs_in_ropes:
        scratch["weights"] = swizzled((HALVES, LANES, share))
    return scratch
