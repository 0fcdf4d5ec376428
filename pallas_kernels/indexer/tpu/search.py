"""Finding the largest scores of several rows in vector memory, by counting: arithmetic alone.

Scores are int32 that are ordered like the floats they stand for, LOWEST where the query sees nothing. The k-th largest
is found two bits at a time, from the highest: the scores that reach each of three thresholds are counted. A sum over a
vector takes a hundred cycles until it is a scalar, so rows take each step of the search together.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.chosen_keys import HIDDEN

LOWEST = -(2**31)  # no float has it
GROUP = 8  # tiles that are counted at once
_NOWHERE = 2**31 - 1  # behind every position
Test = Callable[[jax.Array, jax.Array], jax.Array]  # of scores and their positions


def ordered(scores: jax.Array) -> jax.Array:
    """Integers above LOWEST that are ordered like these float32. Both zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    return jnp.where(bits < 0, bits ^ (2**31 - 1), bits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredRow:
    """The scores of one row. groups: of GROUP tiles, in the order of positions; what is not the row's is LOWEST."""

    scores: Any  # [tiles, X / 128, 128] int32
    groups: Any

    def limit(self, least: Any, end: Any) -> None:
        """Puts in place of scores the bits of what they may be at most: infinity if chosen, else HIDDEN.

        Chosen are those above `least`, and those equal to it before position `end`.
        """
        shown, hidden = (jax.lax.bitcast_convert_type(jnp.float32(x), jnp.int32) for x in (jnp.inf, HIDDEN))

        @pl.loop(0, self.groups)
        def _(j: Any) -> None:
            part, positions = self._group(j)
            is_chosen = (part > least) | ((part == least) & (positions < end) & (part > LOWEST))
            self.scores[pl.ds(j * GROUP, GROUP)] = jnp.where(is_chosen, shown, hidden)

    def count(self, tests: Sequence[Test]) -> list[jax.Array]:  # [X / 128, 128] float32
        """How many scores pass each test, not yet summed over the last axes."""

        def one(j: Any, counts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            group = self._group(j)
            return tuple(
                count + _sum_of_tiles(jnp.where(test(*group), 1.0, 0.0))
                for count, test in zip(counts, tests, strict=True)
            )

        none = (jnp.zeros(self.scores.shape[1:], jnp.float32),) * len(tests)
        return list(jax.lax.fori_loop(0, self.groups, one, none))

    def _group(self, j: Any) -> tuple[jax.Array, jax.Array]:
        """Scores of a group's tiles, and their positions."""
        _, sublanes, lanes = self.scores.shape
        shape = (GROUP, sublanes, lanes)
        tile, sublane, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
        positions = ((j * GROUP + tile) * sublanes + sublane) * lanes + lane
        return self.scores[pl.ds(j * GROUP, GROUP)], positions


def limit_to_best(row_of: Callable[[Any], ScoredRow], num_rows: int, top_k: int) -> None:
    """Puts limits in place of the scores of rows 0 .. num_rows - 1: of equal scores the earlier are chosen."""
    least = _kth_largest([row_of(i) for i in range(num_rows)], top_k)

    @pl.loop(0, num_rows)
    def _(i: Any) -> None:
        row, own = row_of(i), least[0]
        for j in range(1, num_rows):
            own = jnp.where(i == j, least[j], own)
        ((reaching,),) = _sums([row.count([lambda part, _: part >= own])])
        row.limit(own, _end_of_ties(row, own, (reaching > top_k) & (own > LOWEST), top_k))


def _kth_largest(rows: Sequence[ScoredRow], top_k: int) -> list[Any]:
    """Finds it in each row; where that has fewer scores, LOWEST."""

    def two_bits(i: Any, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """found: of unsigned integers that are ordered like the scores."""
        steps = [[own | jnp.left_shift(jnp.int32(step), 30 - 2 * i) for step in (1, 2, 3)] for own in found]
        reaching = _sums(
            row.count([lambda part, _, least=step ^ LOWEST: part >= least for step in own])
            for row, own in zip(rows, steps, strict=True)
        )
        for step in range(3):
            found = tuple(
                jnp.where(counts[step] >= top_k, own[step], least)
                for counts, own, least in zip(reaching, steps, found, strict=True)
            )
        return found

    return [own ^ LOWEST for own in jax.lax.fori_loop(0, 16, two_bits, (jnp.int32(0),) * len(rows))]


def _end_of_ties(row: ScoredRow, least: Any, has_ties: Any, top_k: int) -> Any:
    """Gives the position before which scores that equal the k-th largest, `least`, are chosen."""
    num_bits = (row.scores.shape[0] * row.scores.shape[1] * row.scores.shape[2]).bit_length()

    def one_bit(i: Any, found: Any) -> Any:  # the last position before which there are too few
        later = found | jnp.left_shift(jnp.int32(1), num_bits - 1 - i)
        ((chosen,),) = _sums([row.count([lambda part, at: (part > least) | ((part == least) & (at < later))])])
        return jnp.where(chosen < top_k, later, found)

    last = jax.lax.fori_loop(0, jnp.where(has_ties, num_bits, 0), one_bit, jnp.int32(0))
    return jnp.where(has_ties, last + 1, _NOWHERE)


def _sum_of_tiles(tiles: jax.Array) -> jax.Array:
    """Summed over the first axis in pairs, not one after the other."""
    while len(tiles) > 1:
        tiles = tiles[: len(tiles) // 2] + tiles[len(tiles) // 2 :]
    return tiles[0]


def _sums(counts: Any) -> list[list[Any]]:
    """The rows' counts as scalars. All are begun before one is asked for."""
    counted = [list(of_row) for of_row in counts]
    return [[jnp.sum(count) for count in of_row] for of_row in counted]
