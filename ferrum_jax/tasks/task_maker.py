"""TaskMaker: one model's way from what users ask to tasks."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrum_jax.core.outputs import ClassOutput, RequestOutput, RewardOutput, SequenceLogprobs, Transcription
from ferrum_jax.core.request_options import NO_OPTIONS, RequestOptions
from ferrum_jax.inputs.images.decoding import Look, do_not_look
from ferrum_jax.inputs.prompt import Prompt, is_messages, listed
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.classifier import Classifier, require_classifier, require_reward
from ferrum_jax.tasks.embedder import Embedder, EmbeddingParams
from ferrum_jax.tasks.logprobs import Completion, completion_ids, completions_for, logprobs_task
from ferrum_jax.tasks.score import PairTasks
from ferrum_jax.tasks.scorer import Scorer
from ferrum_jax.tasks.task import Answer, EngineRequest, Task, completion, generates_nothing
from ferrum_jax.tasks.transcription.heard_sound import HeardSound
from ferrum_jax.text.prompts import PromptEncoder

MakeOfPrompt = Callable[[Prompt, str], Task[Answer]]  # of a text and the key of its request


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TaskMaker:
    """Makes the tasks of one model; any thread may ask. Each method raises ValueError for what cannot be served.

    why_vectors: the reason why a model generates nothing, "" where it does. name: its architecture.
    """

    prompts: PromptEncoder
    embedder: Embedder
    scorer: Scorer | None
    classifier: Classifier | None
    max_model_len: int
    vocab_size: int
    name: str
    why_vectors: str = ""

    @property
    def refusal(self) -> str:
        """The reason against asking a model for tokens that generates nothing."""
        return generates_nothing(self.name, self.why_vectors)

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        options: RequestOptions,
        now: datetime.datetime | None = None,
        *,
        look: Look = do_not_look,
    ) -> EngineRequest:
        """A prompt as the engine takes it, with what the prompt says of itself.

        sampling: if it keeps an end of the prompt, what stands before may be left out. look: called between images;
        what it raises ends the work.
        """
        self._require_tokens(options)
        kept = sampling.most_prompt_tokens(self.max_model_len)
        told = options.told_by(prompt)
        encoded = self.prompts.encoded(prompt, now, kept=kept, look=look)
        return EngineRequest(
            encoded.token_ids, sampling, dataclasses.replace(told, media=encoded.media, images=encoded.images)
        )

    def _require_tokens(self, options: RequestOptions) -> None:
        if self.why_vectors and not options.embeds:
            raise ValueError(self.refusal)

    def completion(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        options: RequestOptions,
        now: datetime.datetime | None = None,
        *,
        fails: bool = False,
    ) -> Task[RequestOutput]:
        """A prompt that goes on. fails: as of `task.completion`."""
        return completion(self.request(prompt, sampling, options, now), fails=fails)

    def logprobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[Completion] | None,
        mode: str,
        params: SamplingParams,
    ) -> list[Task[SequenceLogprobs]]:
        """Log-probabilities of each completion, or of the prompts themselves; all see the same time of day.

        params: as `score_params` gives them. A ValueError names the prompt.
        """
        self._require_tokens(NO_OPTIONS)
        found, now, many = list[Task[SequenceLogprobs]](), datetime.datetime.now(), listed(prompts)
        for number, (prompt, given) in enumerate(completions_for(many, completions)):
            try:
                request = self.request(prompt, SamplingParams(), RequestOptions(), now)._replace(sampling=params)
                behind = completion_ids(given, self.prompts.tokenizer, self.max_model_len)
                found.append(logprobs_task(request, behind, mode, self.vocab_size))
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
        return found

    def transcription(self, heard: HeardSound, key: object = "", priority: int = 0) -> Task[Transcription]:
        """A sound that was read. key: seeds its windows, with their places. priority: lower runs first."""
        return heard.task(self.request, key, priority)

    def pairs(self, truncate: bool = False, instruction: str | None = None) -> PairTasks:
        """Makes scores of the pairs of a call."""
        return PairTasks(self.scorer, self.embedder, {"truncate": truncate, "instruction": instruction}, self.name)

    def classification(self, truncate: bool = False) -> MakeOfPrompt[ClassOutput]:
        """Makes the class of a text, or of a conversation. Raises ValueError for a model that is no classifier."""
        own = require_classifier(self.classifier, self.name)
        return functools.partial(self._read_by_head, own, own.class_of, truncate)

    def reward(self, truncate: bool = False) -> MakeOfPrompt[RewardOutput]:
        """Makes the reward of a text, or of a conversation. Raises ValueError unless the model gives one number."""
        own = require_reward(self.classifier, self.name)
        return functools.partial(self._read_by_head, own, own.reward_of, truncate)

    def _read_by_head(
        self,
        own: Classifier,
        finish: Callable[[Sequence[RequestOutput]], Answer],
        truncate: bool,
        prompt: Prompt,
        key: str = "",
    ) -> Task[Answer]:
        """A text up to the token that the head reads; no answer is begun in a conversation."""
        given: Any = {"messages": prompt} if is_messages(prompt) else prompt
        if isinstance(given, Mapping) and "messages" in given:
            ids = self.prompts.token_ids({"add_generation_prompt": False, **given})
            given = {"prompt_token_ids": list(ids), "cache_salt": given.get("cache_salt")}
        most = self.embedder.most(truncate)
        params = EmbeddingParams(pooling="cls", normalize=False, max_tokens=most)
        request = self.embedder.request(given, params, key=key)
        return Task([request._replace(token_ids=own.read_tokens(request.token_ids))], finish)
