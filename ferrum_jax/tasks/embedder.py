"""Embeddings: what a text becomes before a model sees it, and what its vector becomes after.

A checkpoint may say how its vectors are made (`checkpoints/sentence.py`); a call may say otherwise. `Embedder`
settles that into `EmbeddingParams` and refuses what the model cannot do, before anything runs.
"""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from checkpoints.sentence import SentenceLayout
from ferrum_jax.core.outputs import EmbeddingOutput, RequestOutput, unit_length
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.prompt import Prompt, PromptParts, take_apart
from ferrum_jax.tasks.task import ONE_TOKEN, EngineRequest, Task, vector_in
from ferrum_jax.text.tokenizer import Tokenizer

UNTRAINED = (
    "the model was made to generate: its vectors are final states of the last token, which no training made alike for "
    "texts that mean the same; take a model for embeddings where vectors are compared"
)
_log = logging.getLogger("ferrum_jax.tasks")
NO_WISHES: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingParams:
    """How the texts of a call become vectors.

    prefix: what is put before each. max_tokens: longer texts are cut to this; None refuses long texts.
    """

    pooling: str
    normalize: bool
    prefix: str = ""
    lower_case: bool = False
    max_tokens: int | None = None


class Embedder:
    """One model's way from prompts to token ids and from pooled states to vectors.

    layout: what the checkpoint says. poolings: those that the model can do, the one that a checkpoint without a word
    takes first. max_tokens: of a text.
    """

    def __init__(
        self,
        layout: SentenceLayout,
        tokenizer: Tokenizer | None,
        *,
        poolings: Sequence[str],
        vocab_size: int,
        max_tokens: int,
    ) -> None:
        self.layout = layout
        self._tokenizer = tokenizer
        self._poolings = tuple(poolings)
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._has_warned = False

    @property
    def compares(self) -> bool:
        """Whether the model was made for vectors that are compared: it says how they are made, or does nothing else."""
        return self.layout.pooling is not None or len(self._poolings) > 1

    def params(
        self,
        *,
        prompt_name: str | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> EmbeddingParams:
        """What a call asks for; None takes what the checkpoint says. Raises ValueError for what cannot be.

        The first call of a model that was made for no vectors is told so in the log.
        """
        layout = self.layout
        if not self._poolings:
            raise ValueError("the model scores texts and makes no vectors; ask LLM.score, LLM.classify or /v1/score")
        pooling = pooling or layout.pooling or self._poolings[0]
        if pooling not in self._poolings:
            raise ValueError(
                f"pooling is {pooling!r}; this model has {' and '.join(map(repr, self._poolings))}"
                + (" alone, for a model that generates keeps only the last token's state" * (len(self._poolings) == 1))
            )
        if not (self.compares or self._has_warned):
            self._has_warned = True
            _log.warning(UNTRAINED)
        name = prompt_name or layout.default_prompt
        if name is not None and name not in layout.prompts:
            known = f"its prompts are {sorted(layout.prompts)}" if layout.prompts else "it has no prompts: leave it out"
            raise ValueError(f"prompt_name is {name!r}, which the checkpoint does not have; {known}")
        prefix = "" if name is None else layout.prompts[name]
        if prefix and not layout.pools_prompt:
            raise ValueError(f"the checkpoint leaves the prompt {name!r} out of its pooling, which is not supported")
        return EmbeddingParams(
            pooling=pooling,
            normalize=layout.normalize if normalize is None else normalize,
            prefix=prefix,
            lower_case=layout.lower_case,
            max_tokens=self.most(truncate),
        )

    def most(self, truncate: bool) -> int | None:
        """The tokens that a text is cut to."""
        return self._max_tokens if truncate else None

    def task(
        self, prompt: Prompt, params: EmbeddingParams, how: Mapping[str, Any] = NO_WISHES, *, key: str = ""
    ) -> Task[EmbeddingOutput]:
        """A text's vector. params: what `how` asks for, of a prompt that does not say it itself.

        Raises ValueError for a prompt that the model cannot read.
        """
        parts = take_apart(prompt)
        if parts.vector:
            params = self.params(**{**how, **parts.vector})
        return Task([self._request(parts, params, key)], functools.partial(_embedding, normalize=params.normalize))

    def request(self, prompt: Prompt, params: EmbeddingParams, *, key: str = "") -> EngineRequest:
        """A text as the model will see it; its output has the pooled state. Raises ValueError as `task`."""
        return self._request(take_apart(prompt), params, key)

    def _request(self, parts: PromptParts, params: EmbeddingParams, key: str) -> EngineRequest:
        content = parts.content
        if parts.add_special_tokens is not None:
            raise ValueError("add_special_tokens is for prompts that are completed; leave it out")
        if parts.seen:
            raise ValueError(f"the text has {parts.seen}, and vectors are made of texts alone; leave them out")
        if isinstance(content, bytes) or not isinstance(content, str | Sequence | np.ndarray):
            raise ValueError(f"the text is {content!r}; it must be a string or a list of token ids")
        token_ids = self._encode(content, params) if isinstance(content, str) else self._check_ids(content, params)
        if not 1 <= len(token_ids) <= self._max_tokens:
            raise ValueError(
                f"the text has {len(token_ids)} tokens; it must have 1 to {self._max_tokens}: shorten it, or have "
                "it cut with truncate=True"
            )
        options = RequestOptions(
            prompt=content if isinstance(content, str) else None,
            key=key,
            cache_salt=parts.cache_salt,
            media=parts.media,
            embeds=True,
            pooling=params.pooling,
        )
        return EngineRequest(token_ids, ONE_TOKEN, options)

    def _encode(self, text: str, params: EmbeddingParams) -> list[int]:
        if self._tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer; give token ids, or LLM(tokenizer=...)")
        text = params.prefix + text
        text = text.lower() if params.lower_case else text
        return self._tokenizer.encode(text, max_tokens=params.max_tokens, at_most=self._max_tokens)

    def _check_ids(self, content: Sequence[object], params: EmbeddingParams) -> list[int]:
        if len(content) and isinstance(content[0], Mapping):
            raise ValueError("the text is chat messages; embed their text, or what LLM.render_chat makes of them")
        if params.prefix:
            raise ValueError("the text is token ids, before which no prompt can be put; give text, or no prompt_name")
        ids = []
        for token in content[: params.max_tokens]:
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < self._vocab_size:
                raise ValueError(f"the text holds {token!r}; the model's token ids are 0 to {self._vocab_size - 1}")
            ids.append(int(token))
        return ids


def _embedding(outputs: Sequence[RequestOutput], *, normalize: bool) -> EmbeddingOutput:
    state = vector_in(outputs[0])
    return EmbeddingOutput(
        prompt=outputs[0].prompt,
        prompt_token_ids=outputs[0].prompt_token_ids,
        embedding=unit_length(state) if normalize else state,
        num_cached_tokens=outputs[0].num_cached_tokens,
        normalized=normalize,
    )
