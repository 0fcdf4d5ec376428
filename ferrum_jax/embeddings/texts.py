"""Texts: how a model's prompts, and the texts that become vectors or scores, get to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from checkpoints.sentence import SentenceLayout
from ferrum_jax.embeddings.embedder import Embedder, prompt_ids
from ferrum_jax.prompt import PromptIds
from ferrum_jax.text.prompts import PromptEncoder
from ferrum_jax.transcribing.transcriber import Transcriber


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """prompts: to token ids. sentence: what the checkpoint says of vectors. poolings: those that the model can do.

    score_tokens: see EngineConfig. headless: the model has no head, so that it embeds and nothing else.
    transcriber: of a model that writes down sounds.
    """

    prompts: PromptEncoder
    sentence: SentenceLayout
    poolings: Sequence[str]
    vocab_size: int
    score_tokens: str | None = None
    headless: bool = False
    transcriber: Transcriber | None = None

    def embedder(self, max_tokens: int) -> Embedder:
        """max_tokens: of a text."""
        return Embedder(
            self.sentence,
            self.prompts.tokenizer,
            poolings=self.poolings,
            vocab_size=self.vocab_size,
            max_tokens=max_tokens,
        )

    def token_ids(self, max_tokens: int) -> PromptIds:
        """From a prompt, or a text of at most `max_tokens` that is embedded, to its token ids."""
        return prompt_ids(self.prompts.token_ids, self.embedder(max_tokens))
