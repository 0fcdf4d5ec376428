"""The static shape of a launch over latents, and the shared memory that it takes."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.config import LANES, Form
from pallas_kernels.paged_attention.gpu import shape as gpu_shape
from pallas_kernels.paged_attention.gpu.ops import Ops

HALVES = 2  # of a latent's values, one for each warpgroup that computes


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
    def half(self) -> int:
        """Values of a latent that one warpgroup sums."""
        return self.value_dim // HALVES


def scratch_of(shape: LatentShape) -> dict[str, Any]:
    """Shared memory and barriers by name."""
    form, share = shape.form, shape.share
    swizzled = functools.partial(gpu_shape.swizzled, dtype=jnp.bfloat16, lanes=min(share, 64))
    stages = (form.stages, HALVES)
    arrivals = form.tile_kv // shape.rows * (HALVES + 1)
    return {
        "queries": swizzled((LANES, shape.value_dim + shape.rope_dim)),
        "values": swizzled((*stages, HALVES, share, shape.half)),
        "ropes": swizzled((*stages, share, shape.rope_dim)),
        "weights": swizzled((HALVES, LANES, share)),
        "lanes": plgpu.SMEM((len(PerLane), HALVES, LANES), jnp.float32),
        "queries_ready": plgpu.Barrier(),
        "queries_free": plgpu.Barrier(num_arrivals=HALVES),
        "stage_ready": plgpu.Barrier(num_arrivals=arrivals, num_barriers=form.stages),
        "stage_free": plgpu.Barrier(num_arrivals=HALVES, num_barriers=form.stages),
        "together": plgpu.Barrier(num_arrivals=HALVES),
    }
