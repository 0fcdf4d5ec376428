"""From `Loaded` to an engine with empty pools and books. Nothing is compiled."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ferrum_jax.config import EngineConfig, EngineSizes
from ferrum_jax.engine.adapters import HeldSlots, LoadedAdapters
from ferrum_jax.engine.constraints import Constraints
from ferrum_jax.engine.engine import Engine
from ferrum_jax.engine.image_intake import NO_IMAGES, ImageLimits
from ferrum_jax.engine.lockstep import make_engine
from ferrum_jax.engine.submission import Intake
from ferrum_jax.engine.write_guard import WriteGuard
from ferrum_jax.pools.budget import choose_num_host_blocks
from ferrum_jax.pools.pools import pools_of
from ferrum_jax.prefix_cache.cache_manager import CacheManager
from ferrum_jax.processes.processes import current
from ferrum_jax.runtime.host_transfers import HostTransfers
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.scheduling.request_log import RequestLogWriter
from ferrum_jax.scheduling.scheduler import Scheduler
from ferrum_jax.startup.load import Loaded
from ferrum_jax.structured.reading.message_parser import NO_FORMS, MessageForms
from ferrum_jax.text.tokenizer import Tokenizer


def build_engine(
    loaded: Loaded,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    *,
    forms: MessageForms = NO_FORMS,
    adapters: LoadedAdapters | None = None,
    fill: float = 0.0,
) -> Engine:
    """A fresh engine: empty pools (filled with `fill`), empty caches. Nothing is compiled.

    forms: in which the model writes tool calls and reasoning. adapters: those that requests may name.

    config may differ from the layout's in fields that only the host reads, within the compiled limits: fewer
    blocks, fewer rows, a smaller token budget, caching off. Raises ValueError for more rows.
    """
    layout = loaded.layout
    most = layout.num_rows // layout.num_shards
    if config.num_rows > most:
        raise ValueError(
            f"max_num_seqs is {config.num_rows}, and the executables have {most} rows; lower it, or load "
            "the model with it"
        )
    sizes = _sizes(layout, config)
    caches = [
        CacheManager(
            sizes, fingerprint=loaded.cache_fingerprint, kv_dtype=layout.kv_dtype, enabled=config.enable_prefix_caching
        )
        for _ in range(sizes.num_shards)
    ]
    runner = Runner(
        weights=loaded.weights,
        pools=pools_of(layout.pools, loaded.executables.fresh_pools(np.float32(fill))),
        executables=loaded.executables,
        head=layout.head,
        ladder=layout.ladder,
        copies=loaded.copies,
        num_shards=sizes.num_shards,
        host=None if caches[0].tier is None else HostTransfers(loaded.copies),
        images=layout.images,
        names=tuple(layout.targets),
    )
    constraints = Constraints(tokenizer, vocab_size=layout.options.spec.vocab_size, end_ids=loaded.end_ids, forms=forms)
    adapters = adapters or LoadedAdapters(None, no_adapter)
    max_adapters = 0 if layout.adapters is None else min(config.max_adapters, layout.adapters.num_slots)
    engine = make_engine(
        current(),
        runner=runner,
        scheduler=Scheduler(caches),
        intake=Intake(
            tokenizer=tokenizer,
            vocab_size=layout.options.spec.vocab_size,
            end_ids=loaded.end_ids,
            max_model_len=layout.max_model_len,
            max_request_tokens=layout.max_request_tokens,
            seed=config.seed,
            grammar=constraints.grammar,
            adapter=adapters.get,
            images=_image_limits(layout, config),
            num_routed_layers=_num_routed_layers(layout),
        ),
        constraints=constraints,
        adapters=HeldSlots(adapters, max_adapters, runner.write_adapter),
        guard=WriteGuard(caches, runner) if config.check_writes else None,
        request_log=None if config.request_log is None else RequestLogWriter(config.request_log, sizes),
    )
    engine.weights_version = loaded.weights_version
    return engine


def _image_limits(layout: Layout, config: EngineConfig) -> ImageLimits:
    images, rope = layout.images, layout.options.spec.attention.rope
    if images is None:
        return NO_IMAGES
    return ImageLimits(
        max_tokens=images.num_tokens,
        max_patches=images.sizes[-1],
        merge=images.vision.merge,
        grid=images.vision.grid_of_all,
        sees_both_ways=images.vision.sees_both_ways,
        max_whole_tokens=config.max_num_batched_tokens - config.num_rows + 1,
        counts_places=rope is not None and bool(rope.sections),
    )


def _num_routed_layers(layout: Layout) -> int:
    experts = layout.options.spec.experts
    return len(experts.layers) if experts is not None and layout.options.gives_experts else 0


def no_adapter(path: str) -> NoReturn:
    raise ValueError(f"this engine has no adapters, and {path} is one; open it with LLM")


def _sizes(layout: Layout, config: EngineConfig) -> EngineSizes:
    """The sizes of a data shard: what the config asks for, within the layout's limits."""
    ledger, groups = layout.ledger, layout.ledger.groups
    most = config.num_blocks or ledger.num_blocks
    return EngineSizes(
        block_size=ledger.block_size,
        group_blocks=[min(most, group.num_blocks) for group in groups],
        max_num_seqs=config.num_rows,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=layout.max_model_len,
        windows=[group.window for group in layout.options.spec.kv_groups],
        block_bytes=[group.block_bytes for group in groups],
        num_host_blocks=_num_host_blocks(layout, config),
        host_block_bytes=_host_block_bytes(layout),
        max_cached_prompts=min(config.max_cached_prompts, layout.num_prompts - 1),
        min_cached_prompt_tokens=config.min_cached_prompt_tokens,
        max_snapshots=_max_snapshots(layout, config),
        state_bytes=ledger.state_bytes,
        num_shards=ledger.num_shards,
        num_image_runs=0 if layout.images is None else layout.images.num_runs,
        max_image_patches=0 if layout.images is None else layout.images.sizes[-1],
    )


def _num_host_blocks(layout: Layout, config: EngineConfig) -> int:
    return choose_num_host_blocks(
        host_cache_bytes=config.host_cache_bytes if config.enable_prefix_caching else 0,
        block_bytes=layout.ledger.host_block_bytes,
        block_size=layout.ledger.block_size,
        num_shards=layout.ledger.num_shards,
    )


def _host_block_bytes(layout: Layout) -> list[int]:
    """Bytes that one block takes in host memory, for the layers of each cache group."""
    num_layers = [len(group.layers) for group in layout.options.spec.kv_groups]
    return [round(layout.ledger.host_block_bytes * count / sum(num_layers)) for count in num_layers]


def _max_snapshots(layout: Layout, config: EngineConfig) -> int | None:
    """How many snapshots fit beside the null state and the rows' states; None for a model without states."""
    if not layout.ledger.num_states:
        return None
    return min(config.max_state_snapshots, layout.ledger.num_states - 1 - config.num_rows)
