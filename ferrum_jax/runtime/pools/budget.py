"""How many KV blocks fit: the free bytes divided by the bytes of a block."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ferrum_jax.io.ints import ceil_div
from ferrum_jax.runtime.pools.host_free import free_host_bytes, host_bytes

CPU_SHARE = 4  # the KV pool takes at most a quarter of the host's memory
CPU_FREE_SHARE = 2  # and at most half of what is free
CPU_LEAST_BYTES = 1 << 30  # and that much, unless all rows need less
RESERVED_BYTES = 512 << 20  # of an accelerator's memory, for its runtime and the programs themselves


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupBlocks:
    """The pools of one cache group: usable blocks, without the null block, and bytes of one in all of its layers.

    head_copies: devices of "tp" that keep the same KV head, because there are fewer heads than devices.
    """

    num_blocks: int
    block_bytes: int
    head_copies: int = 1

    @property
    def repeated_bytes(self) -> int:
        """Bytes that another device of the mesh keeps as well, the null block included."""
        kept = (self.num_blocks + 1) * self.block_bytes
        return kept - kept // self.head_copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """Where the memory of one device goes, in bytes, and what the pools of all data shards hold.

    num_shards: data shards; numbers of blocks and states are those of one of them.
    num_host_blocks: usable blocks of a shard's host tier, in the host's memory, of host_block_bytes each.
    temporaries_bytes: the most that a step needs beside weights and pools; 0 where the compiler was not asked.
    """

    weights_bytes: int
    slots_bytes: int
    prompts_bytes: int  # hidden states of cached prompts
    groups: tuple[GroupBlocks, ...]
    block_size: int
    num_shards: int = 1
    host_block_bytes: int = 0
    num_host_blocks: int = 0
    state_bytes: int = 0  # of one recurrent state in all layers
    num_states: int = 0  # rows' own and snapshots, with the null one
    temporaries_bytes: int = 0
    masks_bytes: int = 0  # which tokens each row may draw
    adapters_bytes: int = 0  # slots of A and B
    images_bytes: int = 0  # embeddings of images
    hidden_bytes: int = 0  # final hidden states of a step's tokens
    padded_bytes: int = 0  # of kv_bytes, lanes that pad heads to what the kernels read

    @classmethod
    def of_weights(cls, weights_bytes: int) -> Ledger:
        """The ledger of an encoder, which has no pools."""
        return cls(weights_bytes=weights_bytes, slots_bytes=0, prompts_bytes=0, groups=(), block_size=0)

    @property
    def states_bytes(self) -> int:
        return self.num_states * self.state_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks of the largest group; every group without a window has this many."""
        return max((group.num_blocks for group in self.groups), default=0)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def kv_bytes(self) -> int:
        return sum((group.num_blocks + 1) * group.block_bytes for group in self.groups)

    @property
    def repeated_bytes(self) -> int:
        """The part of kv_bytes that another device of the mesh keeps as well."""
        return sum(group.repeated_bytes for group in self.groups)

    @property
    def head_copies(self) -> int:
        """The most devices of "tp" that keep the same KV head, of any group."""
        return max((group.head_copies for group in self.groups), default=1)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier, of all data shards."""
        return self.num_shards * (self.num_host_blocks + 1) * self.host_block_bytes if self.num_host_blocks else 0

    @property
    def used_bytes(self) -> int:
        """Everything on the device, except the runtime's own memory."""
        pools = self.kv_bytes + self.slots_bytes + self.prompts_bytes + self.states_bytes
        pools += self.masks_bytes + self.hidden_bytes + self.adapters_bytes + self.images_bytes
        return self.weights_bytes + pools + self.temporaries_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pools of all data shards hold."""
        return self.num_shards * self.num_blocks * self.block_size


def choose_num_blocks(
    *,
    num_blocks: int | None,
    kv_memory_bytes: int,
    kv_bytes: Callable[[int], int],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """Usable blocks: `num_blocks` if given, else what `kv_memory_bytes` holds, at most what rows of full length need.

    kv_bytes: gives the bytes of that many usable blocks and the null blocks; it never falls. Raises ValueError if not
    even one request of a single block fits.
    """
    if num_blocks is not None:
        return num_blocks
    most = ceil_div(max_model_len, block_size) * max_num_seqs
    fits = bisect.bisect_right(range(1, most + 1), kv_memory_bytes, key=kv_bytes)
    if fits < 1:
        raise ValueError(
            f"kv_memory_bytes is {kv_memory_bytes}; one block of {block_size} tokens takes {kv_bytes(1) // 2} bytes, "
            "and two are the least; raise kv_memory_bytes or lower block_size"
        )
    return fits


def choose_num_host_blocks(*, host_cache_bytes: int, block_bytes: int, block_size: int, num_shards: int = 1) -> int:
    """Usable blocks of a data shard's host tier; 0 where there is none. Raises ValueError if not even one block fits.

    Data shards divide the bytes among themselves.
    """
    if host_cache_bytes == 0:
        return 0
    fits = host_cache_bytes // num_shards // block_bytes - 1  # the null block
    if fits < 1:
        each = f" for each of {num_shards} data shards" if num_shards > 1 else ""
        raise ValueError(
            f"host_cache_bytes is {host_cache_bytes}; one block of {block_size} tokens takes {block_bytes} bytes, "
            f"and two are the least{each}; raise host_cache_bytes, or set it to 0 for none"
        )
    return fits


def cpu_pool_bytes(devices: Sequence[Any], weights_bytes: int, row_bytes: int) -> int:
    """Bytes for the KV pool of each CPU device where the user names none.

    The largest of 1 GiB, the weights' size and one row at max_model_len, row_bytes; at most a quarter of the host's
    memory beside the weights, halved until it is within half of what is free. So starts ask for pools of one size, and
    for the same executables, unless half of the memory comes and goes. Devices of the CPU share the host's memory. For
    an accelerator the compiler must be asked first: see runtime/placing/fit.py.
    """
    most, free = (max(of_host // len(devices) - weights_bytes, 0) for of_host in (host_bytes(), free_host_bytes()))
    most = _coarse(most // CPU_SHARE)
    while most > free // CPU_FREE_SHARE:
        most //= 2
    return min(most, max(CPU_LEAST_BYTES, weights_bytes, row_bytes))


def _coarse(count: int) -> int:
    """The largest number of three significant bits within count.

    A host's memory differs a little with its kernel, and every pool size needs executables of its own.
    """
    shift = max(count.bit_length() - 3, 0)
    return count >> shift << shift
