"""An indexer: a small attention that chooses, for each query, which keys a larger one reads."""

import dataclasses

import jax

from pallas_kernels.chosen_keys import Chosen
from pallas_kernels.indexer import xla
from pallas_kernels.kv_pool import KVPool, index_bits
from pallas_kernels.paged_attention.schedule import Schedule
from pallas_kernels.paged_attention.tpu.latent.schedule import LatentSchedule
from pallas_kernels.ragged import static
from pallas_kernels.ragged_batch import RaggedBatch, write_places
from pallas_kernels.shapes import check_counts, check_shapes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerSchedule:
    """The schedule that an indexer needs of a step, for all layers of one cache group."""

    write_blocks: jax.Array  # [T] int32, where each token's key goes; padding tokens go to block 0
    write_offsets: jax.Array  # [T] int32
    reads: Schedule | LatentSchedule | None  # of the keys; None where no row can have more keys than are chosen
    top_k: int = static()
    group: int = static()
    local: int = static()


def make_indexer_schedule(
    batch: RaggedBatch,
    *,
    num_tokens: int,
    block_size: int,
    top_k: int,
    attention: Schedule | LatentSchedule | None,
    group: int = 1,
    local: int = 0,
) -> IndexerSchedule:
    """attention: the schedule of the same step, whose tiles are the indexer's; it has no window.

    None where top_k covers the longest context that the block tables have room for. group: keys that are chosen
    together, of a stretch that begins at a multiple of it. local: groups that are chosen whatever their scores, the
    last of them the query's own. Raises ValueError where these do not fit into top_k.
    """
    check_counts(num_tokens=num_tokens, block_size=block_size, top_k=top_k, group=group)
    if top_k % group or not 0 <= local * group <= top_k:
        raise ValueError(
            f"top_k is {top_k}; it must be a multiple of group, {group}, and have room for local, {local}, groups"
        )
    if attention is None and batch.block_tables.shape[1] * block_size > top_k:
        raise ValueError(f"contexts may be longer than {top_k} keys, and there is no schedule to choose some of them")
    step = None if attention is None else attention.step
    if step is not None and (step.window is not None or not step.causal or batch.seen_ends is not None):
        raise ValueError("an indexer chooses from all keys before a query; there is no window, and nothing beyond it")
    blocks, offsets = write_places(batch, num_tokens=num_tokens, block_size=block_size)
    return IndexerSchedule(
        write_blocks=blocks, write_offsets=offsets, reads=attention, top_k=top_k, group=group, local=local
    )


def choose_keys(
    q: jax.Array,
    weights: jax.Array | None,
    key: jax.Array,
    pool: KVPool,
    schedule: IndexerSchedule,
    *,
    implementation: str = "xla",
) -> tuple[Chosen | None, KVPool]:
    """The positions of the schedule's top_k best scores of each token, over its row's context: sum_j w_j relu(q_j k).

    q: [T, J, I]. weights: [T, J] float32. key: [T, I], of the same tokens, written to the pool's index_keys first.
    weights None: each head chooses for one KV head, by its own q k. In groups, the best score counts for all.
    Scores are float32. A token sees itself and what is before it; of equal scores the earlier position is chosen. None
    where every key is. What no query may see chooses nothing: it may be NaN. implementation: that of the attention
    whose schedule this is; "mosaic_tpu" has rows of one query.
    Raises ValueError for shapes that do not fit and for an unknown implementation.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2, section 2.1).
    """
    num_tokens = len(schedule.write_blocks)
    if pool.index_keys is None:
        raise ValueError("the pool has no keys of an indexer; its index_dim is 0")
    sizes = check_shapes(("T J I", q), ("T I", key), T=num_tokens, I=pool.index_keys.shape[3])
    if weights is not None:
        check_shapes(("T J", weights), T=num_tokens, J=sizes["J"])
    kept = pool.index_keys.at[schedule.write_blocks, schedule.write_offsets, 0].set(
        index_bits(key, pool), mode="promise_in_bounds"
    )
    pool = dataclasses.replace(pool, index_keys=kept)
    if schedule.reads is None:
        return None, pool
    if implementation == "xla":
        assert isinstance(schedule.reads, Schedule), "the schedule was made for another implementation"
        how = {"top_k": schedule.top_k, "group": schedule.group, "local": schedule.local}
        return xla.choose(q, weights, pool, schedule.reads, **how), pool
    if implementation == "mosaic_tpu":
        from pallas_kernels.indexer.tpu import kernel  # half a second that no other platform should pay

        assert isinstance(schedule.reads, LatentSchedule), "the schedule was made for another implementation"
        if weights is None or schedule.group > 1:
            raise ValueError("keys are chosen for each KV head or in groups, which 'mosaic_tpu' does not have")
        return kernel.choose(q, weights, pool, schedule.reads, schedule.top_k), pool
    raise ValueError(f"implementation is {implementation!r}; choose_keys has 'xla' and 'mosaic_tpu'")
