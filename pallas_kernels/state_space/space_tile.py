"""Mamba2's rule for a tile of one row's tokens on a TPU. The equations are `math`'s; each stage runs over all heads."""

from __future__ import annotations

from pallas_kernels.row_recurrence.heads_tile import HeadsTile, TileDecays


def one_tile(tile: HeadsTile) -> None:
    """L tokens of H heads; a state is [B, A]."""
    H, K, dot = tile.num_heads, tile.num_groups, tile.dot
    reads, writes = ([of(g) for g in range(K)] for of in tile.shared)  # [L, A] each
    decays = TileDecays.of(tile.of_heads[0])
    group, heads = [n * K // H for n in range(H)], range(H)
    pairs = [dot(c, b, (1, 1)) for c, b in zip(reads, writes, strict=True)]  # [L, L]
    values = [tile.value(n) for n in heads]
    before = [dot(reads[group[n]], tile.load(n), (1, 1)) for n in heads]
    for n in heads:
        seen = dot(pairs[group[n]] * decays.between(n), values[n], (1, 0))
        tile.say(n, decays.since[:, n : n + 1] * before[n] + seen)
    for n in heads:
        kept = dot(decays.until[:, n : n + 1] * values[n], writes[group[n]], (0, 0))
        tile.keep(n, tile.load(n) * decays.whole[:, n : n + 1] + kept)
