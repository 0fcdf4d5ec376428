"""PrefixCacheCalls: what users may ask of the prefix cache of an `LLM`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ferrum_jax.inputs.prompt import Prompt, listed
from ferrum_jax.tasks.task import ONE_TOKEN


class PrefixCacheCalls:
    """The part of `LLM` that computes, keeps, saves and forgets prefixes."""

    def cache_prefix(self: Any, prompt: Prompt, *, pin: bool = False) -> int:
        """Computes a prompt, so that prompts that begin with it hit its full blocks; returns the tokens in these.

        pin: keep them until `unpin_prefixes`, whatever else runs; with recurrent layers also a snapshot of the state
        after them, one of `max_state_snapshots`. Raises ValueError if pinning would leave too little room, and if
        nothing can be kept (`enable_prefix_caching` is False, or with recurrent layers `max_state_snapshots` is 0).
        """
        generate = partial(self.generate, sampling_params=ONE_TOKEN, progress=False)
        return self.model.prefixes.compute(prompt, generate, pin=pin)

    def unpin_prefixes(self: Any) -> None:
        """Removes all pins: those prefixes may be evicted again like any other."""
        self.engine.scheduler.unpin()

    def reset_prefix_cache(self: Any) -> bool:
        """Forgets all cached prefixes, on the device and in host memory, and returns True. Counters are kept.

        Pinned ones go as well: afterwards no prompt hits anything that was computed before, unless a KV tier has it.
        Returns False, with nothing changed, while a request of any call runs or waits.
        """
        return self.engine.reset_prefix_cache()

    def save_prefix_cache(
        self: Any, path: str | os.PathLike[str], prompts: Prompt | Sequence[Prompt] | None = None
    ) -> int:
        """Writes the cached prefixes, of `prompts` or all, to a new folder. Returns the number of blocks.

        Last hidden states of whole prompts and snapshots of recurrent states are written as well. Any process with the
        same model, KV dtype and block size may load the folder; an engine in invariant mode loads only what one in
        invariant mode wrote. Raises ValueError when nothing is cached, or when the folder exists and is not empty.
        """
        return self.model.prefixes.save(Path(path), None if prompts is None else listed(prompts))

    def load_prefix_cache(self: Any, path: str | os.PathLike[str], *, pin: bool = False) -> int:
        """Caches the blocks that `save_prefix_cache` wrote, or the most recently used if not all fit. Returns how many.

        pin: keep them until `unpin_prefixes`, with the folder's states and prompts. Raises ValueError, with nothing
        changed, naming the folder when it is of another model, KV dtype or block size, is damaged, or was written
        without invariant mode and this engine is in it; and if nothing can be kept, as in `cache_prefix`.
        """
        return self.model.prefixes.load(Path(path), pin=pin)

    def learn(self: Any, texts: Iterable[str], *, cache_salt: str = "") -> None:
        """Takes texts like those that requests will bring, from which tokens may be drafted; answers stay the same.

        cache_salt: of the requests that they serve. They are forgotten with the engine, as by `sleep`. Nothing happens
        where tokens are not drafted from the texts of others (see `EngineConfig.speculative_config`). Raises ValueError
        for what is no text.
        """
        self.model.learn(texts, cache_salt)
