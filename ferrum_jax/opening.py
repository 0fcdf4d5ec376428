"""Opening: from what a user names to what an open LLM has.

`Opening` is the order: a model, a config, perhaps a bundle and the reach of the requests to come. `Opened` is what
came of it: weights and executables of a model that generates, or an encoder, and how texts get to either.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from checkpoints import open_checkpoint
from checkpoints.sentence import SentenceLayout, read_sentence_layout
from ferrum_jax.config import EngineConfig, MeshShape, Reach
from ferrum_jax.embedding import Embedder
from ferrum_jax.encoder import Encoder, load_encoder
from ferrum_jax.engine import Engine
from ferrum_jax.loading import Loaded, ModelSource
from ferrum_jax.models.bert import BertSpec
from ferrum_jax.paths import require_folder_of
from ferrum_jax.prompt import Content
from ferrum_jax.runtime.bundle import Bundle, BundledExecutables, config_for, spec_digest
from ferrum_jax.runtime.compile import CompileCounter
from ferrum_jax.runtime.encoder import POOLINGS
from ferrum_jax.runtime.processes import current, refuse_several_processes, require_all_processes, smallest, told
from ferrum_jax.runtime.store import ExecutableStore
from ferrum_jax.sharding import make_mesh
from ferrum_jax.spec import ModelSpec
from ferrum_jax.starting import Start
from ferrum_jax.text.chat import ChatTemplate
from ferrum_jax.text.prompts import PromptEncoder
from ferrum_jax.text.tokenizer import Tokenizer, require_tokenizer

Measure = Callable[[Callable[[Content], Sequence[int]], int], Reach | None]  # see `LLM`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """What an open LLM has beside its engine.

    model: weights and executables. headless: it has no head, so that it embeds and nothing else.
    num_compiles: of the opening; `counter` goes on counting.
    """

    config: EngineConfig
    model: Loaded | Encoder
    headless: bool
    prompts: PromptEncoder
    embedder: Embedder
    bundled: BundledExecutables | None
    counter: CompileCounter
    num_compiles: int
    startup_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opening:
    """What an LLM is opened from; see `LLM` for what each means."""

    source: ModelSource
    config: EngineConfig
    tokenizer: str | None = None
    bundle: Bundle | None = None
    require_bundle: bool = False
    reach: Measure | None = None
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None
    on_problem: Callable[[str], None] = lambda text: None

    @classmethod
    def of_checkpoint(
        cls,
        model: str,
        config: EngineConfig | None,
        *,
        bundle: str | os.PathLike[str] | None,
        require_bundle: bool,
        **others: Any,
    ) -> Opening:
        """Raises ValueError for a checkpoint or bundle that is none."""
        opened = None if bundle is None else Bundle.open(os.fspath(bundle))
        if require_bundle and opened is None:
            raise ValueError("require_bundle is set, and no bundle is named; give bundle=DIR")
        source = ModelSource.of_checkpoint(open_checkpoint(model))
        config = config_for(config, opened)
        return cls(source=source, config=config, bundle=opened, require_bundle=require_bundle, **others)

    def run(self) -> tuple[Opened, Engine | None]:
        """With the first engine, of a model that generates. Raises ValueError for what cannot run here."""
        started, counter = time.perf_counter(), CompileCounter()
        source, prompts, sentence = self.source, self._prompts(), self._sentence()
        engine = None
        if isinstance(source.spec, BertSpec):
            model, bundled = self._encoder(source.spec, sentence)
        else:
            model, engine, bundled = self._engine(source.spec, prompts)
        most = model.layout.max_model_len
        embedder = Embedder(
            sentence,
            prompts.tokenizer,
            poolings=POOLINGS if engine is None else ("last",),
            vocab_size=source.spec.vocab_size,
            max_tokens=most if engine is None else most - 1,
        )
        opened = Opened(
            config=self.config,
            model=model,
            headless=source.headless,
            prompts=prompts,
            embedder=embedder,
            bundled=bundled,
            counter=counter,
            num_compiles=counter.count,
            startup_s=time.perf_counter() - started,
        )
        return opened, engine

    def _prompts(self) -> PromptEncoder:
        folder, own = self.source.folder, self.tokenizer
        tokenizer = None if folder is None else Tokenizer.load(folder)
        if own is not None:
            tokenizer = require_tokenizer(Tokenizer.load(own), own)
        texts = own or folder
        return PromptEncoder(tokenizer=tokenizer, chat=None if texts is None else ChatTemplate.load(texts))

    def _sentence(self) -> SentenceLayout:
        folder = self.source.folder
        return SentenceLayout() if folder is None else read_sentence_layout(folder)

    def _engine(self, spec: ModelSpec, prompts: PromptEncoder) -> tuple[Loaded, Engine, BundledExecutables | None]:
        if self.config.trace is not None:
            require_folder_of(self.config.trace, "trace")
        mesh = make_mesh(MeshShape.parse(self.config.mesh), jax.devices())
        require_all_processes(mesh)
        store, bundled = self._sources(mesh.devices.flatten().tolist())
        start = Start(
            model=self.source,
            config=self.config,
            mesh=mesh,
            source=bundled or store,
            tokenizer=prompts.tokenizer,
            on_progress=self.on_progress,
        )
        loaded, engine = start.run(self._reach(spec, prompts))
        if loaded.layout.ledger.num_host_blocks:
            loaded.copies.warm_up(tier=True)
        if self.config.check_writes:
            loaded.copies.warm_up(tier=False)
        if current() is not None:
            loaded.executables.load()  # one process that loads in the middle of a step would hold up all
        smallest(0)  # no process steps before all are ready
        return loaded, engine, bundled

    def _reach(self, spec: ModelSpec, prompts: PromptEncoder) -> Reach | None:
        """Of the requests that will come; None if they are not known."""
        most = self.config.max_model_len or spec.max_position_embeddings
        reach = told(self.reach and self.reach(prompts.token_ids, most))
        if reach is None or self.bundle is None:
            return reach
        return dataclasses.replace(reach, request_tokens=None)  # a bundle's executables know one width of tables

    def _encoder(self, spec: BertSpec, sentence: SentenceLayout) -> tuple[Encoder, BundledExecutables | None]:
        refuse_several_processes(spec.architecture)
        mesh = make_mesh(MeshShape.parse(self.config.mesh), jax.devices())
        store, bundled = self._sources(mesh.devices.flatten().tolist())
        encoder = load_encoder(spec, self.source.read, self.config, mesh, sentence, bundled or store, self.on_progress)
        return encoder, bundled

    def _sources(self, devices: Sequence[Any]) -> tuple[ExecutableStore | None, BundledExecutables | None]:
        """The store, if the config names one, and before it the bundle."""
        folder = self.config.compilation_cache_dir
        store = None if folder is None else ExecutableStore(folder, devices)
        if self.bundle is None:
            return store, None
        return store, BundledExecutables(
            self.bundle,
            devices,
            spec=spec_digest(self.source.spec),
            fallback=store,
            required=self.require_bundle,
            on_problem=self.on_problem,
        )


def tell_processes(**arguments: Any) -> None:
    """Of process 0: the others open the same, but for what it alone writes. arguments: of `LLM`."""
    processes, config = current(), arguments["config"]
    if processes is not None and processes.leads:
        quiet = None if config is None else dataclasses.replace(config, trace=None)
        processes.open(arguments | {"config": quiet})
