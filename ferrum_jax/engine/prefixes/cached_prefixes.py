"""An engine's cached prefixes as users handle them: compute, pin, save, load and forget."""

import dataclasses
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from ferrum_jax.core.request import Request
from ferrum_jax.engine.engine import Engine
from ferrum_jax.engine.prefixes.saved_prefixes import PrefixCache
from ferrum_jax.engine.shared import SharedEngine
from ferrum_jax.inputs.prompt import MediaSpan, Prompt, take_apart
from ferrum_jax.runtime.distributed.processes import refuse_several_processes
from ferrum_jax.text.prompts import PromptEncoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedPrefixes:
    """The cached prefixes of one engine; `LLM` says what its methods do."""

    calls: SharedEngine
    engine: Engine
    prompts: PromptEncoder

    def compute(self, prompt: Prompt, generate: Callable[[Prompt], object], *, pin: bool) -> int:
        """The tokens of the prompt's full blocks, which are cached then. generate: computes a prompt."""
        if pin:
            refuse_several_processes("pin=True")
        self.engine.scheduler.refuse_without_cache()
        parts = take_apart(prompt)
        if parts.seen:
            raise ValueError(
                f"the prefix has {parts.seen}; generate one token of it, and prompts that begin with it hit its blocks"
            )
        ids = self.prompts.token_ids(prompt)  # once: a chat template may see another time of day later
        generate({"prompt_token_ids": ids, "cache_salt": parts.cache_salt or None, "media": parts.media})
        if pin:
            self.engine.scheduler.pin_prefix(prompt_request(ids, cache_salt=parts.cache_salt, media=parts.media))
        block_size = self.engine.scheduler.caches[0].sizes.block_size
        return len(ids) // block_size * block_size

    def save(self, path: Path, prompts: Sequence[Prompt] | None) -> int:
        """How many blocks were written to a new folder, of `prompts` or all."""
        keys = None if prompts is None else [key for prompt in prompts for key in self._keys(prompt)]
        return self._cache().save(path, keys)

    def load(self, path: Path, *, pin: bool) -> int:
        """How many blocks of a folder are cached then."""
        self.engine.scheduler.refuse_without_cache()
        cache = self._cache()
        arrays = cache.read(path)
        keys = self.calls.whole(lambda: cache.put(arrays))
        if pin:
            self.engine.scheduler.pin(cache.keys(arrays))
        return len(keys)

    def _keys(self, prompt: Prompt) -> list[bytes]:
        parts = take_apart(prompt)
        encoded = self.prompts.encoded(prompt)
        request = prompt_request(encoded.token_ids, cache_salt=parts.cache_salt, media=encoded.media)
        cache = self.engine.scheduler.caches[0]  # keys are the same on all shards
        return [*cache.keys_of(request), cache.key_of_whole(request)]

    def _cache(self) -> PrefixCache:
        refuse_several_processes("a saved prefix cache")
        self.engine.prefixes.copies.warm_up(tier=False)
        if self.engine.kept_experts is not None:
            self.calls.quiet("keep")  # those of the step in flight are not on the host yet
        return self.engine.prefixes


def prompt_request(
    prompt_token_ids: Sequence[int], *, cache_salt: str = "", media: Sequence[MediaSpan] = ()
) -> Request:
    """A prompt that is looked for and does not run."""
    return Request(
        id=0,
        token_ids=array("i", prompt_token_ids),
        num_prompt_tokens=len(prompt_token_ids),
        max_total_tokens=len(prompt_token_ids) + 1,
        cache_salt=cache_salt.encode(),
        media=tuple(media),
    )
