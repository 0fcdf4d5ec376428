"""KeptExperts: the experts of the tokens whose KV the blocks hold, in host memory and under the same ids.

It follows the plans in the order of their commits and does with experts what each step did with KV: it moves what the
plan moves, and puts a token's experts where the plan puts its KV. So a hit finds the experts of the tokens that it
stands for wherever it finds their KV, whatever was evicted, copied, preempted or renewed in between.

The blocks are those of a cache group without a window. What a window has left behind is hit without being there, so
a model whose layers all have windows keeps nothing, and its requests that want experts take no hits.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ferrum_jax.core.plan import Copy, ShardPlan, StepPlan
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes
from ferrum_jax.io.ints import ceil_div


class KeptExperts:
    """The experts beside the blocks of each data shard, and beside those that its host tier holds."""

    def __init__(self, sizes: EngineSizes, *, width: int, dtype: np.dtype) -> None:
        """width: experts of a token, of all layers. Pages take memory when they are first written."""
        self.group = sizes.windows.index(None)
        self._block_size, self._width = sizes.block_size, width
        num_blocks = (sizes.group_blocks[self.group] + 1, sizes.num_host_blocks + 1 if sizes.num_host_blocks else 0)
        self._blocks, self._in_host = (
            [np.zeros((count, sizes.block_size, width), dtype) for _ in range(sizes.num_shards)] for count in num_blocks
        )

    @property
    def bytes(self) -> int:
        """Bytes of all, as if every page was written."""
        return sum(array.nbytes for array in (*self._blocks, *self._in_host))

    def follow(
        self, plan: StepPlan, found: np.ndarray, wanted: Collection[tuple[int, int]]
    ) -> Mapping[tuple[int, int], np.ndarray]:
        """Does what a step did, and gives the experts of the tokens before it.

        found: [tokens, width] of the step, of all shards in order. wanted: shards and indices of rows. Gives of each
        [start, width], those of its tokens before the first that the step computed.
        """
        ends = np.cumsum([shard.num_tokens for shard in plan.shards])
        before: dict[tuple[int, int], np.ndarray] = {}
        for index, (shard, own) in enumerate(zip(plan.shards, np.split(found, ends[:-1]), strict=True)):
            self.move(index, shard.spills, shard.loads)
            self._copy(index, shard.copies_before)
            before |= {(at, row): self._before(index, shard, row) for at, row in wanted if at == index}
            self._put(index, shard, own)
            self._copy(index, shard.copies_after)
        return before

    def move(self, shard: int, spills: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """Copies blocks of a shard to its host tier, and then host blocks back."""
        sources, targets = self._ids(spills)
        self._in_host[shard][targets] = self._blocks[shard][sources]
        sources, targets = self._ids(loads)
        self._blocks[shard][targets] = self._in_host[shard][sources]

    def read(self, shard: int, ids: Sequence[int], *, in_host: bool) -> np.ndarray:
        """[n, C, width] of n blocks."""
        return (self._in_host if in_host else self._blocks)[shard][list(ids)]

    def write(self, shard: int, ids: Sequence[int], experts: np.ndarray) -> None:
        """Puts [n, C, width] beside n blocks."""
        self._blocks[shard][list(ids)] = experts

    def _ids(self, copies: Sequence[Copy]) -> tuple[list[int], list[int]]:
        """Sources and targets of the group's copies."""
        own = [copy for copy in copies if copy.pool == self.group]
        return [copy.source for copy in own], [copy.target for copy in own]

    def _copy(self, shard: int, copies: Sequence[Copy]) -> None:
        sources, targets = self._ids(copies)
        self._blocks[shard][targets] = self._blocks[shard][sources]

    def _before(self, index: int, shard: ShardPlan, row: int) -> np.ndarray:
        start = int(shard.starts[row])
        ids = shard.block_tables[self.group][row, : ceil_div(start, self._block_size)]
        return self._blocks[index][ids].reshape(-1, self._width)[:start]

    def _put(self, index: int, shard: ShardPlan, found: np.ndarray) -> None:
        rows = np.repeat(np.arange(shard.num_rows), shard.counts)
        in_row = np.arange(len(rows)) - (np.cumsum(shard.counts) - shard.counts)[rows]
        positions = shard.starts[rows] + in_row
        ids = shard.block_tables[self.group][rows, positions // self._block_size]
        self._blocks[index][ids, positions % self._block_size] = found
