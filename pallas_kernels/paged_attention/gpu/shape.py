"""The static shape of a launch of the GPU's attention kernel, and the shared memory that it takes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.config import LANES, Divided, Form
from pallas_kernels.paged_attention.gpu.ops import Ops
from pallas_kernels.paged_attention.gpu.schedule import Field

_SWIZZLES = (128, 64, 32)  # bytes


def unknown_zero(n: jax.Array) -> jax.Array:
    """0 for an n that is not negative, which the compiler does not know.

    What it knows to stay as it is in a loop, the places of all operands, it would keep in registers, which are few.
    """
    return lax.shift_right_logical(n, 31)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """The static part that a call's launches share. group: query heads of a KV head. scale, soft_cap: of logits."""

    group: int
    scale: float
    soft_cap: float | None
    ops: Ops
    interpret: Any


class Refs(NamedTuple):
    """References of a launch: `inputs` and `outputs` as `attend` has them, scratch by the names of `scratch_of`."""

    inputs: Any
    outputs: Any
    scratch: dict[str, Any]


class Task(NamedTuple):
    """An item's work for one KV head. index: how many a program has before it."""

    index: jax.Array
    head: jax.Array
    item: dict[Field, jax.Array]


class StageTile(NamedTuple):
    """A program's n-th tile: tokens from position `begin` on. slot: of the item's queries. item: where queries do not
    see all of them, or one is new."""

    n: jax.Array
    stage: jax.Array
    begin: jax.Array
    slot: jax.Array
    item: dict[Field, jax.Array] | None


class ConsumerPart(NamedTuple):
    """A consumer's part of every item. group: of lanes. column: its first of V's. ring: of stages."""

    number: int | jax.Array
    group: int | jax.Array
    column: int | jax.Array
    ring: int | jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The static shape of a launch. rows: of a block or a part of one, that one transfer brings.

    has_spans: queries may see beyond themselves, and the last of `inputs` says how far. writes: the pool does not have
    the last token's K and V yet; they come behind a row's queries, and the split that reads their place writes them.
    """

    form: Form
    programs: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    group: int
    block_size: int
    rows: int
    dtype: jnp.dtype
    scale: float
    soft_cap: float | None
    window: int | None
    chunked: bool
    causal: bool
    has_spans: bool
    writes: bool
    ops: Ops

    @property
    def is_converted(self) -> bool:
        """Whether K and V are made bfloat16 before they are multiplied."""
        return self.dtype.itemsize == 1

    @property
    def alternates(self) -> bool:
        """Whether one consumer multiplies while the other weighs; with stages to convert they meet at each."""
        return self.form.consumers > 1 and not self.is_converted

    @property
    def width(self) -> int:
        """Lanes of a head dim that are rewritten at once: more would take registers that the results are in."""
        return 32 if self.head_dim % 64 or self.value_dim % 64 else 64

    @property
    def is_apart(self) -> bool:
        """Whether K and V of a stage come and go apart."""
        return self.form.halves > 1

    @property
    def arriving(self) -> tuple[range, ...]:
        """Columns of a token's vector that come together, K first; where there are two, they are as many."""
        H, both = self.head_dim, self.head_dim + self.value_dim
        return (range(H), range(H, both)) if self.is_apart else (range(both),)

    @property
    def first_value(self) -> int:
        """The column at which V begins where it is multiplied."""
        return 0 if self.is_apart else self.head_dim

    @property
    def summed(self) -> int:
        """Lanes of V whose sums one consumer has."""
        return self.value_dim // (self.form.consumers if self.form.divided is Divided.VALUES else 1)

    def stage_of(self, n: jax.Array, ring: int | jax.Array = 0) -> jax.Array:
        """The stage of a program's n-th tile, or of the n-th of those of a ring."""
        stage = lax.rem(n, self.form.stages) if self.form.stages > 1 else unknown_zero(n)
        return stage if self.form.rings == 1 else ring * self.form.stages + stage

    def consumer(self, number: int | jax.Array) -> ConsumerPart:
        """The consumer with that number."""
        if self.form.divided is Divided.VALUES:
            return ConsumerPart(number, 0, number * self.summed, 0)
        if self.form.divided is Divided.TILES:
            return ConsumerPart(number, 0, 0, number)
        return ConsumerPart(number, number, 0, 0)

    def place_of(self, tables: Any, row: jax.Array, position: jax.Array) -> jax.Array:
        """The place of the block, or the part of one, that has a row's position."""
        block = tables[row, lax.shift_right_logical(position, self.block_size.bit_length() - 1)]  # a power of two
        parts = self.block_size // self.rows
        return block * parts + (lax.shift_right_logical(position, self.rows.bit_length() - 1) & (parts - 1))

    @property
    def has_scales(self) -> bool:
        """Whether each token's K and V have a factor."""
        return self.dtype == jnp.int8


def swizzled(shape: tuple[int, ...], dtype: Any, lanes: int | None = None) -> Any:
    """Shared memory that wgmma reads, swizzled over as many bytes as divide the minor dimension."""
    bytes_ = jnp.dtype(dtype).itemsize
    swizzle = next(s for s in _SWIZZLES if (lanes or shape[-1]) * bytes_ % s == 0)
    transforms = (plgpu.TilingTransform((8, swizzle // bytes_)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def scratch_of(shape: Shape) -> dict[str, Any]:
    """Shared memory and barriers by name."""
    form, H, T = shape.form, shape.head_dim, shape.form.tile_kv
    lanes, halves = len(shape.arriving[0]), form.rings * form.stages * form.halves
    readers = form.consumers // form.rings
    pieces = T // shape.rows
    arrivals = pieces * (2 if shape.has_scales else 1)
    scratch = {
        # swizzled as keys are, for wgmma wants one swizzle of both
        "queries": swizzled((form.query_slots, form.lane_groups, LANES, H), jnp.bfloat16, lanes=shape.width),
        "stages": swizzled((halves, T, lanes), shape.dtype, lanes=shape.width),
        "queries_ready": plgpu.Barrier(num_arrivals=form.lane_groups + shape.writes, num_barriers=form.query_slots),
        "queries_free": plgpu.Barrier(num_arrivals=form.consumers, num_barriers=form.query_slots),
        "stage_ready": plgpu.Barrier(num_arrivals=arrivals, num_barriers=halves),
        "stage_free": plgpu.Barrier(num_arrivals=readers, num_barriers=halves),
    }
    if readers > 1:
        scratch["together"] = plgpu.Barrier(num_arrivals=form.consumers)
    if shape.alternates:
        scratch["turn"] = plgpu.Barrier(num_arrivals=form.consumers)
    if form.split is not None:
        scratch["result"] = plgpu.SMEM((form.consumers, LANES, form.part), jnp.float32)
        scratch["sums"] = plgpu.SMEM((form.rings, LANES), jnp.float32)
    if shape.writes:
        scratch["new"] = plgpu.SMEM((form.query_slots, 2, H), shape.dtype)
    if shape.is_converted:
        scratch["converted"] = swizzled((form.rings, T, lanes), jnp.bfloat16, lanes=shape.width)
    if shape.has_scales:
        # K's and V's of a block side by side: a transfer must begin at a multiple of 128 bytes, and 16 scales have 64
        scratch["scales"] = plgpu.SMEM((halves, pieces, 2, shape.rows), jnp.float32)
    return scratch
