"""LLM: a checkpoint, ready to answer. The Python API.

Opening one reads the checkpoint's description, plans memory and buckets from shapes alone, compiles in
threads while weights load, and is ready when both are done. One LLM serves one thread; calls of that
thread may overlap (a stream read while another runs).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flax import nnx

from ferrum_jax.calls import Calls, Inbox
from ferrum_jax.config import EngineConfig
from ferrum_jax.embedding import Vectors, by_steps, embed_all
from ferrum_jax.encoder import Encoder
from ferrum_jax.engine import Engine
from ferrum_jax.loading import Loaded, ModelSource, build_engine, with_weights
from ferrum_jax.models import registry
from ferrum_jax.opening import Measure, Opening, tell_processes
from ferrum_jax.prefix_cache import PrefixCache
from ferrum_jax.progress import progress_bar, texts_bar
from ferrum_jax.prompt import Message, Prompt, listed, single, take_apart
from ferrum_jax.request import CompletionOutput, EmbeddingOutput, RequestOutput, SamplingParams
from ferrum_jax.runtime.processes import current, refuse_several_processes

Key = TypeVar("Key", bound=Hashable)

MOST_WAITING = 2  # as_completed holds so many times the rows of all shards, so that a million stay where they are


class LLM:
    """A model that generates, or an encoder, which makes embeddings and nothing else.

    model: a Hugging Face folder, or an Orbax checkpoint that `ferrum-jax convert` wrote.
    config: see EngineConfig; None takes the bundle's, or the defaults. tokenizer: a folder or tokenizer.json to use
    instead of the checkpoint's own. bundle: a folder of executables that `ferrum-jax compile` made; what it lacks is
    compiled here, or with `require_bundle` refused. reach: called with a function from prompts to token ids and with
    max_model_len, before anything is compiled; it gives the Reach of the requests that will come, so that no executable
    is made in vain, and longer ones are refused. None, or its None, is for whatever comes. on_progress: called with
    (what, done, total) while it starts; on_problem: with a sentence for each executable that the bundle does not give.

    Raises ValueError, before weights are read, for what cannot run here: all reasons at once.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig | None = None,
        *,
        tokenizer: str | None = None,
        bundle: str | os.PathLike[str] | None = None,
        require_bundle: bool = False,
        reach: Measure | None = None,
        on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
        on_problem: Callable[[str], None] = lambda text: None,
    ) -> None:
        tell_processes(model=model, config=config, tokenizer=tokenizer, bundle=bundle, require_bundle=require_bundle)
        opening = Opening.of_checkpoint(
            model,
            config,
            tokenizer=tokenizer,
            bundle=bundle,
            require_bundle=require_bundle,
            reach=reach,
            on_progress=on_progress,
            on_problem=on_problem,
        )
        self._take(opening)

    @classmethod
    def from_model(
        cls,
        model: nnx.Module,
        config: EngineConfig | None = None,
        *,
        tokenizer: str | None = None,
        on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> LLM:
        """An LLM over a model in memory, one of `ferrum_jax.models`; its weights are copied, and cast to config.dtype.

        tokenizer: a folder or tokenizer.json; without it prompts are token ids. Raises ValueError as `LLM` does.
        """
        refuse_several_processes("LLM.from_model")
        return cls.from_source(ModelSource.of_model(model), config, tokenizer=tokenizer, on_progress=on_progress)

    @classmethod
    def from_source(
        cls,
        source: ModelSource,
        config: EngineConfig | None = None,
        *,
        tokenizer: str | None = None,
        on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> LLM:
        """An LLM over weights that `source` puts where they belong. tokenizer, errors: as of `from_model`."""
        refuse_several_processes("LLM.from_source")
        llm = cls.__new__(cls)
        llm._take(Opening(source=source, config=config or EngineConfig(), tokenizer=tokenizer, on_progress=on_progress))
        return llm

    def update_weights(self, state: nnx.Module | nnx.State | Mapping[Any, Any]) -> None:
        """Takes copies of other weights, without a compile; caches are empty and counters begin anew afterwards.

        state: a model, its state, or a mapping from dotted paths to arrays, of all parameters. Old and new weights
        are there together for a moment. Raises ValueError, with nothing changed, for what does not fit (all in one
        error) and while requests run.
        """
        refuse_several_processes("update_weights")
        if self._calls is not None and self._calls.busy:
            raise ValueError("requests are running; let them end before the weights change")
        arrays = registry.parameters_of(state)
        old = self._opened.model
        new = old.with_weights(arrays) if isinstance(old, Encoder) else with_weights(old, arrays)
        self._opened = dataclasses.replace(self._opened, model=new)
        if self._calls is not None:
            self._calls.drop()

    def _take(self, opening: Opening) -> None:
        self._opened, engine = opening.run()
        opened = self._opened
        self.spec, self.config, self.tokenizer = opening.source.spec, opened.config, opened.prompts.tokenizer
        self.ledger, self.max_model_len = opened.model.ledger, opened.model.layout.max_model_len
        self.bundled, self.startup_s = opened.bundled, opened.startup_s
        self._calls: Calls | None = None
        if engine is not None:
            recompile = self.config.on_recompile
            self._calls = Calls(engine, self._engine_maker(), counter=opened.counter, on_recompile=recompile)

    def _engine_maker(self) -> Callable[[], Engine]:
        """Makes fresh engines, and holds no LLM: `del llm` frees weights and pools at once."""
        me = weakref.ref(self)

        def make() -> Engine:
            llm = me()
            assert llm is not None, "calls do not outlive their LLM"
            return llm._make_engine()

        return make

    def _make_engine(self) -> Engine:
        processes = current()
        if processes is not None:
            processes.renew()
        return build_engine(self.loaded, self.config, self.tokenizer)

    @property
    def loaded(self) -> Loaded:
        """Weights and executables of a model that generates. Raises ValueError for an encoder."""
        model = self._opened.model
        if isinstance(model, Encoder):
            raise ValueError(f"{self.spec.architecture} is an encoder and generates nothing; use LLM.embed")
        return model

    @property
    def _encoder(self) -> Encoder | None:
        return self._opened.model if isinstance(self._opened.model, Encoder) else None

    @property
    def calls(self) -> Calls:
        """What runs on the engine. Raises ValueError for an encoder, which has none."""
        if self._calls is None:
            raise ValueError(f"{self.spec.architecture} is an encoder and generates nothing; use LLM.embed")
        return self._calls

    @property
    def engine(self) -> Engine:
        """The engine; a fresh one with empty caches after one was broken off in the middle of a step."""
        return self.calls.engine

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
        many = listed(prompts)
        params = self._params_for(many, sampling_params)
        priorities = _priorities_for(many, priority)
        inbox: Inbox = deque()
        outputs: dict[int, RequestOutput] = {}
        try:
            ids = self._add_all(many, params, priorities, inbox)
            with progress_bar(len(many), shown=progress) as advance:
                while len(outputs) < len(ids):
                    output = self.calls.receive(inbox)
                    outputs[output.request_id] = output
                    advance(output)
        finally:
            self.calls.end(inbox)
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
        prompts = [self._opened.prompts.chat_ids(c, **template_arguments) for c in conversations]
        return self.generate(prompts, sampling_params, progress=progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The output of one prompt as it grows: each item holds all text so far; the last one is finished."""
        inbox: Inbox = deque()
        try:
            self._add(prompt, self._params_for([prompt], sampling_params)[0], inbox, streams=True)
            finished = False
            while not finished:
                output = self.calls.receive(inbox)
                finished = output.finished
                yield output
        finally:
            self.calls.end(inbox)

    def as_completed(
        self,
        requests: Iterable[tuple[Key, Prompt, SamplingParams]],
        *,
        resume: Callable[[Key], Sequence[CompletionOutput]] = lambda key: (),
        wants_partials: Callable[[], bool] = lambda: False,
        embeds: bool = False,
    ) -> Generator[tuple[Key, RequestOutput | ValueError], None, None]:
        """(key, output) of each request in the order in which they finish; a refused one gives its ValueError.

        `requests` is read as there is room, so it may be endless. The key also seeds what has no seed.
        wants_partials: asked before every step; where it says so, every unfinished request is given as far as it is
        (`finished` is False) and goes on. resume: the `outputs` that a request had in another process, to go on from.
        embeds: outputs have `embedding`, the final hidden state of the prompt's last token.
        """
        source = iter(requests)
        inbox: Inbox = deque()
        keys: dict[int, Key] = {}
        exhausted = False
        try:
            while not exhausted or keys:
                while not exhausted and len(keys) < self._max_waiting:
                    item = next(source, None)
                    if item is None:
                        exhausted = True
                        break
                    key, prompt, params = item
                    try:
                        keys[self._add(prompt, params, inbox, key=str(key), resume=resume(key), embeds=embeds)] = key
                    except ValueError as error:
                        yield key, error
                if wants_partials():
                    partials = [(key, self.engine.peek(submission)) for submission, key in keys.items()]
                    yield from ((key, output) for key, output in partials if output is not None)
                if inbox:
                    output = inbox.popleft()
                    yield keys.pop(output.request_id), output
                elif keys:
                    self.calls.step()
        finally:
            self.calls.end(inbox)

    @property
    def _max_waiting(self) -> int:
        return MOST_WAITING * self.config.max_num_seqs * self.ledger.num_shards

    # -- embeddings ------------------------------------------------------------------------------------

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        progress: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """The vector of each text, in their order, as `embedding` [D] float32.

        prompts: texts or token ids. What is None is as the checkpoint says (the files of sentence-transformers), else
        the mean of an encoder's states and the last token's state of a model that generates, not normalised.
        prompt_name: of the checkpoint's prompts, put before each text. pooling: "mean", "cls" or "last". truncate: cut
        texts that are too long. progress: as in `generate`. Raises ValueError naming the prompt that cannot be served.
        """
        many = listed(prompts)
        found: dict[int, EmbeddingOutput] = {}
        outputs = self.embed_as_completed(
            enumerate(many), prompt_name=prompt_name, pooling=pooling, normalize=normalize, truncate=truncate
        )
        with contextlib.closing(outputs), texts_bar(len(many), shown=progress) as advance:
            for index, output in outputs:
                if isinstance(output, ValueError):
                    raise ValueError(f"prompt {index}: {output}") from output
                found[index] = output
                advance(len(output.prompt_token_ids))
        return [found[index] for index in range(len(many))]

    def embed_as_completed(
        self,
        requests: Iterable[tuple[Key, Prompt]],
        *,
        prompt_name: str | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> Vectors[Key]:
        """(key, vector) of each text in the order in which they are ready; a refused one gives its ValueError.

        `requests` is read as there is room, so it may be endless. The rest is as in `embed`.
        """
        params = self._opened.embedder.params(
            prompt_name=prompt_name, pooling=pooling, normalize=normalize, truncate=truncate
        )
        encoder = self._encoder
        run = by_steps(self.as_completed) if encoder is None else encoder.run
        return embed_all(self._opened.embedder, requests, params, run)

    def render_chat(self, messages: Sequence[Message], **arguments: Any) -> str:
        """The text that the checkpoint's chat template makes of messages."""
        return self._opened.prompts.render_chat(messages, **arguments)

    # -- cached prefixes -------------------------------------------------------------------------------

    def cache_prefix(self, prompt: Prompt, *, pin: bool = False) -> int:
        """Computes a prompt, so that prompts that begin with it hit its full blocks; how many tokens these are.

        pin: they stay until `unpin_prefixes`, whatever else runs. Raises ValueError if too little would be left.
        """
        if pin:
            refuse_several_processes("pin=True")
        self.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0), progress=False)
        keys = self._prompt_keys(prompt)
        if pin:
            self.engine.scheduler.pin(keys)
        return len(keys) * self.ledger.block_size

    def unpin_prefixes(self) -> None:
        """Pinned prefixes are cached like all others again."""
        self.engine.scheduler.unpin()

    def save_prefix_cache(self, path: str | os.PathLike[str], prompts: Prompt | Sequence[Prompt] | None = None) -> int:
        """Writes what is cached to a new folder, of `prompts` or all; how many blocks that were.

        Beside blocks these are the last hidden states of whole prompts and snapshots of recurrent states. Any process
        may load them that runs the same model with the same KV dtype and block size. Raises ValueError when nothing
        is cached, or when the folder is there and not empty.
        """
        keys = None
        if prompts is not None:
            many = listed(prompts)
            keys = [key for prompt in many for key in self._prompt_keys(prompt, whole=True)]
        return self._prefix_cache().save(Path(path), keys)

    def load_prefix_cache(self, path: str | os.PathLike[str], *, pin: bool = False) -> int:
        """Caches the blocks that `save_prefix_cache` wrote, the most recently used ones where not all fit; how many.

        pin: they stay until `unpin_prefixes`. Raises ValueError naming the folder when it is of another model, KV
        dtype or block size, or damaged; nothing has changed then.
        """
        prefixes = self._prefix_cache()
        arrays = prefixes.read(Path(path))
        keys = self.calls.whole(lambda: prefixes.put(arrays))
        if pin:
            self.engine.scheduler.pin(keys)
        return len(keys)

    def _prompt_keys(self, prompt: Prompt, *, whole: bool = False) -> list[bytes]:
        parts = take_apart(prompt)
        ids = self._opened.prompts.token_ids(parts.content)
        return self.engine.prompt_keys(ids, cache_salt=parts.cache_salt, media=parts.media, whole=whole)

    def _prefix_cache(self) -> PrefixCache:
        refuse_several_processes("a saved prefix cache")
        self.loaded.copies.warm_up(tier=False)
        return PrefixCache(
            spec=self.loaded.layout.options.spec,
            fingerprint=self.loaded.fingerprint,
            caches=self.engine.scheduler.caches,
            runner=self.engine.runner,
        )

    @property
    def host_memory_kind(self) -> str | None:
        """What the host tier's memory is, "pinned_host" where the backend has it; None without a tier."""
        host = None if self._encoder else self.engine.runner.host
        return None if host is None else host.kind

    def stats(self) -> dict[str, Any]:
        """One JSON-ready snapshot: prefix cache, steps, padding, compiles, memory.

        Counts are of all data shards; bytes of weights and of what is in the pools are those of one device.
        """
        encoder = self._encoder
        runner = self.engine.runner if encoder is None else encoder.runner
        return {
            **({} if encoder else self.engine.scheduler.metrics().snapshot()),
            "steps": runner.num_steps,
            "computed_tokens": runner.num_tokens,
            "padded_tokens": runner.num_padded_tokens,
            "executables": runner.num_executables,
            "executables_loaded": runner.num_loaded,
            "bundle_hits": 0 if self.bundled is None else self.bundled.hits,
            "bundle_misses": 0 if self.bundled is None else self.bundled.misses,
            "compiles_before_ready": self._opened.num_compiles,
            "compiles_after_ready": 0 if self._calls is None else self._calls.num_compiles,
            "weights_bytes": self.ledger.weights_bytes,
            "kv_bytes": self.ledger.kv_bytes,
            "kv_repeated_bytes": self.ledger.repeated_bytes,
            "prompts_bytes": self.ledger.prompts_bytes,
            "host_cache_bytes": self.ledger.host_bytes,
            "host_memory_kind": self.host_memory_kind,
            "states_bytes": self.ledger.states_bytes,
            "num_shards": self.ledger.num_shards,
            "num_blocks": self.ledger.num_shards * self.ledger.num_blocks,
            "group_blocks": [self.ledger.num_shards * group.num_blocks for group in self.ledger.groups],
            "startup_s": self.startup_s,
        }

    # -- inside --------------------------------------------------------------------------------------

    def _add_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        inbox: Inbox,
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
        inbox: Inbox,
        *,
        key: str = "",
        priority: int = 0,
        streams: bool = False,
        resume: Sequence[CompletionOutput] = (),
        embeds: bool = False,
    ) -> int:
        """Queues a prompt whose outputs go to `inbox`; the submission's id."""
        if self._opened.headless and not embeds:
            raise ValueError(
                f"{self.spec.architecture} has no head here: tie_word_embeddings is false in config.json, and there "
                "is no lm_head.weight. It makes embeddings and generates nothing; use LLM.embed"
            )
        parts = take_apart(prompt)
        return self.calls.add(
            inbox,
            self._opened.prompts.token_ids(parts.content),
            sampling,
            prompt=parts.content if isinstance(parts.content, str) else None,
            key=key,
            priority=priority,
            streams=streams,
            cache_salt=parts.cache_salt,
            media=parts.media,
            resume=resume,
            embeds=embeds,
        )

    def _params_for(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise ValueError(f"sampling_params is {params!r}; it must be SamplingParams, or a list of them")
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts; give one, or one for each")
        return params


def _priorities_for(prompts: Sequence[Prompt], priority: Sequence[int] | None) -> Sequence[int]:
    if priority is None:
        return [0] * len(prompts)
    if isinstance(priority, str) or not isinstance(priority, Sequence) or len(priority) != len(prompts):
        raise ValueError(f"priority is {priority!r}; it must be a list with one whole number for each prompt")
    wrong = next((p for p in priority if isinstance(p, bool) or not isinstance(p, int)), None)
    if wrong is not None:
        raise ValueError(f"priority holds {wrong!r}; each must be a whole number, lower runs first")
    return priority
