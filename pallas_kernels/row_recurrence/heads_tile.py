"""A tile of tokens as an op's rule reads it on a TPU, with the maths that rules share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

BLOCK = 16  # tokens whose triangular system is inverted; a tile is a multiple of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsTile:
    """A tile of L tokens of one row, and H of its heads. What is not of the tile's tokens is 0, but for q's.

    shared: of a group, [L, A] each. value: of a head, [L, B]. of_heads: [L, H] each. load, keep: of a head, its state
    before and after. say: of a head, its output [L, B]. dot: see
    exact_dot and close_dot, which values of fewer digits than float32 have.
    """

    shared: tuple[Callable[[int], jax.Array], ...]
    value: Callable[[int], jax.Array]
    of_heads: tuple[jax.Array, ...]
    load: Callable[[int], jax.Array]
    keep: Callable[[int, jax.Array], None]
    say: Callable[[int, jax.Array], None]
    dot: Callable[[jax.Array, jax.Array, tuple[int, int]], jax.Array]
    num_groups: int
    num_heads: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileDecays:
    """The decays of H heads, each as a whole. since: [L, H], from the tile's begin to each token; until: to its end;
    whole: [1, H]. sums: [L, H], of log_decay; across: the same as [H, L]."""

    sums: jax.Array
    across: jax.Array
    since: jax.Array
    until: jax.Array
    whole: jax.Array

    @classmethod
    def of(cls, log_decay: jax.Array) -> TileDecays:  # [L, H]
        L = len(log_decay)
        sums = exact_dot(jnp.where(_lower(L), 1.0, 0.0), log_decay, (1, 0))
        last = sums[L - 1 :]
        return cls(sums=sums, across=sums.T, since=jnp.exp(sums), until=jnp.exp(last - sums), whole=jnp.exp(last))

    def between(self, n: int) -> jax.Array:
        """[L, L] of a head: from token j to token i for j <= i, else 0."""
        gaps = self.sums[:, n : n + 1] - self.across[n : n + 1]
        return jnp.exp(jnp.where(_lower(len(self.sums)), gaps, -jnp.inf))


def _lower(size: int) -> jax.Array:
    """Whether i >= j."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return row >= column


def exact_dot(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The product over these axes of float32 numbers x and y, not rounded to what is multiplied fastest."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    highest = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(x, y, dimensions, precision=highest, preferred_element_type=jnp.float32)


def close_dot(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """`exact_dot` within 2⁻¹⁶ of its terms at half the cost: three products of two bfloat16 parts of each number."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))

    def parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        large = x.astype(jnp.bfloat16)
        return large, (x - large.astype(jnp.float32)).astype(jnp.bfloat16)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)

    (x, x_rest), (y, y_rest) = parts(x), parts(y)
    return product(x, y) + (product(x, y_rest) + product(x_rest, y))
