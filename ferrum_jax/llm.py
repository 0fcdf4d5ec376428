"""LLM: a checkpoint, ready to answer. The Python API.

Opening one reads the checkpoint's description, plans memory and buckets from shapes alone, compiles in
threads while weights load, and is ready when both are done. One LLM serves one thread; calls of that
thread may overlap (a stream read while another runs): each has an inbox, and whoever steps fills them all.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from checkpoints import Checkpoint, open_checkpoint
from checkpoints.fingerprint import fingerprint
from ferrum_jax.cache.budget import choose_num_host_blocks
from ferrum_jax.cache.host_memory import HostMemory
from ferrum_jax.cache.pools import make_pools
from ferrum_jax.config import EngineConfig, MeshShape
from ferrum_jax.engine import Engine
from ferrum_jax.models import registry
from ferrum_jax.prefix_cache import PrefixCache
from ferrum_jax.progress import progress_bar
from ferrum_jax.prompt import Content, Message, Prompt, single, take_apart
from ferrum_jax.request import RequestOutput, SamplingParams
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.compile import CompileCounter, Executables, compile_all
from ferrum_jax.runtime.layout import Layout, lay_out
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.runtime.store import ExecutableStore
from ferrum_jax.scheduling.cache_manager import CacheManager
from ferrum_jax.scheduling.host_tier import HostTier
from ferrum_jax.scheduling.scheduler import Scheduler
from ferrum_jax.sharding import make_mesh
from ferrum_jax.spec import ModelSpec
from ferrum_jax.text.chat import ChatTemplate
from ferrum_jax.text.tokenizer import Tokenizer, require_tokenizer
from ferrum_jax.trace import TraceHeader, TraceWriter

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")

MOST_WAITING = 2  # as_completed holds so many times max_num_seqs requests, so that a million stay where they are


class LLM:
    """A model that generates.

    model: a Hugging Face folder, or an Orbax checkpoint that `ferrum-jax convert` wrote.
    config: see EngineConfig. tokenizer: a folder or tokenizer.json to use instead of the checkpoint's own.
    on_progress: called with (what, done, total) while it starts.

    Raises ValueError, before weights are read, for what cannot run here: all reasons at once.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig | None = None,
        *,
        tokenizer: str | None = None,
        on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        started = time.perf_counter()
        config = config or EngineConfig()
        mesh = make_mesh(MeshShape.parse(config.mesh), jax.devices())
        folder = config.compilation_cache_dir
        store = None if folder is None else ExecutableStore(folder, mesh.devices.flatten().tolist())
        checkpoint = open_checkpoint(model)
        spec = registry.spec_of(checkpoint.config)
        layout = lay_out(spec, config, mesh)
        self.spec, self.config, self.ledger = spec, config, layout.ledger
        self.max_model_len = layout.max_model_len
        self.tokenizer = Tokenizer.load(checkpoint.path)
        if tokenizer is not None:
            self.tokenizer = require_tokenizer(Tokenizer.load(tokenizer), tokenizer)
        self._chat = ChatTemplate.load(tokenizer or checkpoint.path)
        self._counter = CompileCounter()
        self.loaded = load(checkpoint, layout, store, on_progress)
        if layout.ledger.num_host_blocks:
            self.loaded.copies.warm_up()
        self._engine: Engine | None = build_engine(self.loaded, config, self.tokenizer)
        self._inboxes: dict[int, deque[RequestOutput]] = {}  # by unfinished submission
        self._compiles_at_start = self._counter.count
        self.startup_s = time.perf_counter() - started

    @property
    def engine(self) -> Engine:
        """The engine; a fresh one with empty caches after one was broken off in the middle of a step."""
        if self._engine is None:
            self._engine = build_engine(self.loaded, self.config, self.tokenizer)
        return self._engine

    # -- generation ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """The completion of each prompt, in their order.

        prompts: one or many; see `ferrum_jax.prompt`. sampling_params: one for all, or one each.
        priority: one for each prompt; lower runs first, equal ones in order. None is 0 for all.
        progress: a bar on the terminal; None shows one only where there is a terminal.
        Raises ValueError naming the prompt that cannot be served; nothing has run then.
        """
        many: list[Any] = [prompts] if single(prompts) else list(prompts)
        params = self._params_for(many, sampling_params)
        priorities = _priorities_for(many, priority)
        inbox: deque[RequestOutput] = deque()
        outputs: dict[int, RequestOutput] = {}
        try:
            ids = self._add_all(many, params, priorities, inbox)
            with progress_bar(len(many), shown=progress) as advance:
                while len(outputs) < len(ids):
                    output = self._receive(inbox)
                    outputs[output.request_id] = output
                    advance(output)
        finally:
            self._end(inbox)
        return [outputs[i] for i in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """The answer to each conversation, through the checkpoint's own chat template."""
        conversations: Sequence[Any] = [messages] if single(messages) else messages
        texts = [self.render_chat(c, **template_arguments) for c in conversations]
        prompts = [self._encode(text, add_special_tokens=False) for text in texts]
        return self.generate(prompts, sampling_params, progress=progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The output of one prompt as it grows: each item holds all text so far; the last one is finished."""
        inbox: deque[RequestOutput] = deque()
        try:
            self._add(prompt, sampling_params or SamplingParams(), inbox, streams=True)
            finished = False
            while not finished:
                output = self._receive(inbox)
                finished = output.finished
                yield output
        finally:
            self._end(inbox)

    def as_completed(
        self, requests: Iterable[tuple[Key, Prompt, SamplingParams]]
    ) -> Generator[tuple[Key, RequestOutput | ValueError], None, None]:
        """(key, output) of each request in the order in which they finish; a refused one gives its ValueError.

        `requests` is read as there is room, so it may be endless. The key also seeds what has no seed.
        """
        source = iter(requests)
        inbox: deque[RequestOutput] = deque()
        keys: dict[int, Key] = {}
        exhausted = False
        try:
            while not exhausted or keys:
                while not exhausted and len(keys) < MOST_WAITING * self.config.max_num_seqs:
                    item = next(source, None)
                    if item is None:
                        exhausted = True
                        break
                    key, prompt, params = item
                    try:
                        keys[self._add(prompt, params, inbox, key=str(key))] = key
                    except ValueError as error:
                        yield key, error
                if keys:
                    output = self._receive(inbox)
                    yield keys.pop(output.request_id), output
        finally:
            self._end(inbox)

    def render_chat(self, messages: Sequence[Message], **arguments: Any) -> str:
        """The text that the checkpoint's chat template makes of messages."""
        if self._chat is None:
            raise ValueError("the checkpoint has no chat template; give a plain prompt, or LLM(tokenizer=...) with one")
        return self._chat.render(messages, **arguments)

    # -- cached prefixes -------------------------------------------------------------------------------

    def cache_prefix(self, prompt: Prompt, *, pin: bool = False) -> int:
        """Computes a prompt, so that prompts that begin with it hit its full blocks; how many tokens these are.

        pin: they stay until `unpin_prefixes`, whatever else runs. Raises ValueError if too little would be left.
        """
        self.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0), progress=False)
        keys = self._prompt_keys(prompt)
        if pin:
            self.engine.scheduler.pin(keys)
        return len(keys) * self.ledger.block_size

    def unpin_prefixes(self) -> None:
        """Pinned prefixes are cached like all others again."""
        self.engine.scheduler.unpin()

    def save_prefix_cache(self, path: str | os.PathLike[str], prompts: Prompt | Sequence[Prompt] | None = None) -> int:
        """Writes cached blocks to a new folder, those of `prompts` or all; how many that were.

        Any process may load them that runs the same model with the same KV dtype and block size. Raises ValueError
        when nothing is cached, or when the folder is there and not empty.
        """
        keys = None
        if prompts is not None:
            many: list[Any] = [prompts] if single(prompts) else list(prompts)
            keys = [key for prompt in many for key in self._prompt_keys(prompt)]
        return self._prefix_cache().save(Path(path), keys)

    def load_prefix_cache(self, path: str | os.PathLike[str], *, pin: bool = False) -> int:
        """Caches the blocks that `save_prefix_cache` wrote, the most recently used ones where not all fit; how many.

        pin: they stay until `unpin_prefixes`. Raises ValueError naming the folder when it is of another model, KV
        dtype or block size, or damaged; nothing has changed then.
        """
        prefixes = self._prefix_cache()
        arrays = prefixes.read(Path(path))
        keys = self._whole(lambda: prefixes.put(arrays))
        if pin:
            self.engine.scheduler.pin(keys)
        return len(keys)

    def _prompt_keys(self, prompt: Prompt) -> list[bytes]:
        parts = take_apart(prompt)
        return self.engine.prompt_keys(self._token_ids(parts.content), cache_salt=parts.cache_salt, media=parts.media)

    def _prefix_cache(self) -> PrefixCache:
        compiles = self._counter.count
        self.loaded.copies.warm_up()
        self._compiles_at_start += self._counter.count - compiles  # it is no step that compiles here
        return PrefixCache(
            spec=self.spec,
            fingerprint=self.loaded.fingerprint,
            cache=self.engine.scheduler.cache,
            runner=self.engine.runner,
        )

    def stats(self) -> dict[str, Any]:
        """One JSON-ready snapshot: prefix cache, steps, padding, compiles, memory."""
        runner = self.engine.runner
        return {
            **self.engine.scheduler.metrics().snapshot(),
            "steps": runner.num_steps,
            "computed_tokens": runner.num_tokens,
            "padded_tokens": runner.num_padded_tokens,
            "executables": runner.num_executables,
            "compiles_after_ready": self._counter.count - self._compiles_at_start,
            "weights_bytes": self.ledger.weights_bytes,
            "kv_bytes": self.ledger.kv_bytes,
            "kv_repeated_bytes": self.ledger.repeated_bytes,
            "prompts_bytes": self.ledger.prompts_bytes,
            "host_cache_bytes": self.ledger.host_bytes,
            "states_bytes": self.ledger.states_bytes,
            "num_blocks": self.ledger.num_blocks,
            "startup_s": self.startup_s,
        }

    # -- inside --------------------------------------------------------------------------------------

    def _add_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        inbox: deque[RequestOutput],
    ) -> list[int]:
        ids: list[int] = []
        for index, (prompt, sampling, priority) in enumerate(zip(prompts, params, priorities, strict=True)):
            try:
                ids.append(self._add(prompt, sampling, inbox, key=str(index), priority=priority))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return ids

    def _add(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        inbox: deque[RequestOutput],
        *,
        key: str = "",
        priority: int = 0,
        streams: bool = False,
    ) -> int:
        """Queues a prompt whose outputs go to `inbox`; the submission's id."""
        parts = take_apart(prompt)
        text = parts.content if isinstance(parts.content, str) else None
        token_ids = self._token_ids(parts.content)
        try:
            submission = self.engine.add(
                token_ids,
                sampling,
                prompt=text,
                key=key,
                priority=priority,
                streams=streams,
                cache_salt=parts.cache_salt,
                media=parts.media,
            )
        except ValueError:  # refused, with nothing left behind
            raise
        except BaseException:
            self._discard_engine()
            raise
        self._inboxes[submission] = inbox
        return submission

    def _receive(self, inbox: deque[RequestOutput]) -> RequestOutput:
        """The next output for `inbox`; steps until there is one."""
        while not inbox:
            if not self.engine.has_unfinished:
                raise RuntimeError("the engine was broken off in another call; ask again")
            for output in self._whole(self.engine.step):
                get = self._inboxes.pop if output.finished else self._inboxes.__getitem__
                get(output.request_id).append(output)
        return inbox.popleft()

    def _end(self, inbox: deque[RequestOutput]) -> None:
        """Ends what is unfinished of an inbox; waits for the device if nothing else runs."""
        for submission in [i for i, box in self._inboxes.items() if box is inbox]:
            del self._inboxes[submission]
            self.engine.abort(submission)
        if self._engine is not None and not self._engine.has_unfinished:
            self._whole(self._engine.drain)

    def _whole(self, call: Callable[[], T]) -> T:
        """The result of a call into the engine. One that is broken off (Ctrl-C, an error) ends everything that runs."""
        try:
            return call()
        except BaseException:
            self._discard_engine()
            raise

    def _discard_engine(self) -> None:
        """Drops the engine: its books may differ from the device, its pools may be donated and not returned."""
        self.engine.close()
        self._engine = None
        self._inboxes.clear()

    def _token_ids(self, prompt: Content) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._encode(prompt, add_special_tokens=True)
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence | np.ndarray):
            raise ValueError(f"the prompt is {prompt!r}; it must be a string, a list of token ids, or chat messages")
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self._encode(self.render_chat(prompt), add_special_tokens=False)  # type: ignore[arg-type]
        return prompt  # type: ignore[return-value]

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer; give token ids, or LLM(tokenizer=...)")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _params_for(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts; give one, or one for each")
        return params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """Everything that is slow to make: weights on the device and executables. Engines are made from it."""

    layout: Layout
    weights: tuple[jax.Array, ...]
    executables: Executables
    copies: BlockCopies
    fingerprint: bytes
    end_ids: frozenset[int]


def load(
    checkpoint: Checkpoint,
    layout: Layout,
    store: ExecutableStore | None,
    on_progress: Callable[[str, int, int], None],
) -> Loaded:
    """Compiles every bucket while the weights load."""
    spec = layout.options.spec
    family = registry.family_of(spec.architecture)
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        compiling = thread.submit(
            compile_all,
            layout,
            store=store,
            on_done=lambda done, total: on_progress("executables", done, total),
        )
        tensors = checkpoint.load(
            rules=family.weight_rules(spec),
            harmless=family.harmless(spec),
            targets=layout.targets,
            stretches=layout.model.stretches,
        )
        digest = fingerprint(spec.digest_text(), layout.dtype.name, tensors, layout.model.stretches)
        executables = compiling.result()
    return Loaded(
        layout=layout,
        weights=tuple(tensors[name] for name in layout.targets),
        executables=executables,
        copies=BlockCopies(layout, store),
        fingerprint=bytes.fromhex(digest),
        end_ids=_end_ids(spec, checkpoint.generation_config),
    )


def build_engine(loaded: Loaded, config: EngineConfig, tokenizer: Tokenizer | None, *, fill: float = 0.0) -> Engine:
    """A fresh engine: empty pools (filled with `fill`), empty caches. Nothing is compiled.

    config may differ from the layout's in what only the host reads, within the compiled limits: fewer blocks,
    a smaller token budget, caching off.
    """
    layout = loaded.layout
    spec = layout.options.spec
    groups = spec.kv_groups
    num_layers = sum(len(group.layers) for group in groups)
    shares = [len(group.layers) / num_layers for group in groups]
    tier, host = _host_tier(loaded, config, shares)
    cache = CacheManager(
        pool_sizes=[(config.num_blocks or layout.ledger.num_blocks) + 1] * len(groups),
        windows=[group.window for group in groups],
        tier=tier,
        block_size=layout.ledger.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=layout.max_model_len,
        fingerprint=loaded.fingerprint,
        kv_dtype=layout.kv_dtype,
        block_bytes=[round(layout.ledger.block_bytes * share) for share in shares],
        max_cached_prompts=min(config.max_cached_prompts, layout.pools.prompts.shape[0] - 1),
        min_cached_prompt_tokens=config.min_cached_prompt_tokens,
        max_snapshots=_max_snapshots(config, layout),
        state_bytes=layout.ledger.state_bytes,
        enabled=config.enable_prefix_caching,
    )
    return Engine(
        runner=Runner(
            weights=loaded.weights,
            pools=make_pools(layout.pools, fill=fill),
            executables=loaded.executables,
            ladder=layout.ladder,
            copies=loaded.copies,
            host=host,
        ),
        scheduler=Scheduler(
            cache=cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=layout.max_model_len,
        ),
        tokenizer=tokenizer,
        vocab_size=layout.options.spec.vocab_size,
        end_ids=loaded.end_ids,
        max_model_len=layout.max_model_len,
        seed=config.seed,
        trace=None if config.trace is None else TraceWriter(config.trace, _trace_header(cache, config, layout)),
    )


def _host_tier(
    loaded: Loaded, config: EngineConfig, shares: Sequence[float]
) -> tuple[HostTier | None, list[HostMemory]]:
    """The books and the arrays of the host tier, if the config asks for one. shares: of the layers, by group."""
    ledger = loaded.layout.ledger
    num_blocks = choose_num_host_blocks(
        host_cache_bytes=config.host_cache_bytes if config.enable_prefix_caching else 0,
        block_bytes=ledger.host_block_bytes,
        block_size=ledger.block_size,
    )
    if num_blocks == 0:
        return None, []
    host = [HostMemory(loaded.copies.shapes(group), num_blocks + 1) for group in range(len(shares))]
    return HostTier([num_blocks + 1] * len(shares), [round(ledger.host_block_bytes * s) for s in shares]), host


def _max_snapshots(config: EngineConfig, layout: Layout) -> int | None:
    """Snapshots of recurrent states beside the null one and those of rows; None of a model that has no states."""
    return layout.ledger.num_states - 1 - config.max_num_seqs if layout.ledger.num_states else None


def _trace_header(cache: CacheManager, config: EngineConfig, layout: Layout) -> TraceHeader:
    return TraceHeader(
        block_size=layout.ledger.block_size,
        block_bytes=layout.ledger.block_bytes,
        num_blocks=cache.pools[0].num_ids - 1,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=layout.max_model_len,
        max_cached_prompts=cache.prompts.max_prompts,
        min_cached_prompt_tokens=config.min_cached_prompt_tokens,
        windows=cache.windows,
        num_host_blocks=cache.tier.pools[0].num_ids - 1 if cache.tier is not None else 0,
        max_snapshots=_max_snapshots(config, layout),
    )


def _priorities_for(prompts: Sequence[Prompt], priority: Sequence[int] | None) -> Sequence[int]:
    if priority is None:
        return [0] * len(prompts)
    if isinstance(priority, str) or not isinstance(priority, Sequence) or len(priority) != len(prompts):
        raise ValueError(f"priority is {priority!r}; it must be a list with one whole number for each prompt")
    wrong = next((p for p in priority if isinstance(p, bool) or not isinstance(p, int)), None)
    if wrong is not None:
        raise ValueError(f"priority holds {wrong!r}; each must be a whole number, lower runs first")
    return priority


def _end_ids(spec: ModelSpec, generation_config: Mapping[str, Any]) -> frozenset[int]:
    """End tokens of config.json and generation_config.json together."""
    extra = generation_config.get("eos_token_id")
    return frozenset(spec.eos_token_ids) | frozenset(
        extra if isinstance(extra, list) else [] if extra is None else [extra]
    )
