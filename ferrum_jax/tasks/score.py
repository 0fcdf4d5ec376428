"""Scores of pairs as tasks: by a model that reads both texts together, or by one of vectors, as the cosine of both."""

import dataclasses
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ferrum_jax.core.outputs import EmbeddingOutput, RequestOutput, ScoreOutput, cosine
from ferrum_jax.inputs.prompt import side_prompts
from ferrum_jax.tasks.embedder import Embedder
from ferrum_jax.tasks.scorer import Pair, PairParts, Scorer, both_of, pair_parts
from ferrum_jax.tasks.task import Task, vector_in

Key = TypeVar("Key")
Pairs = Iterable[tuple[Key, Pair]]
Scores = Generator[tuple[Key, ScoreOutput | ValueError], None, None]
TOLD = "instruction is for models that score pairs; this one compares vectors of single texts"


class PairTasks:
    """Makes the task of each pair of a call. Vectors: a query that pairs have one after the other is read once."""

    def __init__(self, scorer: Scorer | None, embedder: Embedder, how: Mapping[str, Any], name: str) -> None:
        """how: truncate and instruction of pairs that do not say it themselves. name: of the model's architecture."""
        self._scorer, self._embedder, self._how, self._name = scorer, embedder, how, name
        self._compares = scorer is None and embedder.compares
        self._params = embedder.params() if self._compares else None
        self._query: tuple[Mapping[str, Any], Task[EmbeddingOutput]] | None = None  # of the pair before

    def __call__(self, pair: Pair, key: str = "") -> Task[ScoreOutput]:
        """key: of its requests. Raises ValueError for a pair that cannot be read, and for a model that scores none."""
        if self._scorer is None and not self._compares:
            raise ValueError(
                f"{self._name} does not read two texts together; compare vectors of LLM.embed, or name a "
                "cross-encoder, or score_tokens='yes,no' for a reranker that generates"
            )
        parts = pair_parts(pair, **self._how)
        return self._compared(parts, key) if self._scorer is None else self._read_together(self._scorer, parts, key)

    def _read_together(self, scorer: Scorer, parts: PairParts, key: str) -> Task[ScoreOutput]:
        request = scorer.request(parts.both, truncate=parts.truncate, instruction=parts.instruction)
        options = dataclasses.replace(request.options, key=key, cache_salt=parts.cache_salt)
        request = request._replace(options=options)

        def finish(outputs: Sequence[RequestOutput]) -> ScoreOutput:
            return _score(scorer.score(vector_in(outputs[0])), outputs)

        return Task([request], finish)

    def _compared(self, parts: PairParts, key: str) -> Task[ScoreOutput]:
        both = both_of(parts.both)
        if parts.instruction is not None:
            raise ValueError(TOLD)
        shared = {"truncate": parts.truncate, "cache_salt": parts.cache_salt or None}
        left, right = (
            {"prompt": text, "prompt_name": name if parts.ranks else None, **shared}
            for text, name in zip(both, side_prompts(self._embedder.layout.prompts), strict=True)
        )
        if self._query is None or self._query[0] != left:
            self._query = left, self._vector(left, key)
        query, document = self._query[1], self._vector(right, key)

        def finish(outputs: Sequence[RequestOutput]) -> ScoreOutput:
            one, other = query.finish(outputs[:1]), document.finish(outputs[1:])
            return _score(cosine(one.embedding, other.embedding), outputs if parts.query_counts else outputs[1:])

        return Task([*query.requests, *document.requests], finish)

    def _vector(self, prompt: Mapping[str, Any], key: str) -> Task[EmbeddingOutput]:
        assert self._params is not None, "only models of vectors compare"
        return self._embedder.task(prompt, self._params, key=key)


def _score(score: float, outputs: Sequence[RequestOutput]) -> ScoreOutput:
    return ScoreOutput(
        prompt_token_ids=tuple(token for output in outputs for token in output.prompt_token_ids),
        score=score,
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
    )
