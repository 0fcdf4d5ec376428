"""Integers that several modules need: numbers that are whole, division, and sliding windows in blocks.

A window is how many positions a token attends to, its own the last; None is all.
"""

import numbers
from typing import Any

CACHE_SHARE = 1  # blocks for cached prefixes in a window's pool, relative to those that rows need


def as_plain(value: Any) -> Any:
    """A number of numpy, say, as one of Python; anything else as it is."""
    if type(value) in (int, float, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def as_whole(value: Any) -> Any:
    """The int that a number is, 2.0 as columns with gaps and JSON have it; anything else as it is."""
    value = as_plain(value)
    return int(value) if type(value) is float and value.is_integer() else value


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not less than a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b not less than a."""
    return -(-a // b) * b


def first_needed(window: int | None, position: int, block_size: int) -> int:
    """The first block that a query at `position`, or one after it, attends to."""
    return 0 if window is None else max(position - window + 1, 0) // block_size


def most_held(window: int, num_tokens: int, block_size: int) -> int:
    """The most blocks that a row holds which computes up to `num_tokens` in a step.

    They are the window's and the step's, one that is partly behind, one that is being filled, and one that is left
    behind only when the step in flight is committed.
    """
    return ceil_div(window + num_tokens, block_size) + 3


def pool_blocks(
    window: int | None,
    num_blocks: int,
    *,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    keeps_cache: bool,
) -> int:
    """Usable blocks of a group's pool, where pools of groups without a window have `num_blocks`.

    A window's pool needs no more than all rows can hold at once, and a share for prefixes that are kept.
    """
    if window is None:
        return num_blocks
    held = max_num_seqs * most_held(window, block_size, block_size) + ceil_div(max_num_batched_tokens, block_size)
    return min(num_blocks, held * (1 + CACHE_SHARE if keeps_cache else 1))
