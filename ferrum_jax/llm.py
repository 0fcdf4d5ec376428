"""LLM: the Python API. A checkpoint that is loaded and ready to answer.

Opening one reads the checkpoint's description, plans memory and buckets from shapes alone, compiles in
threads while weights load, and is ready when both are done. One LLM serves one thread; calls of that
thread may overlap, such as two streams that are read in turn.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from flax import nnx

from checkpoints.hub import Show
from ferrum_jax.batch.row_tasks import RowTasks
from ferrum_jax.config import EngineConfig
from ferrum_jax.core.outputs import (
    ClassOutput,
    CompletionOutput,
    EmbeddingOutput,
    RequestOutput,
    RewardOutput,
    ScoreOutput,
    SequenceLogprobs,
    Transcription,
)
from ferrum_jax.core.progress import progress_bar
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.engine import Engine
from ferrum_jax.engine.prefixes.prefix_cache_calls import PrefixCacheCalls
from ferrum_jax.engine.shared import SharedEngine
from ferrum_jax.engine.startup.load import Loaded
from ferrum_jax.engine.startup.load_request import Measure
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.engine.startup.new_weights import NewWeights
from ferrum_jax.engine.startup.open import Opening, config_of, tell_processes
from ferrum_jax.engine.startup.open_model import OpenModel
from ferrum_jax.inputs.identity import ModelIdentity
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.inputs.prompt import Message, Prompt, listed, single
from ferrum_jax.runtime.distributed.processes import refuse_several_processes
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.calls.arguments import (
    BEAM_SEARCH,
    ENCODE,
    GET_METRICS,
    checked,
    params_for,
    priorities_for,
    shown,
    with_adapters,
    with_tools,
)
from ferrum_jax.tasks.logprobs import Completion, score_params
from ferrum_jax.tasks.score import Pairs, Scores
from ferrum_jax.tasks.scorer import Pair, paired
from ferrum_jax.tasks.task import Answer, MakeTask, Task
from ferrum_jax.tasks.task_maker import MakeOfPrompt
from ferrum_jax.tasks.transcription.heard_sound import HeardSound
from ferrum_jax.tasks.transcription.reading_ahead import listed_sounds, read_ahead
from ferrum_jax.text.output_processor.collect import in_order
from ferrum_jax.text.tokenizer import Tokenizer, require_tokenizer

Key = TypeVar("Key", bound=Hashable)


class LLM(PrefixCacheCalls):
    """A model that generates, or an encoder, which makes embeddings and nothing else.

    model: a Hugging Face folder, an Orbax checkpoint that `ferrum-jax convert` wrote, or a model of the hub as
    ORG/NAME, whose safetensors, tokenizer and config files are fetched; a folder of that name wins. revision: branch,
    tag or commit of a model of the hub. config: see EngineConfig; None takes the bundle's, or the defaults.
    fields: of EngineConfig, by their names or vLLM's (`tasks/calls/fields.py`); one that contradicts config is refused.
    tokenizer: a folder or tokenizer.json to use instead of the checkpoint's own. bundle: a folder of executables that
    `ferrum-jax compile` made; what it lacks is compiled here, or with `require_bundle` refused.
    reach: called with a function from prompts to token ids and with max_model_len, before anything is compiled; it
    returns the Reach of the requests to come, so that only executables they need are made; longer requests are refused.
    If it is or returns None, any request may come. on_progress: called with (what, done, total) during the start; None
    shows bars for downloads. on_problem: called with a sentence for each executable that the bundle lacks.
    on_identity: called with everything that can change an answer, before weights are read and again afterwards; if it
    raises, the start ends. begun_with: for a job that is continued, the attention implementation that it has used on
    each kind of device.

    Raises ValueError, before weights are read, for what cannot run here: all reasons at once.
    """

    encode, beam_search, get_metrics = ENCODE, BEAM_SEARCH, GET_METRICS

    def __init__(
        self,
        model: str,
        config: EngineConfig | None = None,
        *,
        revision: str | None = None,
        tokenizer: str | None = None,
        bundle: str | os.PathLike[str] | None = None,
        require_bundle: bool = False,
        reach: Measure | None = None,
        on_progress: Show | None = None,
        on_problem: Callable[[str], None] = lambda text: None,
        on_identity: Callable[[ModelIdentity], None] = lambda identity: None,
        begun_with: Mapping[str, str] = MappingProxyType({}),
        **fields: Any,
    ) -> None:
        order = tell_processes(
            model=model,
            config=config_of(config, fields, bundle),
            revision=revision,
            tokenizer=tokenizer,
            bundle=bundle,
            require_bundle=require_bundle,
        )
        opening = Opening.of_checkpoint(
            **order,
            reach=reach,
            on_progress=on_progress,
            on_problem=on_problem,
            on_identity=on_identity,
            begun_with=begun_with,
        )
        self._take(opening)

    @classmethod
    def from_model(
        cls,
        model: nnx.Module,
        config: EngineConfig | None = None,
        *,
        tokenizer: str | None = None,
        on_progress: Show = lambda what, done, total: None,
        **fields: Any,
    ) -> LLM:
        """An LLM over a model in memory of `ferrum_jax.models.families`; its weights are copied, cast to config.dtype.

        tokenizer: a folder or tokenizer.json; without it prompts are token ids. fields, errors: as for `LLM`.
        """
        refuse_several_processes("LLM.from_model")
        return cls.from_source(
            ModelSource.of_model(model), config, tokenizer=tokenizer, on_progress=on_progress, **fields
        )

    @classmethod
    def from_source(
        cls,
        source: ModelSource,
        config: EngineConfig | None = None,
        *,
        tokenizer: str | None = None,
        on_progress: Show = lambda what, done, total: None,
        **fields: Any,
    ) -> LLM:
        """An LLM over weights that `source` loads onto the devices. The other arguments are those of `from_model`."""
        refuse_several_processes("LLM.from_source")
        llm, config = cls.__new__(cls), config_of(config, fields) or EngineConfig()
        llm._take(Opening(source=source, config=config, tokenizer=tokenizer, on_progress=on_progress))
        return llm

    def update_weights(
        self,
        state: NewWeights,
        *,
        requests: str | None = None,
        partial: bool = False,
        names: Mapping[str, str] | None = None,
        cast: bool = False,
    ) -> int:
        """Takes copies of other weights, without a compile; returns the version, the number of updates so far.

        state: a model, its state, or a mapping of names to arrays: dotted paths of parameters, or the names of a
        Hugging Face checkpoint, which go through the rules that loading has. Arrays may be on any devices, in any
        sharding: they go from device to device where no tensor is cut, stacked or quantised. Or a checkpoint's folder.
        requests: the fate of running requests: "abort" ends them, "wait" lets them end first, "keep" goes on over the
        KV that they have; their outputs name the version of each token. None refuses while any run.
        partial: parameters that `state` lacks stay as they are. names: the name that each of these is meant by.
        cast: take other dtypes than the engine's; tensors of a checkpoint are cast as loading casts them.

        Nothing that was computed with the old weights is hit afterwards, and caches saved before are refused; pins are
        gone. Each parameter replaces the old one before the next is copied. Raises ValueError, with nothing changed,
        for all arrays that do not fit.
        """
        return self.model.update_weights(state, requests=requests, partial=partial, names=names, cast=cast)

    def sleep(self, level: int = 1) -> dict[str, int]:
        """Makes room for others on the devices; returns the bytes that each device has more, of weights and KV.

        level: 1 moves the weights to host memory and drops KV and what is cached; 2 drops both, and `update_weights`
        brings weights. Raises ValueError while requests run, and where it sleeps already.
        """
        return self.model.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Undoes `sleep`, without a compile. tags: "weights", "kv_cache"; None is all that sleeps.

        Requests run once both are awake, and after level 2 once `update_weights` has brought weights: it does so while
        the rest sleeps, too. Raises ValueError for what does not sleep.
        """
        self.model.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV sleep."""
        return bool(self.model.asleep)

    @property
    def weights_version(self) -> int:
        """How often the weights were updated."""
        return self.model.opened.model.weights_version

    def weights_checksum(self) -> str:
        """A digest of every bit of the weights as they are on the devices, in hexadecimal; all of them are read.

        Engines of one model have equal ones where their meshes, dtypes and weights are equal. Raises ValueError while
        weights sleep.
        """
        return self.model.weights_checksum()

    def _take(self, opening: Opening) -> None:
        self._process = os.getpid()
        self._model = model = OpenModel(opening)
        opened, chosen = model.opened, model.opened.chosen
        self.spec, self.config, self.tokenizer = model.spec, model.config, model.prompts.tokenizer
        self.ledger, self.max_model_len = model.ledger, model.max_model_len
        self.bundled, self.attention, self.products = chosen.bundled, chosen.attention, chosen.products
        self.startup_s, self.choices = opened.startup_s, opened.choices
        self.refused_products, self.host_memory_kind = model.refused_products, model.host_memory_kind

    @property
    def model(self) -> OpenModel:
        """The opened model. Raises RuntimeError in a forked child, where no thread of jax runs and every call hangs."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this LLM was opened in process {self._process}, and process {os.getpid()} is a fork of it; open "
                'it in the process that uses it, or start processes by multiprocessing.get_context("spawn")'
            )
        return self._model

    @property
    def loaded(self) -> Loaded:
        """Weights and executables of a model that reads token by token. Raises ValueError for an encoder."""
        return self.model.loaded

    @property
    def identity(self) -> ModelIdentity:
        """Everything that can change an answer, and the environment."""
        return self.model.identity

    @property
    def calls(self) -> SharedEngine:
        """The engine with the calls that share it."""
        return self.model.calls

    @property
    def engine(self) -> Engine:
        """The engine, a fresh one if the last was interrupted in a step. Raises ValueError for an encoder's."""
        return self.model.engine

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads the LoRA in a folder that PEFT saved, or behind its URL, for requests that name it.

        Requests may run meanwhile, and nothing is compiled. Another adapter of that name is replaced for those that
        come. Raises ValueError, with nothing changed, for an adapter that does not fit the model or has no room.
        """
        refuse_several_processes("load_adapter")
        self.model.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; requests that have named it run to their end. Raises ValueError for an unknown name."""
        self.model.adapters.unload(name)

    @checked
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        priority: Sequence[int] | None = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """The completion of each prompt, in their order.

        prompts: one or many; see `ferrum_jax.inputs.prompt`. sampling_params: one for all, or one each, taken as they
        are; by default `get_default_sampling_params`. adapter: the name of a loaded one, for all or one each; None is
        none, or what the prompt says.
        priority: one for each prompt; lower runs first, equal ones in order. None is 0 for all.
        progress: whether to show a bar; None shows one only on a terminal. use_tqdm: vLLM's name for it.
        Raises ValueError naming the prompt that cannot be served; nothing has run then.
        """
        many, progress, now = listed(prompts), shown(progress, use_tqdm), datetime.datetime.now()
        sampling_params = self.model.default_params if sampling_params is None else sampling_params
        params, priorities = params_for(many, sampling_params), priorities_for(many, priority)
        make, each = self.model.tasks.completion, zip(with_adapters(many, adapter), params, priorities, strict=True)
        tasks = [
            (index, partial(make, prompt, sampling, RequestOptions(key=str(index), priority=first), now))
            for index, (prompt, sampling, first) in enumerate(each)
        ]
        return _in_order(self.run(tasks, most_running=None), len(tasks), progress)

    def get_default_sampling_params(self) -> SamplingParams:
        """How a request is sampled that says nothing of it: as generation_config.json says, unless that is set aside.

        Its max_tokens is max_new_tokens there; a request without parameters may end before, where there is less room.
        """
        found = self.model.default_params
        return dataclasses.replace(found, max_tokens=found.max_new_tokens or found.max_tokens, max_new_tokens=None)

    @checked
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """The answer to each conversation, through the checkpoint's own chat template; all see the same time of day.

        progress, use_tqdm: as in `generate`. add_generation_prompt: begin a message for the answer; None does so,
        unless continue_final_message is true, with which the answer continues the last message. tools: what the
        template shows of them. tool_choice: "auto", "none" (they are not shown), "required" or one of them, as OpenAI
        writes it. parallel_tool_calls: whether several calls may come. An output's `message` has the calls.
        chat_template_kwargs: further variables of this template, such as {"enable_thinking": False}.
        add_special_tokens: the tokenizer adds special tokens to those that the template writes. adapter: as in
        `generate`.
        """
        sampling_params = self.model.default_params if sampling_params is None else sampling_params
        sampling_params = with_tools(sampling_params, tools, tool_choice, parallel_tool_calls)
        how: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": None if tool_choice == "none" else tools,
            "chat_template_kwargs": chat_template_kwargs,
            "add_special_tokens": add_special_tokens,
        }
        conversations: Sequence[Any] = [messages] if single(messages) else messages
        prompts = [{"messages": conversation, **how} for conversation in conversations]
        return self.generate(prompts, sampling_params, adapter=adapter, progress=progress, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The output of one prompt as it grows: each item holds all text so far; the last one is finished."""
        params = params_for([prompt], sampling_params or self.model.default_params)[0]
        make = partial(self.model.tasks.completion, prompt, params, RequestOptions(streams=True))
        with closing(self.run([(0, make)], most_running=None)) as outputs:
            for _, output in outputs:
                if isinstance(output, ValueError):
                    raise output
                yield output

    def run(
        self,
        tasks: Iterable[tuple[Key, MakeTask[Answer]]],
        *,
        wants_partials: Callable[[], bool] = lambda: False,
        most_running: Callable[[], float] | None = lambda: math.inf,
    ) -> Generator[tuple[Key, Answer | ValueError], None, None]:
        """(key, answer) of each task in the order in which they end; a refused one gives its ValueError.

        tasks: keys, and what makes their tasks, such as the methods of `llm.model.tasks`; read as there is room, so
        they may be endless. wants_partials: asked before every step; True gives the partial answer of every task that
        runs. most_running: how many requests may run or wait together, 1 at least; None reads all tasks, and waits for
        their grammars, before a step.
        """
        return self.model.run(tasks, wants_partials=wants_partials, most_running=most_running)

    def as_completed(
        self,
        requests: Iterable[tuple[Key, Prompt, SamplingParams]],
        *,
        resume: Callable[[Key], Sequence[CompletionOutput]] = lambda key: (),
        wants_partials: Callable[[], bool] = lambda: False,
        most_running: Callable[[], float] = lambda: math.inf,
        embeds: bool = False,
        now: datetime.datetime | None = None,
    ) -> Generator[tuple[Key, RequestOutput | ValueError], None, None]:
        """(key, output) of each request in the order in which they finish; a refused one gives its ValueError.

        `requests` is read as there is room, so it may be endless. A request without a seed gets one from its key, too.
        wants_partials: asked before every step; if it says True, the output so far of every unfinished request is given
        (`finished` is False). most_running: how many may run or wait together, 1 at least. resume: gives the `outputs`
        that a request had in another process, to continue from.
        embeds: outputs have `embedding`, the final hidden state of the prompt's last token. now: the time of day that
        chat templates see; None takes the call's own.
        """
        now, make = now or datetime.datetime.now(), partial(self.model.tasks.completion, fails=True)

        def task(key: Key, prompt: Prompt, params: SamplingParams) -> Task[RequestOutput]:
            return make(prompt, params, RequestOptions(key=str(key), resume=resume(key), embeds=embeds), now)

        tasks = ((request[0], partial(task, *request)) for request in requests)
        return self.run(tasks, wants_partials=wants_partials, most_running=most_running)

    @checked
    def compute_logprobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[Completion] | None = None,
        *,
        top: int = 0,
        mode: str = "raw",
        sampling_params: SamplingParams | None = None,
        progress: bool | None = None,
    ) -> list[SequenceLogprobs]:
        """The log-probability of each token of the completions, given all before it, by one prefill each.

        prompts: one or many; see `ferrum_jax.inputs.prompt`. completions: of each prompt, as token ids or a text; None
        scores the prompts themselves, from their second token on. Prompts that are equal or begin alike are computed
        once where completions follow. top: how many alternatives are reported of each token; -1 reports the whole
        vocabulary. mode: "raw" is the model's own distribution; "processed" is what a token would be drawn from under
        sampling_params: after bias, penalties, temperature, min_p, top_k and top_p.
        Raises ValueError naming the prompt that cannot be served; nothing has run then.
        """
        params = score_params(top, mode, sampling_params, self.model.default_params)
        made = self.model.tasks.logprobs(prompts, completions, mode, params)
        tasks = [(number, lambda task=task: task) for number, task in enumerate(made)]
        return _in_order(self.run(tasks, most_running=None), len(tasks), progress, "texts")

    @checked
    def transcribe(
        self,
        sounds: Any,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: Literal["segment", False] = False,
        prompt: str | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        max_tokens: int | None = None,
        logprobs: bool = False,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[Transcription]:
        """The text of each sound, in their order, by a model such as Whisper.

        sounds: one or many: bytes of a file, pathlib.Path, URLs, or arrays with their rate, as in (samples, 16000).
        Each is cut in windows of 30 s, which run side by side. The next arguments are those of `TranscriptionParams`.
        progress, use_tqdm: as in `generate`; the bar counts sounds. Raises ValueError naming the sound that cannot be
        served.
        """
        params = TranscriptionParams(
            language=language,
            task=task,
            timestamps=timestamps,
            prompt=prompt,
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            logprobs=logprobs,
        )
        many = listed_sounds(sounds)
        outputs = self.transcribe_as_completed((number, sound, params) for number, sound in enumerate(many))
        return _in_order(outputs, len(many), shown(progress, use_tqdm), "sounds")

    def transcribe_as_completed(
        self, requests: Iterable[tuple[Key, Any, TranscriptionParams]]
    ) -> Generator[tuple[Key, Transcription | ValueError], None, None]:
        """(key, transcription) of each sound in the order in which they are ready; a refused one gives its ValueError.

        `requests` is read as there is room, so it may be endless; the next sounds are decoded in threads meanwhile.
        """
        transcriber, make = self.model.transcriber, self.model.tasks.transcription

        def task(key: Key, reading: Future[HeardSound]) -> Task[Transcription]:
            return make(reading.result(), key)

        heard = read_ahead(requests, lambda request: HeardSound.of(transcriber, request[1], request[2]))
        return self.run((key, partial(task, key, reading)) for (key, *_), reading in heard)

    def row_tasks(self, now: datetime.datetime) -> RowTasks:
        """Makes the tasks of a job's rows, for `run`. now: the time of day that chat templates see."""
        return RowTasks(self.model.tasks, now)

    def hear(self, sound: str, params: TranscriptionParams) -> HeardSound:
        """A sound, by its URL or its path below `image_root`, as requests of its windows; any thread may ask.

        For jobs, which run the windows as prompts. Raises ValueError for one that cannot be read, and for what the
        model cannot do.
        """
        transcriber = self.model.transcriber
        return HeardSound.of(transcriber, transcriber.sources.of_row(sound), params)

    @checked
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """The vector of each text, in their order, as `embedding` [D] float32.

        prompts: texts or token ids. An argument that is None is as the checkpoint's sentence-transformers files say;
        without these, an encoder gives the mean of its states and a model that generates its last token's state, not
        normalised. prompt_name: which of the checkpoint's prompts to put before each text. pooling: "mean", "cls" or
        "last". truncate: cut texts that are too long. progress, use_tqdm: as in `generate`. Raises ValueError naming
        the prompt that cannot be served.
        """
        many, progress = listed(prompts), shown(progress, use_tqdm)
        outputs = self.embed_as_completed(
            enumerate(many), prompt_name=prompt_name, pooling=pooling, normalize=normalize, truncate=truncate
        )
        return _in_order(outputs, len(many), progress, "texts")

    def embed_as_completed(
        self,
        requests: Iterable[tuple[Key, Prompt]],
        *,
        prompt_name: str | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> Generator[tuple[Key, EmbeddingOutput | ValueError], None, None]:
        """(key, vector) of each text in the order in which they are ready; a refused one gives its ValueError.

        `requests` is read as there is room, so it may be endless. The rest is as in `embed`.
        """
        how = {"prompt_name": prompt_name, "pooling": pooling, "normalize": normalize, "truncate": truncate}
        embedder = self.model.embedder
        make = partial(embedder.task, params=embedder.params(**how), how=how)
        return self.run((key, partial(make, prompt, key=str(key))) for key, prompt in requests)

    @checked
    def score(
        self,
        pairs: Sequence[Pair] | str,
        documents: str | Sequence[str] | None = None,
        *,
        truncate: bool = False,
        instruction: str | None = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[ScoreOutput]:
        """How well the two texts of each pair fit, in their order, by a model of pairs, or the cosine of their vectors.

        pairs: of texts, a query and a document, or objects with `query` and `document`, and perhaps their own
        `instruction`. A score with a sigmoid is in [0, 1]. documents: with them, pairs are queries, as vLLM has it: one
        for all, or one each. truncate: cut pairs that are too long. instruction: what makes a document fit, for
        models that are told, such as Qwen3-Reranker. progress, use_tqdm: as in `generate`. Raises ValueError naming the
        pair that cannot be served, and for a model that does neither.
        """
        pairs = pairs if documents is None else paired(pairs, documents)
        outputs = self.score_as_completed(enumerate(pairs), truncate=truncate, instruction=instruction)
        return _in_order(outputs, len(pairs), shown(progress, use_tqdm), "texts")

    def score_as_completed(
        self, requests: Pairs[Key], *, truncate: bool = False, instruction: str | None = None
    ) -> Scores[Key]:
        """(key, score) of each pair in the order in which they are ready; a refused one gives its ValueError."""
        make = self.model.tasks.pairs(truncate, instruction)
        return self.run((key, partial(make, pair, str(key))) for key, pair in requests)

    @checked
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate: bool = False,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[ClassOutput]:
        """The class of each text, in their order, with the probabilities of all, by a model with a head for them.

        prompts: texts, token ids, or conversations, which the chat template writes. Probabilities are as the config's
        problem_type says. truncate: cut texts that are too long. progress, use_tqdm: as in `generate`. Raises
        ValueError naming the prompt that cannot be served, and for a model that is no classifier.
        """
        return self._of_prompts(self.model.tasks.classification(truncate), prompts, shown(progress, use_tqdm))

    @checked
    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate: bool = False,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RewardOutput]:
        """How good each text is, in their order, by a reward model: the one logit of its head.

        Arguments are those of `classify`. Raises ValueError too for a model of several labels.
        """
        return self._of_prompts(self.model.tasks.reward(truncate), prompts, shown(progress, use_tqdm))

    def _of_prompts(
        self, make: MakeOfPrompt[Answer], prompts: Prompt | Sequence[Prompt], show: bool | None
    ) -> list[Answer]:
        many = listed(prompts)
        outputs = self.run((number, partial(make, prompt, str(number))) for number, prompt in enumerate(many))
        return _in_order(outputs, len(many), show, "texts")

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer: `encode` gives the token ids of a text, `decode` the text. Raises ValueError without one."""
        return require_tokenizer(self.tokenizer, "the model")

    def render_chat(self, messages: Sequence[Message], **arguments: Any) -> str:
        """The text that the checkpoint's chat template makes of messages; arguments as in `chat`."""
        return self.model.prompts.render_chat(messages, **arguments)

    def progress(self) -> dict[str, tuple[float, float, float]]:
        """How far the requests of `as_completed` are that have not ended, by `str(key)`.

        (tokens of the prompt that are computed, all of them, tokens written by all choices) of each.
        """
        return self.model.progress()

    def stats(self) -> dict[str, Any]:
        """One JSON-ready snapshot: prefix cache, steps, padding, compiles, memory.

        Counts are sums over all data shards; bytes of weights and pools are those of one device.
        """
        return self.model.stats()


def _in_order(
    answers: Generator[tuple[int, Answer | ValueError], None, None],
    total: int,
    show: bool | None,
    what: str = "completions",
) -> list[Answer]:
    """The answers in the order of their numbers, with a bar while they come. Raises ValueError as `in_order`."""
    with progress_bar(total, shown=show, what=what) as advance:
        return in_order(answers, advance, what="sound" if what == "sounds" else "prompt")
