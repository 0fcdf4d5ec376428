"""From `Loaded` to an engine with empty pools and books. Nothing is compiled."""

import functools
from typing import NoReturn

import numpy as np

from ferrum_jax.config import EngineConfig
from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.scheduler.drafting import drafting_of
from ferrum_jax.core.scheduler.flex import StepSizes
from ferrum_jax.core.scheduler.request_log import RequestLogWriter
from ferrum_jax.core.scheduler.scheduler import Scheduler
from ferrum_jax.engine.adapters import HeldSlots, LoadedAdapters
from ferrum_jax.engine.constraints import Constraints
from ferrum_jax.engine.engine import Engine
from ferrum_jax.engine.image_intake import NO_IMAGES, ImageLimits
from ferrum_jax.engine.kv_publisher import KVPublisher
from ferrum_jax.engine.lockstep import make_engine
from ferrum_jax.engine.measured_steps import MeasuredSteps
from ferrum_jax.engine.of_tokens.kept_experts import KeptExperts
from ferrum_jax.engine.prefixes.kv_tier import KVTier
from ferrum_jax.engine.prefixes.saved_prefixes import PrefixCache
from ferrum_jax.engine.startup.load import Loaded
from ferrum_jax.engine.submission import InputProcessor
from ferrum_jax.engine.write_guard import WriteGuard
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes
from ferrum_jax.models.spec import SoundSpec
from ferrum_jax.runtime.buckets import Ladder
from ferrum_jax.runtime.dispatched import Spares
from ferrum_jax.runtime.distributed.processes import current
from ferrum_jax.runtime.handed_back import results_of
from ferrum_jax.runtime.host_transfers import HostTransfers
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.pools.pools import pools_of
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.runtime.step_options import expert_dtype
from ferrum_jax.text.structured.reading.message_stream import NO_FORMS, MessageForms
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
    sizes, layout = loaded.layout.sizes(config), loaded.layout
    if sizes.max_num_seqs > layout.max_num_seqs:
        raise ValueError(
            f"max_num_seqs is {sizes.max_num_seqs}, and the executables have {layout.max_num_seqs} rows; lower it, or "
            "load the model with it"
        )
    processes = current()
    publishes = config.kv_events is not None and (processes is None or processes.leads)
    caches = _caches(loaded, config, sizes, has_events=publishes)
    runner = _runner(loaded, fill, has_tier=caches[0].tier is not None)
    constraints = Constraints(tokenizer, vocab_size=layout.spec.vocab_size, end_ids=loaded.end_ids, forms=forms)
    adapters = adapters or LoadedAdapters(None, no_adapter)
    kept_experts = _kept_experts(layout, sizes) if config.enable_prefix_caching else None
    prefixes = PrefixCache(
        spec=layout.options.spec,
        fingerprint=loaded.cache_fingerprint,
        invariant=layout.options.invariant,
        caches=caches,
        runner=runner,
        copies=loaded.copies,
        experts=kept_experts,
    )
    max_adapters = 0 if layout.adapters is None else min(config.max_adapters, layout.adapters.num_slots)
    engine = make_engine(
        processes,
        runner=runner,
        scheduler=Scheduler(caches, drafting_of(sizes), _steps_of(layout.ladder)),
        input_processor=_input_processor(loaded, sizes, config.seed, tokenizer, constraints, adapters, kept_experts),
        constraints=constraints,
        adapters=HeldSlots(adapters, max_adapters, runner.write_adapter),
        step_times=MeasuredSteps(accelerator=layout.target.platform != "cpu") if config.speculative_config else None,
        guard=WriteGuard(caches, runner) if config.check_writes else None,
        request_log=None if config.request_log is None else RequestLogWriter(config.request_log, sizes),
        publisher=KVPublisher(config.kv_events, caches) if config.kv_events and publishes else None,
        prefixes=prefixes,
        tier=_kv_tier(loaded, config, prefixes),
    )
    engine.weights_version = loaded.weights_version
    return engine


def _caches(loaded: Loaded, config: EngineConfig, sizes: EngineSizes, *, has_events: bool) -> list[CacheManager]:
    """The empty books of each data shard."""
    enabled, fingerprint, kv_dtype = config.enable_prefix_caching, loaded.cache_fingerprint, loaded.layout.kv_dtype
    new = functools.partial(CacheManager, fingerprint=fingerprint, kv_dtype=kv_dtype, enabled=enabled)
    return [new(sizes, has_events=has_events) for _ in range(sizes.num_shards)]


def _kv_tier(loaded: Loaded, config: EngineConfig, prefixes: PrefixCache) -> KVTier | None:
    """The KV tier of an engine, whose executables are made here; None of weights that only this process has."""
    if config.kv_tier is None or loaded.weights_version:
        return None
    loaded.copies.warm_up(tier=False)
    compute_s = functools.partial(prefixes.runner.compute_s, a_step=config.max_num_batched_tokens)
    return KVTier(config.kv_tier, config.kv_tier_bytes, prefixes, compute_s)


def _steps_of(ladder: Ladder) -> StepSizes:
    """The sizes of steps without adapters and images, as most others have too."""
    plain = ladder.for_steps(adapted=False, imaged=False)
    decode, mixed = ([b.num_tokens for b in plain if b.decode_only is kind] for kind in (True, False))
    return StepSizes(decode=sorted({*decode}), mixed=sorted({*mixed}))


def _runner(loaded: Loaded, fill: float, *, has_tier: bool) -> Runner:
    layout = loaded.layout
    return Runner(
        weights=loaded.weights,
        pools=pools_of(layout.pools, loaded.executables["fresh_pools"](np.float32(fill))),
        executables=loaded.executables,
        head=layout.head,
        ladder=layout.ladder,
        copies=loaded.copies,
        num_shards=layout.num_shards,
        host=HostTransfers(loaded.copies) if has_tier else None,
        images=layout.images,
        names=tuple(layout.targets),
        draft_layer=layout.draft_layer,
        spares=Spares(
            functools.partial(results_of, pools=layout.pools, options=layout.options, mesh=layout.mesh),
            loaded.copies.transfers,
        ),
    )


def _input_processor(
    loaded: Loaded,
    sizes: EngineSizes,
    seed: int,
    tokenizer: Tokenizer | None,
    constraints: Constraints,
    adapters: LoadedAdapters,
    kept_experts: KeptExperts | None,
) -> InputProcessor:
    layout = loaded.layout
    return InputProcessor(
        tokenizer=tokenizer,
        vocab_size=layout.spec.vocab_size,
        end_ids=loaded.end_ids,
        max_model_len=layout.max_model_len,
        max_request_tokens=layout.max_request_tokens,
        seed=seed,
        grammar=constraints.grammar,
        adapter=adapters.get,
        images=_image_limits(layout, sizes),
        num_routed_layers=len(layout.spec.routed_layers) if layout.options.gives_experts else 0,
        keeps_masks=layout.options.gives_masks,
        kept_experts=kept_experts,
    )


def _kept_experts(layout: Layout, sizes: EngineSizes) -> KeptExperts | None:
    """The book of experts beside the blocks; None if steps give no experts, or all layers have a window."""
    experts = layout.spec.experts
    if experts is None or not layout.options.gives_experts or None not in sizes.windows:
        return None
    width = len(layout.spec.routed_layers) * experts.num_experts_per_tok
    return KeptExperts(sizes, width=width, dtype=expert_dtype(experts.num_experts))


def _image_limits(layout: Layout, sizes: EngineSizes) -> tuple[ImageLimits, ...]:
    """The limits of each tower's items."""
    images, rope = layout.images, layout.spec.attention.rope
    if images is None:
        return (NO_IMAGES,)
    return tuple(
        ImageLimits(
            noun="sound" if isinstance(tower, SoundSpec) else "image",
            max_tokens=images.num_tokens,
            max_patches=max_patches,
            merge=tower.merge,
            chunk=tower.chunk,
            grid=tower.grid_of_all,
            sees_both_ways=tower.sees_both_ways,
            max_whole_tokens=sizes.max_num_batched_tokens - sizes.max_num_seqs + 1,
            counts_places=rope is not None and bool(rope.sections),
            breaks_rows=tower.breaks_rows,
            is_beside=bool(layout.spec.cross_layers),
            ends_anywhere=isinstance(tower, SoundSpec) and not tower.window_chunks,
        )
        for tower, max_patches in zip(layout.spec.towers, images.max_patches_of_each, strict=True)
    )


def no_adapter(path: str) -> NoReturn:
    raise ValueError(f"this engine has no adapters, and {path} is one; open it with LLM")
