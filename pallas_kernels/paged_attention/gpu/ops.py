"""The few operations of Mosaic GPU that its interpreter does not know, each with what it computes there instead.

Layouts of arrays in registers are the compiler's business and mean nothing to the interpreter; its wgmma takes no left
operand from registers.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

MATRIX = plgpu.Layout.WGMMA
SMALL = plgpu.Layout.WGMMA_UPCAST_2X  # of a matrix of bytes that become bfloat16
PER_LANE = MATRIX.reduce(1)  # [64], one for each row of a matrix
PER_TOKEN = MATRIX.reduce(0)  # one for each column

_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_WHOLE: Any = ((),) if _INDEX is not None and _INDEX.default is _INDEX.empty else ()  # jax 0.10 wants one, 0.11 warns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ops:
    """is_interpreted: take what the interpreter knows."""

    is_interpreted: bool

    def load(self, ref: Any, layout: Any) -> jax.Array:
        """The whole ref, in shared or global memory."""
        return ref[...] if self.is_interpreted else plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)

    def load_pieces(self, ref: Any, layout: Any) -> jax.Array:  # [pieces, rows] float32 -> [pieces * rows]
        """Neighbouring pieces that are not neighbours in shared memory."""
        if self.is_interpreted:
            return ref[...].reshape(-1)
        result = plgpu.ShapeDtypeStruct((math.prod(ref.shape),), jnp.float32, layout=layout)
        inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
        load = functools.partial(  # as an array that was cut into tiles
            mgpu.FragmentedArray.load_tiled, swizzle=16, layout=layout.to_mgpu(), optimized=False
        )
        return inline(lambda context, pieces: load(pieces))(ref)

    def end_reading(self, *, is_by_threads: bool) -> None:
        """Before a barrier that lets transfers write what was read.

        is_by_threads: some of it was loaded, not read by wgmma, which is on the transfers' side of shared memory; the
        interpreter loads everything.
        """
        if is_by_threads or self.is_interpreted:
            plgpu.commit_smem()

    def scalars(self, ref: Any, row: jax.Array, count: int) -> list[jax.Array]:
        """The first elements of a row in global memory, which the interpreter is slow to read one by one."""
        if self.is_interpreted:
            found = ref[row]
            return [found[i] for i in range(count)]
        return [ref[row, i] for i in range(count)]

    def iota(self, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        """int32 indices along the axis."""
        iota = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return iota if self.is_interpreted else plgpu.layout_cast(iota, layout)

    def full(self, shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        """An array of float32."""
        array = jnp.full(shape, value, jnp.float32)
        return array if self.is_interpreted else plgpu.layout_cast(array, layout)

    def accumulate(self, total: jax.Array, lhs: Any, rhs: Any) -> jax.Array:
        """[64, H] float32 and [64, T], in registers or a ref, times what the ref [T, H] holds."""
        if self.is_interpreted:
            return total + _product(lhs[...], rhs[...])
        accumulator: Any = plgpu.WGMMAAccumulatorRef.init(total)
        return pl.run_state(lambda acc: plgpu.wgmma(acc, lhs, rhs))(accumulator)

    def scores(
        self, queries: Any, keys: Any, meanwhile: Callable[[], None] = lambda: None
    ) -> jax.Array:  # refs [64, H], [T, H] -> [64, T] float32
        """Every query times every key. meanwhile: is called when the product has begun."""

        def multiply(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, queries, keys.transpose((1, 0)))
            meanwhile()
            return acc[...]

        if self.is_interpreted:
            found = _product(queries[...], keys[...].T)
            meanwhile()
            return found
        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((queries.shape[0], keys.shape[0]), jnp.float32))

    def scores_of_parts(
        self, *parts: tuple[Any, Any], after_first: Callable[[], None]
    ) -> jax.Array:  # refs [64, H], [T, H] of each part -> [64, T] float32
        """As `scores` of queries and keys that are cut into parts. after_first: called before the second is read."""

        def multiply(acc: Any) -> jax.Array:
            for i, (queries, keys) in enumerate(parts):
                plgpu.wgmma(acc, queries, keys.transpose((1, 0)))
                if i == 0:
                    after_first()
            return acc[...]

        if self.is_interpreted:
            (queries, keys), *others = parts
            found = _product(queries[...], keys[...].T)
            after_first()
            return found + sum(_product(queries[...], keys[...].T) for queries, keys in others)
        shape = (parts[0][0].shape[0], parts[0][1].shape[0])
        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def accumulate_turned(self, total: jax.Array, values: Any, weights: Any) -> jax.Array:
        """[H, N] float32 and what the refs [T, H] and [N, T] hold, both turned, multiplied."""
        if self.is_interpreted:
            return total + _product(values[...].T, weights[...].T)
        accumulator: Any = plgpu.WGMMAAccumulatorRef.init(total)
        turned = values.transpose((1, 0)), weights.transpose((1, 0))
        return pl.run_state(lambda acc: plgpu.wgmma(acc, *turned))(accumulator)

    def store_turned(self, ref: Any, array: jax.Array) -> None:
        """Stores a matrix [M, N] in a ref [N, M]."""
        if self.is_interpreted:
            ref[...] = array.T
        else:
            ref.transpose((1, 0))[...] = plgpu.layout_cast(array, plgpu.Layout.WGMMA_TRANSPOSED)


def _product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Multiplied in float32."""
    return jnp.dot(lhs.astype(jnp.float32), rhs.astype(jnp.float32))
