"""Runs: tokens side by side in a step and in a block, which one transfer writes. Padding tokens are in none."""

import dataclasses

import jax
import jax.numpy as jnp

GROUP = 32  # blocks whose scales are on their way at once
RUN_WORDS = 5  # int32 numbers of a run, in scalar memory when scales are written; vectors need one fewer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """Runs of neighbouring tokens that go to neighbouring places of a block. Entries from num_runs on are not run."""

    num_runs: jax.Array  # [1] int32
    tokens: jax.Array  # [T] int32, flat index of a run's first token
    blocks: jax.Array  # [T] int32
    offsets: jax.Array  # [T] int32, place of the first token in the block
    lengths: jax.Array  # [T] int32
    slots: jax.Array  # [T] int32, the first run of the same block among the run's group of GROUP, counted in it


def find_runs(block_ids: jax.Array, offsets: jax.Array) -> Runs:
    """The runs of tokens that go to [block_ids[t], offsets[t]], both [T] int32; those of block 0 are left out."""
    T = block_ids.shape[0]
    is_real = block_ids != 0
    goes_on = is_real[1:] & (block_ids[1:] == block_ids[:-1]) & (offsets[1:] == offsets[:-1] + 1)
    no = jnp.zeros(1, bool)
    tokens, ends = (
        jnp.nonzero(is_real & ~other, size=T, fill_value=0)[0].astype(jnp.int32)
        for other in (jnp.concatenate([no, goes_on]), jnp.concatenate([goes_on, no]))
    )
    num_runs = jnp.sum(is_real) - jnp.sum(goes_on)
    blocks = block_ids[tokens]
    grouped = jnp.pad(blocks, (0, -T % GROUP)).reshape(-1, GROUP)
    slots = jnp.argmax(grouped[:, :, None] == grouped[:, None, :], axis=2).reshape(-1)[:T]
    return Runs(
        num_runs=num_runs.astype(jnp.int32).reshape(1),
        tokens=tokens,
        blocks=blocks,
        offsets=offsets[tokens],
        lengths=ends - tokens + 1,
        slots=slots.astype(jnp.int32),
    )
