"""A decode step with an indexer on TPUs: the kernel that chooses keys, beside attention to all of them.

Sizes are DeepSeek-V3.2's: 64 heads of 128 in the indexer, which chooses 2,048 keys; latents of 512 + 64. Needs libtpu
(pip install -e '.[aot]') but no TPU: nothing runs, cycles are counted in the schedules that libtpu compiles (see
`tpu_static`), without a search for ties and without waits for HBM.
"""

import functools
from typing import Any

from scripts import tpu_static  # isort: skip  # before jax: it sets environment variables for libtpu

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chosen_keys import TileLimits
from pallas_kernels.indexer import choose_keys, make_indexer_schedule
from pallas_kernels.kv_pool import pool_shape, with_index_keys
from pallas_kernels.paged_attention import LatentConfig, LatentSchedule, RaggedBatch, make_schedule, paged_attention
from pallas_kernels.target import Target
from scripts.tpu_static import StaticResult

HEADS, WIDTH, TOP_K, LATENT, ROPE = 64, 128, 2048, 512, 64
KEY_BYTES, LIMIT_BYTES = 256, 4  # of a token in HBM, padding included
_LEAST_POOL_BYTES = 2**30  # smaller ones XLA would put in vector memory


class Step:
    """A decode step of `rows` rows of one context, on one device of a generation."""

    def __init__(self, generation: str, context: int, *, rows: int, block_size: int, num_heads: int) -> None:
        T, C, max_blocks, self.generation = rows, block_size, context // block_size, generation
        shape, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
        latents = pool_shape(
            num_blocks=max(1 + rows * max_blocks, _LEAST_POOL_BYTES // (C * KEY_BYTES)),
            block_size=C,
            num_kv_heads=1,
            head_dim=LATENT,
            v_head_dim=ROPE,
            is_latent=True,
            dtype=jnp.dtype(bf16),
            implementation="mosaic_tpu",
        )
        self.pool = with_index_keys(latents, WIDTH)
        arrays: Any = {
            "block_tables": 1 + np.arange(rows * max_blocks, dtype=np.int32).reshape(rows, max_blocks),
            "starts": np.full(rows, context - 1, np.int32),
            "counts": np.ones(rows, np.int32),
            "query_offsets": np.arange(rows, dtype=np.int32),
        }
        batch = RaggedBatch(**arrays)
        config = LatentConfig.choose(
            num_rows=rows,
            max_blocks=max_blocks,
            num_heads=num_heads,
            dtype=jnp.dtype(bf16),
            pool=self.pool,
            target=Target.named(f"tpu:{generation}"),
        )
        sizes: Any = {"num_tokens": T, "block_size": C}
        schedule = make_schedule(batch, **sizes, config=config, implementation="mosaic_tpu")
        assert isinstance(schedule, LatentSchedule)
        self.schedule, tile = schedule, config.decode.tile_kv
        self.indexer = make_indexer_schedule(batch, **sizes, top_k=TOP_K, attention=schedule)
        limits: Any = shape((schedule.num_items, tile // 128, 128), jnp.float32)
        self.limits = TileLimits(limits=limits)
        self.of_indexer = [shape((T, HEADS, WIDTH), bf16), shape((T, HEADS), jnp.float32), shape((T, WIDTH), bf16)]
        self.of_attention = [
            shape((T, num_heads, LATENT + ROPE), bf16),
            shape((T, 1, LATENT), bf16),
            shape((T, 1, ROPE), bf16),
        ]

    def choosing(self) -> StaticResult:
        """The indexer's kernel, compiled."""
        fn = functools.partial(choose_keys, implementation="mosaic_tpu")
        return self._measure(fn, [*self.of_indexer, self.pool, self.indexer])

    def attending(self, *, to_chosen: bool) -> StaticResult:
        """The kernel for latents, over all keys or with those hidden that are not chosen."""

        def attend(*arguments: Any) -> Any:
            *others, chosen = arguments
            return paged_attention(*others, scale=0.1, chosen=chosen, implementation="mosaic_tpu")

        arguments = [*self.of_attention, self.pool, self.schedule, self.limits if to_chosen else None]
        return self._measure(attend, arguments)

    def _measure(self, fn: Any, arguments: list[Any]) -> StaticResult:
        return tpu_static.measure(fn, arguments, generation=self.generation, donate=(3,), counts=False)
