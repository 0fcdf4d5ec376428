"""OpenModel: a model that is open, and its engine. `LLM` is its Python API.

It alone knows whether the model runs, sleeps or has other weights than it was opened with.
"""

import dataclasses
import math
import weakref
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping
from typing import Any, TypeVar

from ferrum_jax.engine.adapters import LoadedAdapters
from ferrum_jax.engine.core import EngineCore
from ferrum_jax.engine.engine import Engine
from ferrum_jax.engine.prefixes.cached_prefixes import CachedPrefixes
from ferrum_jax.engine.shared import WHAT_BECOMES, SharedEngine
from ferrum_jax.engine.startup.load import Loaded, adapter_reader
from ferrum_jax.engine.startup.new_weights import NewWeights, copies_for
from ferrum_jax.engine.startup.open import Opening
from ferrum_jax.engine.startup.sleep import LEVELS, TAGS, is_dropped, put_to_sleep, tags_to_wake, woken
from ferrum_jax.inputs.identity import ModelIdentity
from ferrum_jax.io.error_text import quoted
from ferrum_jax.runtime.distributed.processes import current, refuse_several_processes
from ferrum_jax.runtime.encoder_runner import EncoderRunner
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.pools.budget import Ledger
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.task import Answer, MakeTask
from ferrum_jax.tasks.task_maker import TaskMaker
from ferrum_jax.tasks.transcription.transcriber import Transcriber, require_transcriber
from ferrum_jax.text.output_processor.choice_text import TokenTexts
from ferrum_jax.text.output_processor.collect import Collector

Key = TypeVar("Key", bound=Hashable)


class OpenModel:
    """opened: with the weights of this moment. folder: where tokenizer and chat template were read; None for neither.

    refused_products: weights in a form that the named kernels do not multiply, with the reasons; XLA does.
    host_memory_kind: of the host tier's memory, "pinned_host" if the backend has it; None without a tier.
    """

    def __init__(self, opening: Opening) -> None:
        self.opened, engine = opening.run()
        self.folder = opening.tokenizer or opening.source.folder
        self._source = opening.source if self.folder else None  # of a remote one it keeps the local copies
        self.spec, self.config, self.embedder = opening.source.spec, self.opened.config, self.opened.embedder
        self.prompts, layout = self.opened.texts.prompts, self.opened.model.layout
        self.ledger, self.max_model_len = layout.ledger, layout.max_model_len
        self.generates = not self.opened.texts.vectors_only
        layout = layout if isinstance(layout, Layout) else None
        self.adapters = LoadedAdapters(layout and layout.adapters, adapter_reader(layout))
        self.refused_products = {} if layout is None else layout.refused_products
        host = engine.runner.host if isinstance(engine, Engine) else None
        self.host_memory_kind = None if host is None else host.kind
        self.calls = self._shared(engine)

    def _shared(self, engine: EngineCore) -> SharedEngine:
        if self.config.max_adapters:
            engine.close()
            engine = self.make_engine()  # one that knows the adapters of this model
        make = weakref.WeakMethod(self.make_engine)  # calls do not outlive their model, and `del llm` frees all at once
        return SharedEngine(
            engine,
            lambda: make()(),  # type: ignore[misc]
            collector=Collector(TokenTexts(self.prompts.tokenizer, self.opened.forms), self.max_model_len),
            counter=self.opened.counter,
            on_recompile=self.config.on_recompile,
        )

    def make_engine(self) -> EngineCore:
        """A fresh one, with empty caches."""
        processes = current()
        if processes is not None:
            processes.renew()
        opened, tokenizer = self.opened, self.prompts.tokenizer
        return opened.build(opened.model, self.config, tokenizer, forms=opened.forms, adapters=self.adapters)

    # -- what it is ----------------------------------------------------------------------------------

    @property
    def loaded(self) -> Loaded:
        """Weights and executables behind an `Engine`. Raises ValueError for an encoder."""
        model = self.opened.model
        if not isinstance(model, Loaded):
            raise ValueError(self.tasks.refusal)
        return model

    @property
    def engine(self) -> Engine:
        """The engine with its scheduler and caches. Raises ValueError for an encoder, which has neither."""
        engine = self.calls.engine
        if not isinstance(engine, Engine):
            raise ValueError(self.tasks.refusal)
        return engine

    @property
    def transcriber(self) -> Transcriber:
        """How it writes down sounds. Raises ValueError for a model that does not."""
        return require_transcriber(self.opened.texts.transcriber, self.spec.architecture)

    def learn(self, texts: Iterable[str], cache_salt: str) -> None:
        """Has the engine draft tokens from texts too, where it drafts from those of others."""
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise ValueError(f"texts is {quoted(texts)}; give a list of texts, such as [text]")
        asked, tokenizer = self.config.speculative_config, self.prompts.tokenizer
        if asked is not None and asked.method == "suffix" and tokenizer is not None:
            for text in texts:
                if not isinstance(text, str):
                    raise ValueError(f"texts holds {quoted(text)}, which is no text; give strings")
                self.calls.learn(tokenizer.encode(text, add_special_tokens=False), cache_salt)

    @property
    def identity(self) -> ModelIdentity:
        """Everything that can change an answer, and the environment."""
        model, adapter = self.opened.model, self.adapters.identity
        version = f".{model.weights_version}" if model.weights_version else ""
        digest, once = (f"{each.hex()}{version}" for each in model.fingerprint)
        return dataclasses.replace(self.opened.identity, weights=digest, weights_once=once, adapter=adapter)

    @property
    def default_params(self) -> SamplingParams:
        """The sampling parameters of a request that says nothing."""
        return SamplingParams().over(self.opened.identity.generation)

    @property
    def prefixes(self) -> CachedPrefixes:
        """The prefixes that the engine has cached."""
        return CachedPrefixes(calls=self.calls, engine=self.engine, prompts=self.prompts)

    def stats(self) -> dict[str, Any]:
        """See `LLM.stats`."""
        opened, bundled, engine = self.opened, self.opened.chosen.bundled, self.calls.engine
        return {
            **snapshot(engine.runner, self.ledger),
            **engine.counts(),
            "host_memory_kind": self.host_memory_kind,
            "bundle_hits": 0 if bundled is None else bundled.hits,
            "bundle_misses": 0 if bundled is None else bundled.misses,
            "compiles_before_ready": opened.num_compiles,
            "compiles_after_ready": self.calls.num_compiles,
            "startup_s": opened.startup_s,
        }

    def progress(self) -> dict[str, tuple[float, float, float]]:
        """See `LLM.progress`."""
        return self.calls.engine.progress()

    # -- other weights, and sleep --------------------------------------------------------------------

    @property
    def asleep(self) -> tuple[str, ...]:
        """The tags, "weights" or "kv_cache", whose memory is off the devices."""
        return self.calls.asleep

    def update_weights(
        self, state: NewWeights, *, requests: str | None, partial: bool, names: Mapping[str, str] | None, cast: bool
    ) -> int:
        """See `LLM.update_weights`."""
        refuse_several_processes("update_weights")
        if requests not in (None, *WHAT_BECOMES):
            raise ValueError(f"requests is {requests!r}; it must be one of {WHAT_BECOMES}")
        calls, model = self.calls, self.opened.model
        if requests is None and calls.busy:
            raise ValueError(
                f"requests are running; let them end, or say what becomes of them: requests={WHAT_BECOMES}"
            )
        if partial and "weights" in self.asleep:
            raise ValueError("the weights sleep, so there is nothing to keep; wake_up() first, or update all of them")
        copies = copies_for(model.layout, state, spec=self.spec, names=names, partial=partial, cast=cast)
        calls.quiet(requests or "keep")
        self.opened = self.opened.with_new_weights(calls.whole(lambda: model.with_weights(copies)))
        model = self.opened.model
        calls.renew(model.weights, model.cache_fingerprint, model.weights_version)
        calls.wake_up({"weights"})
        return model.weights_version

    def weights_checksum(self) -> str:
        """See `LLM.weights_checksum`."""
        if "weights" in self.asleep:
            raise ValueError("the weights sleep; wake_up() first")
        return self.loaded.checksum()

    def sleep(self, level: int) -> dict[str, int]:
        """See `LLM.sleep`."""
        refuse_several_processes("sleep")
        if level not in LEVELS:
            raise ValueError(f"level is {level!r}; it must be 1 (weights go to host memory) or 2 (they are dropped)")
        loaded, calls, ledger = self.loaded, self.calls, self.ledger
        if calls.asleep:
            raise ValueError(f"{' and '.join(calls.asleep)} sleep already; call wake_up() first")
        if calls.busy:
            raise ValueError("requests are running; let them end before it sleeps")
        calls.fall_asleep(TAGS)
        model, weights_bytes = put_to_sleep(loaded, level)
        self.opened = dataclasses.replace(self.opened, model=model)
        kv_bytes = ledger.used_bytes - ledger.weights_bytes - ledger.temporaries_bytes
        return {"weights": weights_bytes, "kv_cache": kv_bytes}

    def wake_up(self, tags: Collection[str] | None) -> None:
        """See `LLM.wake_up`."""
        loaded, woken_tags = self.loaded, tags_to_wake(tags, self.calls.asleep)
        if tags is not None and is_dropped(loaded):
            woken_tags -= {"weights"}  # `update_weights` wakes them, whether it comes before or after
        elif "weights" in woken_tags:
            self.opened = dataclasses.replace(self.opened, model=woken(loaded))
        self.calls.wake_up(woken_tags)

    # -- requests ------------------------------------------------------------------------------------

    @property
    def tasks(self) -> TaskMaker:
        """Makes its tasks, with the weights of this moment."""
        opened = self.opened
        return TaskMaker(
            prompts=self.prompts,
            embedder=opened.embedder,
            scorer=opened.scorer,
            classifier=opened.classifier,
            max_model_len=self.max_model_len,
            vocab_size=self.spec.vocab_size,
            name=self.spec.architecture,
            why_vectors=opened.texts.vectors_only,
        )

    def run(
        self,
        tasks: Iterable[tuple[Key, MakeTask[Answer]]],
        *,
        wants_partials: Callable[[], bool] = lambda: False,
        most_running: Callable[[], float] | None = lambda: math.inf,
    ) -> Generator[tuple[Key, Answer | ValueError], None, None]:
        """See `LLM.run`."""
        if most_running is None:
            return self.calls.run(tasks, wants_partials=wants_partials)
        room = self.opened.model.max_requests
        return self.calls.run(tasks, room=lambda: min(room, most_running()), wants_partials=wants_partials)


def snapshot(runner: Runner | EncoderRunner, ledger: Ledger) -> dict[str, Any]:
    """A runner's counts and its model's memory, JSON-ready.

    Counts are of all data shards; bytes of weights and of what is in the pools are those of one device.
    """
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
