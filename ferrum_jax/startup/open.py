"""Opening: from what a user names to what an open LLM has.

`Opening` is the order: a model, a config, perhaps a bundle and the reach of the requests to come. `Opened` is what
came of it: weights and executables of a model that generates, or an encoder, and how texts get to either.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from checkpoints import open_checkpoint
from checkpoints.hub import Show, commit_of
from checkpoints.sentence import SentenceLayout, read_sentence_layout
from ferrum_jax.config import MANY_ROWS, EngineConfig, Reach
from ferrum_jax.embeddings.embedder import Embedder, prompt_ids
from ferrum_jax.embeddings.encoder import Encoder, load_encoder
from ferrum_jax.embeddings.encoder_runtime import POOLINGS, EncoderLayout
from ferrum_jax.embeddings.logit_scorer import LogitScorer, TokenLogits, ids_of, score_of_tokens
from ferrum_jax.embeddings.scorer import CrossEncoderScorer, Scorer
from ferrum_jax.engine.calls.fields import engine_fields, with_fields
from ferrum_jax.engine.engine import Engine
from ferrum_jax.executables.bundle import Bundle, BundledExecutables, config_for, spec_digest
from ferrum_jax.executables.environment import Environment
from ferrum_jax.executables.executable_store import ExecutableStore
from ferrum_jax.meshes.choices import Subject
from ferrum_jax.meshes.settle import MeshChoice, choose_mesh
from ferrum_jax.models import registry
from ferrum_jax.models.encoder_spec import EncoderSpec
from ferrum_jax.paths import require_folder_of
from ferrum_jax.processes.processes import current, refuse_several_processes, require_all_processes, smallest, told
from ferrum_jax.prompt import PromptIds
from ferrum_jax.runtime.compile import CompileCounter
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.scheduling.request_log import require_request_log
from ferrum_jax.sharding import make_mesh
from ferrum_jax.spec import ModelSpec
from ferrum_jax.spec.identity import ModelIdentity
from ferrum_jax.startup.behind import compile_behind, starts_first
from ferrum_jax.startup.check_attention import Rehearsal
from ferrum_jax.startup.choose_attention import (
    AttentionChoice,
    choose_attention,
    choose_with_others,
    for_unfamiliar,
    recorded_as,
)
from ferrum_jax.startup.choose_products import ProductChoice, choose_products, recorded_products, recorded_with
from ferrum_jax.startup.fit_or_shrink import Start
from ferrum_jax.startup.load import Loaded
from ferrum_jax.startup.model_source import ModelSource
from ferrum_jax.structured.reading.message_parser import MessageForms
from ferrum_jax.text.chat import ChatTemplate
from ferrum_jax.text.prompts import PromptEncoder
from ferrum_jax.text.tokenizer import Tokenizer, require_tokenizer
from ferrum_jax.vision.prompt_images import PromptImages
from ferrum_jax.vision.sources import ImageSources

Measure = Callable[[PromptIds, int], Reach | None]  # see `LLM`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """What an open LLM has beside its engine.

    model: weights and executables. headless: it has no head, so that it embeds and nothing else. identity: of it all.
    num_compiles: of the opening; `counter` goes on counting. attention, products: how their implementations were
    chosen. choices: sentences of what else was chosen where the config leaves it open and there was a choice.
    """

    config: EngineConfig
    model: Loaded | Encoder
    identity: ModelIdentity
    headless: bool
    prompts: PromptEncoder
    embedder: Embedder
    scorer: Scorer | None
    bundled: BundledExecutables | None
    attention: AttentionChoice
    products: ProductChoice
    counter: CompileCounter
    num_compiles: int
    startup_s: float = 0.0
    choices: tuple[str, ...] = ()

    @property
    def why_bounded(self) -> str:
        return self.model.layout.why_bounded if isinstance(self.model, Loaded) else ""

    def with_new_weights(self, model: Loaded | Encoder) -> Opened:
        """The same over other weights of the model."""
        scorer = self.scorer
        if isinstance(scorer, LogitScorer) and isinstance(model, Loaded):
            scorer = scorer.with_logits(_token_logits(model, scorer.token_ids))
        return dataclasses.replace(self, model=model, scorer=scorer)


def forms_of(prompts: PromptEncoder, config: EngineConfig) -> MessageForms:
    """In which forms a checkpoint writes calls and reasoning, as its chat template shows them or the config says."""
    template = None if prompts.chat is None else prompts.chat.source
    return MessageForms.of_template(template, tools=config.tool_form, reasoning=config.reasoning_form)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opening:
    """What an LLM is opened from; see `LLM` for what each means. rehearsal: for tests, of the check at the start."""

    source: ModelSource
    config: EngineConfig
    tokenizer: str | None = None
    bundle: Bundle | None = None
    require_bundle: bool = False
    reach: Measure | None = None
    on_progress: Show = lambda what, done, total: None
    on_problem: Callable[[str], None] = lambda text: None
    on_identity: Callable[[ModelIdentity], None] = lambda identity: None
    begun_with: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rehearsal: Rehearsal | None = None

    @classmethod
    def of_checkpoint(
        cls,
        model: str,
        config: EngineConfig | None,
        *,
        revision: str | None,
        bundle: str | os.PathLike[str] | None,
        require_bundle: bool,
        on_progress: Show | None,
        **others: Any,
    ) -> Opening:
        """Raises ValueError for a checkpoint or bundle that is none."""
        opened = None if bundle is None else Bundle.open(os.fspath(bundle))
        if require_bundle and opened is None:
            raise ValueError("require_bundle is set, and no bundle is named; give bundle=DIR")
        source = ModelSource.of_checkpoint(open_checkpoint(model, revision, on_progress=on_progress))
        others |= {} if on_progress is None else {"on_progress": on_progress}
        config = config_for(config, opened)
        source = source if config.max_image_tokens else source.for_text()
        return cls(source=source, config=config, bundle=opened, require_bundle=require_bundle, **others)

    def run(self) -> tuple[Opened, Engine | None]:
        """With the first engine, of a model that generates. Raises ValueError for what cannot run here."""
        started, counter = time.perf_counter(), CompileCounter()
        prompts, sentence = self._prompts(), self._sentence()
        forms_of(prompts, self.config)  # refuses names that mean nothing
        before = self._choose_before(self.source.spec)
        mesh = self._choose_mesh(sentence)
        settled = dataclasses.replace(self, config=dataclasses.replace(self.config, mesh=mesh.mesh))
        opened, engine = settled._open(prompts, sentence, before, counter)
        chosen = (mesh.why, opened.why_bounded)
        opened = dataclasses.replace(
            opened, choices=tuple(filter(None, chosen)), startup_s=time.perf_counter() - started
        )
        return opened, engine

    def _open(
        self, prompts: PromptEncoder, sentence: SentenceLayout, before: AttentionChoice | None, counter: CompileCounter
    ) -> tuple[Opened, Engine | None]:
        """`run`, with a mesh named. before: what attention was chosen before the devices were open."""
        source = self.source
        identity = functools.partial(self._identity, prompts, sentence)

        def check(layout: Layout | EncoderLayout, fingerprint: bytes | None) -> None:
            self.on_identity(identity(layout, fingerprint))

        engine, choice, products = None, AttentionChoice(implementation=None), ProductChoice(implementation="xla")
        if isinstance(source.spec, EncoderSpec):
            model, bundled = self._encoder(source.spec, sentence, check)
            config = self.config.with_rows(MANY_ROWS)
        else:
            model, engine, bundled, choice, products = self._engine(source.spec, prompts, sentence, before, check)
            config = model.layout.settled(self.config)
        opened = Opened(
            config=config,
            model=model,
            identity=identity(model.layout, model.fingerprint),
            headless=source.headless,
            prompts=prompts,
            embedder=self._embedder(prompts, sentence, model.layout.max_model_len),
            scorer=self._scorer(prompts, sentence, model),
            bundled=bundled,
            attention=choice,
            products=products,
            counter=counter,
            num_compiles=counter.count,
        )
        return opened, engine

    def _prompts(self) -> PromptEncoder:
        folder, own = self.source.folder, self.tokenizer
        tokenizer = None if folder is None else Tokenizer.load(folder)
        if own is not None:
            tokenizer = require_tokenizer(Tokenizer.load(own), own)
        texts = own or folder
        chat = None if texts is None else ChatTemplate.load(texts)
        return PromptEncoder(tokenizer=tokenizer, chat=chat, images=self._images(), max_model_len=self._longest)

    @property
    def _longest(self) -> int:
        """Tokens that a sequence may have before memory is planned."""
        return self.config.max_model_len or self.source.spec.max_position_embeddings

    def _images(self) -> PromptImages | None:
        """How prompts have images, of a model that sees them and whose folder says how they are processed."""
        folder, spec = self.source.folder, self.source.spec
        if folder is None or not isinstance(spec, ModelSpec) or spec.vision is None or not self.config.max_image_tokens:
            return None
        return PromptImages.of_folder(folder, ImageSources.of_config(self.config))

    def _sentence(self) -> SentenceLayout:
        folder = self.source.folder
        return SentenceLayout() if folder is None else read_sentence_layout(folder)

    def _embedder(self, prompts: PromptEncoder, sentence: SentenceLayout, max_model_len: int) -> Embedder:
        spec = self.source.spec
        encodes = isinstance(spec, EncoderSpec)
        if sentence.dense and not encodes:
            raise ValueError(
                f"{spec.architecture} has Dense layers behind its pooling, which only encoders are served with"
            )
        return Embedder(
            sentence,
            prompts.tokenizer,
            poolings=() if encodes and spec.scorer else POOLINGS if encodes else ("last",),
            vocab_size=spec.vocab_size,
            max_tokens=max_model_len if encodes else max_model_len - 1,
        )

    def _scorer(self, prompts: PromptEncoder, sentence: SentenceLayout, model: Loaded | Encoder) -> Scorer | None:
        spec, tokens, longest = self.source.spec, self.config.score_tokens, model.layout.max_model_len
        if isinstance(spec, EncoderSpec):
            scores = bool(spec.scorer)
            return CrossEncoderScorer(prompts.tokenizer, activation=spec.scorer, max_tokens=longest) if scores else None
        asked = sentence.logit_score if tokens is None else score_of_tokens(tokens, prompts.tokenizer)
        if asked is None or not isinstance(model, Loaded):
            return None
        if self.source.headless or max(ids_of(asked)) >= spec.vocab_size:
            raise ValueError(
                f"pairs are scored by logits of the tokens {ids_of(asked)}, which this model does not have"
            )
        logits = _token_logits(model, ids_of(asked))
        return LogitScorer.of(asked, sentence, prompts.tokenizer, prompts.chat, logits, longest - 1)

    def _identity(
        self,
        prompts: PromptEncoder,
        sentence: SentenceLayout,
        layout: Layout | EncoderLayout,
        fingerprint: bytes | None,
    ) -> ModelIdentity:
        """fingerprint: of the weights, None before they are read."""
        device = layout.mesh.devices.flat[0]
        environment = dataclasses.asdict(Environment.of_device(device)) | {"mesh": str(self.config.mesh_shape)}
        if isinstance(layout, Layout):
            options = layout.options
            attention = recorded_as(options.implementation, options.tiles)
            recorded = recorded_with(attention, options.products)
            environment |= {"implementation": recorded, "block_size": str(options.block_size)}
        tokenizer, chat = prompts.tokenizer, prompts.chat
        return ModelIdentity(
            weights=None if fingerprint is None else fingerprint.hex(),
            tokenizer=None if tokenizer is None else tokenizer.digest,
            chat_template=None if chat is None else chat.digest,
            end_tokens=tuple(sorted(self.source.end_ids)),
            vectors=json.dumps(dataclasses.asdict(sentence), sort_keys=True),
            dtype=layout.dtype.name,
            kv_dtype=layout.kv_dtype if isinstance(layout, Layout) else layout.dtype.name,
            max_model_len=layout.max_model_len,
            invariant=self.config.invariant,
            adapter=None if self.config.max_adapters else "",
            images=None if prompts.images is None else prompts.images.digest,
            environment=environment,
        )

    def _engine(
        self,
        spec: ModelSpec,
        prompts: PromptEncoder,
        sentence: SentenceLayout,
        before: AttentionChoice | None,
        check: Callable[[Layout, bytes | None], None],
    ) -> tuple[Loaded, Engine, BundledExecutables | None, AttentionChoice, ProductChoice]:
        mesh = make_mesh(self.config.mesh_shape, self.config.among(jax.devices()))
        require_all_processes(mesh)
        choice, products = self._choose(spec, mesh, before), self._choose_products(spec, mesh)
        store, bundled = self._executable_caches(mesh.devices.flatten().tolist())
        config = dataclasses.replace(
            self.config,
            implementation=choice.implementation,
            attention_tiles=self._tiles(choice),
            product_implementation=products.implementation,
        )
        first = store if bundled is None and starts_first(config, mesh) else None
        start = Start(
            model=self.source,
            config=config,
            mesh=mesh,
            first=first,
            executable_cache=bundled or store,
            tokenizer=prompts.tokenizer,
            forms=forms_of(prompts, config),
            on_progress=self.on_progress,
            check=check,
        )
        reach = self._reach(spec, prompts, sentence)
        loaded, engine = start.run(reach)
        if first is not None:
            compile_behind(loaded.layout, loaded.executables, first, config, reach)
        if loaded.layout.ledger.num_host_blocks:
            loaded.copies.warm_up(tier=True)
        if self.config.check_writes:
            loaded.copies.warm_up(tier=False)
        if current() is not None:
            loaded.executables.load()  # one process that loads in the middle of a step would hold up all
        smallest(0)  # no process steps before all are ready
        return loaded, engine, bundled, choice, products

    def _choose_mesh(self, sentence: SentenceLayout) -> MeshChoice:
        """The mesh, the same in all processes."""
        subject = Subject(spec=self.source.spec, config=self.config, max_seq_length=sentence.max_seq_length)
        choice = choose_mesh(subject, self.config.among(jax.devices()))
        return MeshChoice(**told(dataclasses.asdict(choice)))

    def _choose_before(self, spec: ModelSpec | EncoderSpec) -> AttentionChoice | None:
        """The choice of attention that is made before the devices are opened, which a child may have to do first."""
        if isinstance(spec, EncoderSpec):
            return None
        if self.config.request_log is not None:
            require_folder_of(self.config.request_log, "request log")
            require_request_log(self.config.request_log)
        if current() is not None or self.begun_with:
            return None
        is_bundled = self.bundle is not None
        return choose_attention(spec, self.config, is_bundled=is_bundled, rehearsal=self.rehearsal)

    def _choose(self, spec: ModelSpec, mesh: Mesh, before: AttentionChoice | None) -> AttentionChoice:
        """The choice of attention, the same in all processes; warns where a kernel is set aside."""
        device, processes = mesh.devices.flat[0], current()
        choice = AttentionChoice(implementation=self.config.implementation)
        if before is not None:
            choice = before.on(device)
        elif self.config.implementation is None and device.device_kind in self.begun_with:
            choice = AttentionChoice.recorded(recorded_products(self.begun_with[device.device_kind])[0])
        elif processes is None:
            choice = choose_attention(spec, self.config, is_bundled=self.bundle is not None)
        elif processes.leads:
            choice = choose_with_others(spec, self.config, mesh, is_bundled=self.bundle is not None)
        if choice.implementation is None and not choice.why:
            choice = for_unfamiliar(device)
        choice = AttentionChoice(**told(dataclasses.asdict(choice)))
        if choice.is_set_aside:
            warnings.warn(choice.why, RuntimeWarning, stacklevel=6)
        return choice

    def _choose_products(self, spec: ModelSpec, mesh: Mesh) -> ProductChoice:
        """What multiplies weights in a form, the same in all processes.

        A job that goes on takes what it began with, and a bundle's executables are those of its config.
        """
        device, named = mesh.devices.flat[0], self.config.product_implementation
        if named == "auto" and device.device_kind in self.begun_with:
            named = recorded_products(self.begun_with[device.device_kind])[1]
        if named == "auto" and self.bundle is not None:
            named = "xla"
        choice = ProductChoice(implementation=named)
        if named == "auto":
            choice = choose_products(registry.quantised_spec(spec, self.config.weights), self.config, device)
        return ProductChoice(**told(dataclasses.asdict(choice)))  # told in every case: only process 0 knows begun_with

    def _tiles(self, choice: AttentionChoice) -> str | None:
        """Those of the choice; named ones are not for "xla" where a check chose that."""
        if choice.implementation == "xla" != self.config.implementation:
            return None
        return choice.tiles or self.config.attention_tiles

    def _reach(self, spec: ModelSpec, prompts: PromptEncoder, sentence: SentenceLayout) -> Reach | None:
        """The reach of the requests that will come; None if they are not known."""
        most = self._longest
        ids = prompt_ids(prompts.token_ids, self._embedder(prompts, sentence, most))
        reach = told(self.reach and self.reach(ids, most))
        if reach is None or self.bundle is None:
            return reach
        return dataclasses.replace(reach, request_tokens=None)  # a bundle's executables know one width of tables

    def _encoder(
        self, spec: EncoderSpec, sentence: SentenceLayout, check: Callable[[EncoderLayout, bytes | None], None]
    ) -> tuple[Encoder, BundledExecutables | None]:
        refuse_several_processes(spec.architecture)
        mesh = make_mesh(self.config.mesh_shape, self.config.among(jax.devices()))
        store, bundled = self._executable_caches(mesh.devices.flatten().tolist())
        encoder = load_encoder(
            spec, self.source.read, self.config, mesh, sentence, bundled or store, self.on_progress, check
        )
        folder = self.source.folder
        behind = () if folder is None else tuple(step.load(folder) for step in sentence.dense)
        return dataclasses.replace(encoder, behind=behind), bundled

    def _executable_caches(self, devices: Sequence[Any]) -> tuple[ExecutableStore | None, BundledExecutables | None]:
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


def _token_logits(model: Loaded, token_ids: Sequence[int]) -> TokenLogits:
    weights = dict(zip(model.layout.targets, model.weights, strict=True))
    return TokenLogits.of(model.layout.spec, weights, token_ids)


def config_of(
    config: EngineConfig | None, given: Mapping[str, Any], bundle: str | os.PathLike[str] | None = None
) -> EngineConfig | None:
    """The config that `LLM` is given, by fields too; these are over those of a bundle where there is no config.

    Raises TypeError and ValueError as `engine_fields` and `with_fields` do.
    """
    fields = engine_fields(given)
    if config is None and bundle is not None and fields:
        return dataclasses.replace(config_for(None, Bundle.open(os.fspath(bundle))), **fields)
    return with_fields(config, fields)


def tell_processes(**arguments: Any) -> dict[str, Any]:
    """The arguments of `LLM` with a commit for revision. Process 0 lets the others open the same, but for what it alone
    writes, so that a branch that moves meanwhile moves for none of them."""
    arguments["revision"] = commit_of(os.fspath(arguments["model"]), arguments["revision"])
    processes, config = current(), arguments["config"]
    if processes is not None and processes.leads:
        quiet = None if config is None else dataclasses.replace(config, request_log=None)
        paths = {name: os.fspath(path) for name, path in arguments.items() if isinstance(path, os.PathLike)}
        processes.open(arguments | paths | {"config": quiet})
    return arguments
