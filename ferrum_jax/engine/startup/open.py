"""Opening: from what a user names to what an open LLM has.

`Opening` is a load request (a model, a config, perhaps a bundle and the reach of the requests to come) and the way to
meet it. `Opened` is what came of it: a model, ready, and how texts get to it.

    texts ─► choose (mesh, implementations, executables: `chosen.py`) ─► load ─► ready
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax

from checkpoints import open_checkpoint
from checkpoints.fingerprints import Fingerprint
from checkpoints.hub import Show, commit_of
from checkpoints.sentence import SentenceLayout, read_sentence_layout
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.core import EngineCore
from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.engine.startup.chosen import Chosen, choose
from ferrum_jax.engine.startup.fit_or_shrink import Start
from ferrum_jax.engine.startup.load import Loaded
from ferrum_jax.engine.startup.load_encoder import LoadedEncoder, build_encoder_engine, load_encoder
from ferrum_jax.engine.startup.load_request import LoadRequest
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.inputs.audio.prompt_sounds import PromptSounds
from ferrum_jax.inputs.audio.sound_sources import SoundSources
from ferrum_jax.inputs.identity import ModelIdentity
from ferrum_jax.inputs.images.prompt_images import PromptImages
from ferrum_jax.inputs.images.sources import ImageSources
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.inputs.sizes.speculative import asks_the_model
from ferrum_jax.models.families.encoder_spec import EncoderSpec
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.planning.meshes.on_paper import Subject
from ferrum_jax.planning.meshes.settle import choose_mesh
from ferrum_jax.runtime.compile.bundle import Bundle, config_for
from ferrum_jax.runtime.compile.compile import CompileCounter
from ferrum_jax.runtime.compile.environment import Environment
from ferrum_jax.runtime.distributed.processes import current, told
from ferrum_jax.runtime.layout import Layout, ModelLayout, lay_out
from ferrum_jax.sampling_params import GENERATION, SamplingParams
from ferrum_jax.tasks.calls.fields import engine_fields, with_fields
from ferrum_jax.tasks.classifier import Classifier
from ferrum_jax.tasks.embedder import Embedder
from ferrum_jax.tasks.scorer import Scorer
from ferrum_jax.tasks.texts import Texts
from ferrum_jax.tasks.transcription.prompt_transcriber import PromptTranscriber
from ferrum_jax.tasks.transcription.transcriber import Transcriber
from ferrum_jax.tasks.transcription.whisper_transcriber import WhisperTranscriber
from ferrum_jax.text.chat import ChatTemplate
from ferrum_jax.text.prompts import PromptEncoder
from ferrum_jax.text.structured.reading.message_stream import MessageForms
from ferrum_jax.text.tokenizer import Tokenizer, require_tokenizer

Ready = Loaded | LoadedEncoder  # weights and executables, from which engines are made; who asks need not know its kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """An open LLM's parts beside its engine. build: a fresh engine, from the arguments of `build_engine`.

    config: with nothing left open that was chosen. identity: of it all. num_compiles: of the opening; `counter` goes on
    counting. choices: sentences of what else was chosen where the config leaves it open and there was a choice.
    """

    config: EngineConfig
    chosen: Chosen
    model: Ready
    build: Callable[..., EngineCore]
    identity: ModelIdentity
    texts: Texts
    embedder: Embedder
    scorer: Scorer | None
    classifier: Classifier | None
    counter: CompileCounter
    num_compiles: int
    startup_s: float
    choices: tuple[str, ...]

    @property
    def forms(self) -> MessageForms:
        """In which the model writes calls and reasoning."""
        return forms_of(self.texts.prompts, self.config)

    def with_new_weights(self, model: Ready) -> Opened:
        """This record with the model's new weights."""
        return dataclasses.replace(self, model=model, scorer=model.scorer(self.texts))


def forms_of(prompts: PromptEncoder, config: EngineConfig) -> MessageForms:
    """In which forms a checkpoint writes calls and reasoning, as its chat template shows them or the config says."""
    template = None if prompts.chat is None else prompts.chat.with_tools().source
    return MessageForms.of_template(template, tools=config.tool_form, reasoning=config.reasoning_form)


class Opening(LoadRequest):
    """The request, and how it is met."""

    @classmethod
    def of_checkpoint(
        cls,
        model: str,
        config: EngineConfig | None,
        *,
        revision: str | None = None,
        bundle: str | os.PathLike[str] | None = None,
        require_bundle: bool = False,
        on_progress: Show | None = None,
        **others: Any,
    ) -> Self:
        """Raises ValueError for a checkpoint or bundle that is none."""
        opened = None if bundle is None else Bundle.open(os.fspath(bundle))
        if require_bundle and opened is None:
            raise ValueError("require_bundle is set, and no bundle is named; give bundle=DIR")
        config = config_for(config, opened)
        checkpoint = open_checkpoint(model, revision, on_progress=on_progress)
        source = ModelSource.of_checkpoint(checkpoint, mtp=asks_the_model(config.speculative_config))
        others |= {} if on_progress is None else {"on_progress": on_progress}
        source = source if config.max_image_tokens else source.for_text()
        return cls(source=source, config=config, bundle=opened, require_bundle=require_bundle, **others)

    def run(self) -> tuple[Opened, EngineCore]:
        """With the first engine. Raises ValueError for what cannot run here."""
        started, counter = time.perf_counter(), CompileCounter()
        texts = self.texts()
        forms = forms_of(texts.prompts, self.config)  # refuses names that mean nothing
        chosen = choose(self, texts.sentence.max_seq_length)

        def check(layout: ModelLayout, fingerprint: Fingerprint | None) -> None:
            self.on_identity(self._identity(texts, chosen.config, layout, fingerprint))

        model, engine, build = self._load(texts, forms, chosen, check)
        layout = model.layout
        opened = Opened(
            config=dataclasses.replace(self.config, mesh=chosen.config.mesh, max_num_seqs=layout.max_num_seqs),
            chosen=chosen,
            model=model,
            build=build,
            identity=self._identity(texts, chosen.config, layout, model.fingerprint),
            texts=texts,
            embedder=texts.embedder(self.longest_text(texts, model.max_text_tokens)),
            scorer=model.scorer(texts),
            classifier=model.classifier(texts),
            counter=counter,
            num_compiles=counter.count,
            startup_s=time.perf_counter() - started,
            choices=tuple(filter(None, (chosen.why_mesh, layout.why_bounded))),
        )
        return opened, engine

    def _load(
        self,
        texts: Texts,
        forms: MessageForms,
        chosen: Chosen,
        check: Callable[[ModelLayout, Fingerprint | None], None],
    ) -> tuple[Ready, EngineCore, Callable[..., EngineCore]]:
        """The model, its first engine, and what makes the next ones. Which kind of engine it has is chosen here."""
        if isinstance(self.source.spec, EncoderSpec):
            loaded = load_encoder(
                self.source.spec,
                self.source.read,
                chosen.config,
                chosen.mesh,
                texts.sentence,
                chosen.executable_cache,
                self.on_progress,
                check,
                folder=self.source.folder,
            )
            return loaded, build_encoder_engine(loaded), build_encoder_engine
        start = Start(
            model=self.ended(texts),
            config=chosen.config,
            mesh=chosen.mesh,
            executable_cache=chosen.executable_cache,
            tokenizer=texts.prompts.tokenizer,
            forms=forms,
            on_progress=self.on_progress,
            store=chosen.store if chosen.bundled is None else None,
            check=check,
        )
        return *start.run(self.requests(texts)), build_engine

    def texts(self) -> Texts:
        """How texts get to the model. Raises ValueError for files that say what it cannot do."""
        source, own = self.source, self.tokenizer
        tokenizer = None if source.folder is None else Tokenizer.load(source.folder)
        if own is not None:
            tokenizer = require_tokenizer(Tokenizer.load(own), own)
        where = own or source.folder
        sentence = SentenceLayout() if source.folder is None else read_sentence_layout(source.folder)
        if sentence.dense and not source.reads_whole:
            raise ValueError(
                f"{source.spec.architecture} has Dense layers behind its pooling, which only encoders are served with"
            )
        prompts = PromptEncoder(
            tokenizer=tokenizer,
            chat=None if where is None else ChatTemplate.load(where),
            images=self._images(),
            sounds=self._sounds(),
            max_model_len=self.max_model_len,
            hears=source.hears_beside,
        )
        return Texts(
            prompts=prompts,
            sentence=sentence,
            poolings=source.poolings,
            vocab_size=source.spec.vocab_size,
            score_tokens=self.config.score_tokens,
            vectors_only=source.vectors_only,
            transcriber=self._transcriber(prompts),
            classifier=source.classifier,
            generation=self._generation(),
        )

    def _generation(self) -> dict[str, Any]:
        """How requests are sampled that say nothing of it. Raises ValueError for a file that says what cannot be."""
        given = self.source.generation
        if self.config.generation_config == "none":
            return {}
        found = {name: given[name] for name in GENERATION if given.get(name) is not None}
        try:
            params = SamplingParams(**found)
        except ValueError as error:
            raise ValueError(f"generation_config.json: {error}; correct it, or set generation_config='none'") from error
        return {name: getattr(params, name) for name in found}

    def ended(self, texts: Texts) -> ModelSource:
        """The model, whose texts the tokenizer's end token ends too: chat fine-tunes may name theirs there alone."""
        source, tokenizer = self.source, texts.prompts.tokenizer
        end = None if tokenizer is None else tokenizer.eos_id
        if end is None or not isinstance(source.spec, ModelSpec) or end >= source.spec.vocab_size:
            return source
        return dataclasses.replace(source, end_ids=source.end_ids | {end} - {*source.spec.eos_token_ids})

    def longest_text(self, texts: Texts, most: int) -> int:
        """Tokens of a text that becomes a vector: as the checkpoint says, unless config.max_model_len does."""
        own = texts.sentence.max_seq_length
        return most if own is None or self.config.max_model_len is not None else min(own, most)

    def requests(self, texts: Texts) -> Reach | None:
        """The reach of the requests that will come, to a model that generates; None if they are not known."""
        most = self.max_model_len
        reach = told(self.reach and self.reach(texts.token_ids(self.longest_text(texts, most)), most))
        if reach is None or self.bundle is None:
            return reach
        return dataclasses.replace(reach, request_tokens=None)  # a bundle's executables know one width of tables

    def on_paper(self, reach: Reach | None) -> Layout:
        """The layout of a model that generates on the devices that are here, which are left as they are."""
        assert isinstance(self.source.spec, ModelSpec), "only models that generate have pools to plan"
        subject = Subject(spec=self.source.spec, config=self.config)
        devices = self.config.among(jax.devices())
        config = subject.with_mesh(choose_mesh(subject, devices).mesh).config
        return lay_out(self.source.spec, config, make_mesh(config.mesh_shape, devices), reach)

    @property
    def max_model_len(self) -> int:
        """Tokens that a sequence may have before memory is planned."""
        return self.config.max_model_len or self.source.spec.max_position_embeddings

    @property
    def _media(self) -> tuple[str, str | None]:
        return self.config.allow_image_hosts, self.config.image_root

    def _images(self) -> PromptImages | None:
        """How prompts have images, of a model that sees them and whose folder says how they are processed."""
        source = self.source
        if source.folder is None or not source.sees_images or not self.config.max_image_tokens:
            return None
        return PromptImages.of_folder(source.folder, ImageSources.allowed(*self._media))

    def _sounds(self) -> PromptSounds | None:
        """How prompts have sounds, of a model that hears them and whose folder says how they are processed."""
        source, config = self.source, self.config
        if source.folder is None or not source.hears_in_prompts or not config.max_image_tokens:
            return None
        return PromptSounds.of_folder(source.folder, SoundSources.allowed(*self._media), config.max_image_patches)

    def _transcriber(self, prompts: PromptEncoder) -> Transcriber | None:
        """How the model writes down sounds, where it does and its folder says how."""
        if self.source.folder is None or not self.source.hears_beside:
            return PromptTranscriber.of_prompts(prompts)
        return WhisperTranscriber.of_folder(self.source.folder, prompts, SoundSources.allowed(*self._media))

    def _identity(
        self, texts: Texts, config: EngineConfig, layout: ModelLayout, fingerprint: Fingerprint | None
    ) -> ModelIdentity:
        """fingerprint: of the weights, None before they are read."""
        prompts, device = texts.prompts, layout.mesh.devices.flat[0]
        media = prompts.images or prompts.sounds or texts.transcriber
        environment = dataclasses.asdict(Environment.of_device(device)) | {"mesh": str(config.mesh_shape)}
        return ModelIdentity(
            weights=None if fingerprint is None else fingerprint.digest.hex(),
            weights_once=None if fingerprint is None else fingerprint.once.hex(),
            tokenizer=None if prompts.tokenizer is None else prompts.tokenizer.digest,
            chat_template=None if prompts.chat is None else prompts.chat.digest,
            end_tokens=tuple(sorted(self.ended(texts).end_ids)),
            vectors=json.dumps(dataclasses.asdict(texts.sentence), sort_keys=True),
            dtype=layout.dtype.name,
            kv_dtype=layout.kv_dtype,
            max_model_len=layout.max_model_len,
            invariant=config.invariant,
            adapter=None if config.max_adapters else "",
            generation=texts.generation,
            images=None if media is None else media.digest,
            environment=environment | layout.recorded,
        )


def config_of(
    config: EngineConfig | None, given: Mapping[str, Any], bundle: str | os.PathLike[str] | None = None
) -> EngineConfig | None:
    """The config that `LLM` is given, by fields too; these are over those of a bundle where there is no config.

    Raises TypeError and ValueError as `engine_fields` and `with_fields` do.
    """
    fields = engine_fields(given)
    if config is None and bundle is not None and fields:
        return EngineConfig(**{**Bundle.open(os.fspath(bundle)).purpose.config, **fields})
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
