"""Loading: from a source of weights and a layout to weights and executables, and from these to engines.

`ModelSource` is a model that is to be loaded. `Loaded` is all that is slow to make; `build_engine` makes any number of
engines of it and compiles nothing.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx

from checkpoints import Checkpoint, Stretch
from checkpoints.fingerprint import fingerprint
from checkpoints.memory import take
from ferrum_jax.cache.budget import Ledger, choose_num_host_blocks
from ferrum_jax.cache.pools import pools_of
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine import Engine
from ferrum_jax.following import make_engine
from ferrum_jax.models import registry
from ferrum_jax.models.bert import BertSpec
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.compile import Executables, beside, compile_all
from ferrum_jax.runtime.host_transfers import HostTransfers
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.processes import current
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.runtime.store import ExecutableSource
from ferrum_jax.scheduling.cache_manager import CacheManager
from ferrum_jax.scheduling.host_tier import HostTier
from ferrum_jax.scheduling.scheduler import Scheduler
from ferrum_jax.spec import ModelSpec
from ferrum_jax.text.tokenizer import Tokenizer
from ferrum_jax.trace import TraceHeader, TraceWriter
from ferrum_jax.write_guard import WriteGuard


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What a model is and where its weights come from.

    read(targets, stretches): {parameter: array} with exactly the shapes, dtypes and shardings of targets; see
    `checkpoints.Checkpoint.load`. folder: where tokenizer, chat template and the like are; None has none.
    headless: of a decoder's weights without what makes logits. end_ids: tokens that end a text
    beside those that the spec names.
    """

    spec: ModelSpec | BertSpec
    read: Callable[..., dict[str, jax.Array]]
    folder: Path | None = None
    headless: bool = False
    end_ids: frozenset[int] = frozenset()

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> ModelSource:
        """Raises ValueError for a config.json that is not understood."""
        encodes = registry.is_encoder(checkpoint.config)
        weights = registry.weights_of(checkpoint.config, has_head=lambda: checkpoint.has_head)

        def read(
            targets: Mapping[str, jax.ShapeDtypeStruct], stretches: Mapping[str, Stretch] = MappingProxyType({})
        ) -> dict[str, jax.Array]:
            return checkpoint.load(rules=weights.rules, harmless=weights.harmless, targets=targets, stretches=stretches)

        spec = None if encodes else registry.spec_of(checkpoint.config, lambda: checkpoint.has_head)
        return cls(
            spec=spec or registry.encoder_spec_of(checkpoint.config),
            headless=spec is not None and spec != registry.spec_of(checkpoint.config),
            read=read,
            folder=checkpoint.path,
            end_ids=_end_ids(checkpoint.generation_config),
        )

    @classmethod
    def of_model(cls, model: nnx.Module) -> ModelSource:
        """Raises ValueError for a module that is none of our models."""
        spec = getattr(model, "spec", None)
        if not isinstance(spec, ModelSpec | BertSpec):
            raise ValueError(f"the model is a {type(model).__name__}; it must be one of ferrum_jax.models")
        arrays = registry.parameters_of(model)

        def read(
            targets: Mapping[str, jax.ShapeDtypeStruct], stretches: Mapping[str, Stretch] = MappingProxyType({})
        ) -> dict[str, jax.Array]:
            return take(arrays, targets, stretches, cast=True)

        return cls(spec=spec, read=read)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """Everything that is slow to make: weights on the device and executables. Engines are made from it.

    weights_s, executables_s: what each took, one beside the other.
    """

    layout: Layout
    weights: tuple[jax.Array, ...]
    executables: Executables
    copies: BlockCopies
    fingerprint: bytes
    end_ids: frozenset[int]
    weights_s: float = 0.0
    executables_s: float = 0.0

    @property
    def ledger(self) -> Ledger:
        return self.layout.ledger


def load(
    model: ModelSource,
    layout: Layout,
    source: ExecutableSource | None,
    on_progress: Callable[[str, int, int], None],
) -> Loaded:
    """Compiles every bucket while the weights load, and no more of them once the weights have failed."""
    spec = layout.options.spec
    started = time.perf_counter()

    def compile(abandoned: threading.Event) -> tuple[Executables, float]:
        made = compile_all(
            layout,
            source=source,
            on_done=lambda done, total: on_progress("executables", done, total),
            abandoned=abandoned,
        )
        return made, time.perf_counter() - started

    with beside(compile) as compiling:
        tensors = model.read(layout.targets, layout.model.stretches)
        digest = _fingerprint(layout, tensors)
        weights_s = time.perf_counter() - started
        executables, executables_s = compiling.result()
    return Loaded(
        layout=layout,
        weights=tuple(tensors[name] for name in layout.targets),
        executables=executables,
        copies=BlockCopies(layout, source),
        fingerprint=digest,
        end_ids=model.end_ids | frozenset(spec.eos_token_ids),
        weights_s=weights_s,
        executables_s=executables_s,
    )


def with_weights(loaded: Loaded, arrays: Mapping[str, Any]) -> Loaded:
    """The same executables with copies of other weights. Raises one ValueError for all that does not fit."""
    layout = loaded.layout
    tensors = take(arrays, layout.targets, layout.model.stretches)
    weights = tuple(tensors[name] for name in layout.targets)
    return dataclasses.replace(loaded, weights=weights, fingerprint=_fingerprint(layout, tensors))


def _fingerprint(layout: Layout, tensors: Mapping[str, jax.Array]) -> bytes:
    digest = fingerprint(layout.options.spec.digest_text(), layout.dtype.name, tensors, layout.model.stretches)
    return bytes.fromhex(digest)


def build_engine(loaded: Loaded, config: EngineConfig, tokenizer: Tokenizer | None, *, fill: float = 0.0) -> Engine:
    """A fresh engine: empty pools (filled with `fill`), empty caches. Nothing is compiled.

    config may differ from the layout's in what only the host reads, within the compiled limits: fewer blocks,
    a smaller token budget, caching off.
    """
    layout = loaded.layout
    tiers = [_host_tier(loaded, config) for _ in range(layout.ledger.num_shards)]
    caches = [_cache(loaded, config, tier) for tier in tiers]
    runner = Runner(
        weights=loaded.weights,
        pools=pools_of(layout.pools, loaded.executables.fresh_pools(np.float32(fill))),
        executables=loaded.executables,
        ladder=layout.ladder,
        copies=loaded.copies,
        num_shards=layout.ledger.num_shards,
        host=None if tiers[0] is None else HostTransfers(loaded.copies),
    )
    return make_engine(
        current(),
        runner=runner,
        scheduler=Scheduler(
            caches=caches,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=layout.max_model_len,
        ),
        tokenizer=tokenizer,
        vocab_size=layout.options.spec.vocab_size,
        end_ids=loaded.end_ids,
        max_model_len=layout.max_model_len,
        max_request_tokens=layout.max_request_tokens,
        seed=config.seed,
        guard=WriteGuard(caches, runner) if config.check_writes else None,
        trace=None if config.trace is None else TraceWriter(config.trace, _trace_header(caches[0], config, layout)),
    )


def _cache(loaded: Loaded, config: EngineConfig, tier: HostTier | None) -> CacheManager:
    """The empty books of one data shard."""
    layout, groups = loaded.layout, loaded.layout.ledger.groups
    most = config.num_blocks or layout.ledger.num_blocks
    return CacheManager(
        pool_sizes=[1 + min(most, group.num_blocks) for group in groups],
        windows=[group.window for group in layout.options.spec.kv_groups],
        tier=tier,
        block_size=layout.ledger.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=layout.max_model_len,
        fingerprint=loaded.fingerprint,
        kv_dtype=layout.kv_dtype,
        block_bytes=[group.block_bytes for group in groups],
        max_cached_prompts=min(config.max_cached_prompts, layout.num_prompts - 1),
        min_cached_prompt_tokens=config.min_cached_prompt_tokens,
        max_snapshots=_max_snapshots(config, layout),
        state_bytes=layout.ledger.state_bytes,
        enabled=config.enable_prefix_caching,
    )


def _host_tier(loaded: Loaded, config: EngineConfig) -> HostTier | None:
    """The books of a data shard's host tier, if the config asks for one."""
    ledger, groups = loaded.layout.ledger, loaded.layout.options.spec.kv_groups
    num_blocks = choose_num_host_blocks(
        host_cache_bytes=config.host_cache_bytes if config.enable_prefix_caching else 0,
        block_bytes=ledger.host_block_bytes,
        block_size=ledger.block_size,
        num_shards=ledger.num_shards,
    )
    if num_blocks == 0:
        return None
    num_layers = sum(len(group.layers) for group in groups)
    bytes_of_group = [round(ledger.host_block_bytes * len(group.layers) / num_layers) for group in groups]
    return HostTier([num_blocks + 1] * len(groups), bytes_of_group)


def _max_snapshots(config: EngineConfig, layout: Layout) -> int | None:
    """Snapshots of recurrent states beside the null one and those of rows; None of a model that has no states."""
    return layout.ledger.num_states - 1 - config.max_num_seqs if layout.ledger.num_states else None


def _trace_header(cache: CacheManager, config: EngineConfig, layout: Layout) -> TraceHeader:
    return TraceHeader(
        block_size=layout.ledger.block_size,
        block_bytes=[group.block_bytes for group in layout.ledger.groups],
        num_blocks=max(pool.num_ids - 1 for pool in cache.pools),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=layout.max_model_len,
        max_cached_prompts=cache.prompts.max_prompts,
        min_cached_prompt_tokens=config.min_cached_prompt_tokens,
        windows=cache.windows,
        num_host_blocks=cache.tier.pools[0].num_ids - 1 if cache.tier is not None else 0,
        max_snapshots=_max_snapshots(config, layout),
        num_shards=layout.ledger.num_shards,
    )


def _end_ids(generation_config: Mapping[str, Any]) -> frozenset[int]:
    try:
        return frozenset(ConfigReader(generation_config).token_ids("eos_token_id"))
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from error
