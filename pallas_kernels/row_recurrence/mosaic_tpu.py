"""Rows of one token on a TPU: while one row's states change in vector memory, those of its neighbours cross HBM.

A turn of the grid has some heads of one row. The grid has no turn for rows without a token or with several, so padding
costs nothing. States are written where they were read, and a row's bits follow from its own states and token alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.row_recurrence.tpu_support import turns_of_row
from pallas_kernels.state_rows import SingleRows, StateRows

_VMEM_BYTES = 2**25
# (load, keep, *tokens) -> out [H, B]: load(n) is the state of the n-th of H heads, keep(n, state) what it is afterwards
HeadsRule = Callable[..., jax.Array]


def one_token(
    rule: HeadsRule,
    tokens: tuple[jax.Array, ...],  # [T, K, A] of groups, then [T, N] or [T, N, ...] of heads
    out: jax.Array,  # [T, N, B]
    pool: jax.Array,  # [slots, N, ...] float32
    rows: StateRows,
    *,
    num_shared: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(out, pool) after the tokens of rows that have one; all else in them is as it was. num_shared: of groups.

    rule is given the tokens of a turn in float32, [1, H] what was [T, N].
    """
    N, K = pool.shape[1], tokens[0].shape[1]
    turns = turns_of_row(pool.shape[1:], K)
    groups = min(turns, K)
    singles = rows.singles or SingleRows.of(rows.counts)
    cut = [_cut(x, groups if i < num_shared else turns) for i, x in enumerate(tokens)]

    def of_token(x: jax.Array) -> pl.BlockSpec:  # [T, turns or groups, H, ...]
        part = x.shape[1]
        return pl.BlockSpec(
            (None, None, *x.shape[2:]),
            lambda r, h, order, slots, offsets, starts: (offsets[order[r]], h * part // turns, 0, 0),
        )

    states = pl.BlockSpec(
        (None, N // turns, *pool.shape[2:]), lambda r, h, order, slots, *_: (slots[order[r]], h, 0, 0)
    )
    begun = _cut(out, turns)
    after, pool = pl.pallas_call(
        functools.partial(_kernel, rule=rule, num_tokens=len(cut)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(singles.count, turns),
            in_specs=[*map(of_token, cut), pl.BlockSpec(memory_space=pltpu.HBM), states],
            out_specs=[of_token(begun), states],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (begun, pool)],
        input_output_aliases={4 + len(cut): 0, 5 + len(cut): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="row_recurrence",
    )(singles.order, rows.slots, rows.offsets, rows.starts, *cut, begun, pool)
    return after.reshape(out.shape), pool


def _cut(x: jax.Array, parts: int) -> jax.Array:
    """[T, N, ...] as [T, parts, N / parts, ...], and [T, N] as [T, parts, 1, N / parts], for blocks have whole last
    axes."""
    return x.reshape(len(x), parts, *((1, -1) if x.ndim == 2 else (-1, x.shape[2])))


def _kernel(order, slots, offsets, starts, *refs, rule: HeadsRule, num_tokens: int):
    """refs: tokens of a turn, what out was, states before; out, states after."""
    tokens, (_, before, out, after) = refs[:num_tokens], refs[num_tokens:]
    begins = starts[order[pl.program_id(0)]] == 0

    def load(n: int) -> jax.Array:
        return jnp.where(begins, 0.0, before[n])

    def keep(n: int, state: jax.Array) -> None:
        after[n] = state

    out[...] = rule(load, keep, *(x[...].astype(jnp.float32) for x in tokens)).astype(out.dtype)
