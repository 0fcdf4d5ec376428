"""Texts: how a model's prompts, and the texts that become vectors or scores, get to it."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from checkpoints.sentence import SentenceLayout
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.inputs.prompt import Prompt, PromptParts, take_apart
from ferrum_jax.tasks.classifier import Classifier
from ferrum_jax.tasks.embedder import Embedder
from ferrum_jax.tasks.transcription.foreseen import ForeseenSound, foreseen
from ferrum_jax.tasks.transcription.transcriber import Transcriber, require_transcriber
from ferrum_jax.text.prompts import PromptEncoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """prompts: to token ids. sentence: what the checkpoint says of vectors. poolings: those that the model can do.

    score_tokens: see EngineConfig. vectors_only: why the model generates nothing; "" where it does.
    transcriber: of a model that writes down sounds. classifier: of a decoder with a head for classes.
    generation: how requests are sampled that say nothing of it.
    """

    prompts: PromptEncoder
    sentence: SentenceLayout
    poolings: Sequence[str]
    vocab_size: int
    score_tokens: str | None = None
    vectors_only: str = ""
    transcriber: Transcriber | None = None
    classifier: Classifier | None = None
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def embedder(self, max_tokens: int) -> Embedder:
        """max_tokens: of a text."""
        return Embedder(
            self.sentence,
            self.prompts.tokenizer,
            poolings=self.poolings,
            vocab_size=self.vocab_size,
            max_tokens=max_tokens,
        )

    def token_ids(self, max_tokens: int) -> TextIds:
        """From a prompt, or a text of at most `max_tokens` that is embedded, to its token ids."""
        return TextIds(
            prompts=self.prompts,
            embedder=self.embedder(max_tokens),
            transcriber=self.transcriber,
            generation=self.generation,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextIds:
    """`PromptIds` of texts, and what is known of sounds before they are read. generation: as of Texts."""

    prompts: PromptEncoder
    embedder: Embedder
    transcriber: Transcriber | None
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(
        self,
        prompt: Prompt,
        /,
        *,
        embeds: bool = False,
        now: datetime.datetime | None = None,
        kept: int | None = None,
    ) -> Sequence[int]:
        if not embeds:
            return self.prompts.token_ids(prompt, now, kept=kept)
        parts = take_apart(prompt)
        text = PromptParts(content=parts.content, vector=parts.vector)
        return self.embedder.task(text, self.embedder.params()).requests[0].token_ids

    def foreseen(self, named: str, params: TranscriptionParams) -> ForeseenSound:
        """The windows of a sound that a job's row names. Raises ValueError for one that cannot be read."""
        return foreseen(require_transcriber(self.transcriber, "this model"), named, params)
