"""Tile size of the experts' matrix products, a pure function of shapes."""

from __future__ import annotations

from pallas_kernels.shapes import check_counts

_FEWEST = 8
_MOST = 64


def choose_tile(*, num_tokens: int, num_experts_per_token: int, num_experts: int) -> int:
    """Rows of a tile of one expert: about the tokens that an expert gets when all get the same.

    1 where an expert gets two or fewer: one row needs no copy of an expert's weights (XLA:CPU), more rows do.
    """
    check_counts(num_tokens=num_tokens, num_experts_per_token=num_experts_per_token, num_experts=num_experts)
    pairs = num_tokens * num_experts_per_token
    if pairs <= 2 * num_experts:
        return 1
    share = -(-pairs // num_experts)
    return min(pairs, _MOST, max(_FEWEST, 1 << (share - 1).bit_length()))
