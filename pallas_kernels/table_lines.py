"""Block tables of the TPU's kernels: whole in HBM, and in scalar memory the pieces that a kernel is at.

A transfer to scalar memory begins at a multiple of a line and is whole lines; so a KV tile, whose blocks stand side by
side in its row's table, needs the lines that they are in.
"""

import math

import jax
import jax.numpy as jnp

LINE = 128  # int32 words: 512 bytes, the grain of a transfer to scalar memory on every generation


def num_lines(blocks: int) -> int:
    """Lines that hold the blocks of a KV tile, which begins at any multiple of `blocks` in its row's table."""
    last_begin = LINE - math.gcd(blocks, LINE)
    return -(-(last_begin + blocks) // LINE)


def row_lines(max_blocks: int) -> int:
    """Lines of a row's table in HBM."""
    return -(-max_blocks // LINE)


def in_lines(block_tables: jax.Array, blocks: int) -> jax.Array:
    """[R, M] int32 as [lines, 128]: each row begins a line, and the lines of each KV tile of a row are there."""
    M = block_tables.shape[1]
    lines = jnp.pad(block_tables, ((0, 0), (0, row_lines(M) * LINE - M))).reshape(-1, LINE)
    return jnp.pad(lines, ((0, num_lines(blocks) - 1), (0, 0)))
