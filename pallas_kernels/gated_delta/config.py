"""Tile sizes of the gated delta rule, a pure function of shapes."""

from __future__ import annotations

_MOST = 64
GROUP = 16  # rows of one token that are computed at once


def choose_tile(*, num_tokens: int) -> int:
    """Tokens of a tile: as many as a step has, at most 64, where solving costs as much as reading a state."""
    return min(_MOST, max(2, num_tokens))
