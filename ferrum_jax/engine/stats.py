"""A runner's counts and its model's memory, as one JSON-ready snapshot."""

from __future__ import annotations

import dataclasses
from typing import Any

from ferrum_jax.runtime.encoder_runner import EncoderRunner
from ferrum_jax.runtime.pools.budget import Ledger
from ferrum_jax.runtime.runner import Runner


def snapshot(runner: Runner | EncoderRunner, ledger: Ledger) -> dict[str, Any]:
    """Counts are of all data shards; bytes of weights and of what is in the pools are those of one device."""
    return {
        "steps": runner.num_steps,
        "computed_tokens": runner.num_tokens,
        "padded_tokens": runner.num_padded_tokens,
        "executables": runner.num_executables,
        "executables_loaded": runner.num_loaded,
        "executables_missing": runner.num_missing,
        "executables_compiled": runner.compiled,
        **dataclasses.asdict(runner.transfers),
        "weights_bytes": ledger.weights_bytes,
        "kv_bytes": ledger.kv_bytes,
        "kv_repeated_bytes": ledger.repeated_bytes,
        "kv_padded_bytes": ledger.padded_bytes,
        "prompts_bytes": ledger.prompts_bytes,
        "host_cache_bytes": ledger.host_bytes,
        "states_bytes": ledger.states_bytes,
        "num_shards": ledger.num_shards,
        "num_blocks": ledger.num_shards * ledger.num_blocks,
        "group_blocks": [ledger.num_shards * group.num_blocks for group in ledger.groups],
    }
