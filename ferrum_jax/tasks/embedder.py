"""Embeddings: what a text becomes before a model sees it, and what its vector becomes after.

A checkpoint may say how its vectors are made (`checkpoints/sentence.py`); a call may say otherwise. `Embedder`
settles that into `EmbeddingParams` and refuses what the model cannot do, before anything runs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from checkpoints.sentence import SentenceLayout
from ferrum_jax.core.outputs import ClassOutput, EmbeddingOutput, RewardOutput, ScoreOutput, unit_length
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.prompt import MediaSpan, Prompt, take_apart
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.tokenizer import Tokenizer

UNTRAINED = (
    "the model was made to generate: its vectors are final states of the last token, which no training made alike for "
    "texts that mean the same; take a model for embeddings where vectors are compared"
)
_log = logging.getLogger("ferrum_jax.tasks")
# Computes a prompt, whose last state is a text's vector; the token that is drawn is of no use, and has no text.
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
NO_WISHES: Mapping[str, Any] = MappingProxyType({})
Key = TypeVar("Key")
Output = TypeVar("Output", EmbeddingOutput, ScoreOutput, ClassOutput, RewardOutput)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingParams:
    """How the texts of a call become vectors.

    prefix: what is put before each. max_tokens: longer texts are cut to this; None refuses them.
    """

    pooling: str
    normalize: bool
    prefix: str = ""
    lower_case: bool = False
    max_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Text(Generic[Key]):
    """One text to embed, or a pair to score, as the model will see it.

    second: where the second text of a pair begins, in models that tell them apart. pooling, normalizes: what becomes of
    the states of its tokens.
    """

    key: Key
    prompt: str | None
    token_ids: Sequence[int]
    second: int | None = None
    cache_salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    pooling: str = "cls"
    normalizes: bool = False

    def output(self, state: np.ndarray, num_cached_tokens: int) -> EmbeddingOutput:
        """state: [D], pooled."""
        return EmbeddingOutput(
            prompt=self.prompt,
            prompt_token_ids=tuple(self.token_ids),
            embedding=unit_length(state) if self.normalizes else state,
            num_cached_tokens=num_cached_tokens,
            normalized=self.normalizes,
        )


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

    def text(self, key: Key, prompt: Prompt, params: EmbeddingParams, how: Mapping[str, Any] = NO_WISHES) -> Text[Key]:
        """A prompt as the model will see it. Raises ValueError for one that it cannot.

        params: what `how` asks for, of a prompt that does not say it itself.
        """
        parts = take_apart(prompt)
        if parts.vector:
            params = self.params(**{**how, **parts.vector})
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
        return Text(
            key=key,
            prompt=content if isinstance(content, str) else None,
            token_ids=token_ids,
            cache_salt=parts.cache_salt,
            media=parts.media,
            pooling=params.pooling,
            normalizes=params.normalize,
        )

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


States = Iterator[tuple[Text[Any], np.ndarray | ValueError, int]]
Run = Callable[[Iterable[Text[Any]]], States]
Vectors = Generator[tuple[Key, EmbeddingOutput | ValueError], None, None]


def embed_all(embedder: Embedder, requests: Iterable[tuple[Key, Prompt]], how: Mapping[str, Any], run: Run) -> Vectors:
    """(key, vector) of each text in the order in which they are ready; a refused one gives its ValueError.

    how: arguments of `Embedder.params`. run(texts): (text, its state, tokens of it that were cached) of each, in any
    order.
    """
    params = embedder.params(**how)
    return run_all(requests, lambda key, prompt: embedder.text(key, prompt, params, how), Text.output, run)


def run_all(
    requests: Iterable[tuple[Key, Any]],
    text_of: Callable[[Key, Any], Text[Key]],
    output_of: Callable[[Text[Key], np.ndarray, int], Output],
    run: Run,
) -> Generator[tuple[Key, Output | ValueError], None, None]:
    """(key, output) of each request in the order in which they are ready; a refused one gives its ValueError."""
    refused: deque[tuple[Key, ValueError]] = deque()

    def texts() -> Iterator[Text[Key]]:
        for key, content in requests:
            try:
                yield text_of(key, content)
            except ValueError as error:
                refused.append((key, error))

    for text, state, num_cached in run(texts()):
        while refused:
            yield refused.popleft()
        if isinstance(state, ValueError):
            yield text.key, state
        else:
            yield text.key, output_of(text, state, num_cached)
    yield from refused


def request_of(text: Text[Any], key: str = "") -> tuple[Sequence[int], RequestOptions]:
    """What an engine is asked for a text's vector, beside ONE_TOKEN. key: see RequestOptions."""
    return text.token_ids, RequestOptions(
        prompt=text.prompt,
        key=key,
        cache_salt=text.cache_salt,
        media=text.media,
        embeds=True,
        pooling=text.pooling,
        second=text.second,
    )
