"""Pairs, scored by a model that reads both texts together, or by one of vectors, as the cosine of both.

In the latter each text is read by itself. A query that pairs have one after the other is read once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from ferrum_jax.core.outputs import EmbeddingOutput, ScoreOutput, cosine
from ferrum_jax.inputs.prompt import side_prompts
from ferrum_jax.tasks.embedder import Embedder, Run, Text, embed_all, run_all
from ferrum_jax.tasks.scorer import Pair, Scorer, both_of, pair_parts

Key = TypeVar("Key")
Found = EmbeddingOutput | ValueError
Pairs = Iterable[tuple[Key, Pair]]
Scores = Generator[tuple[Key, ScoreOutput | ValueError], None, None]
TOLD = "instruction is for models that score pairs; this one compares vectors of single texts"


@dataclasses.dataclass(kw_only=True, eq=False)
class _Query:
    """A query of pairs that follow one another. found: its vector, once it is there."""

    wish: tuple[Any, ...]
    found: Found | None = None
    waiting: list[tuple[Any, bool, Found]] = dataclasses.field(default_factory=list)  # documents that were ready before


def score_all(
    scorer: Scorer | None, embedder: Embedder, pairs: Pairs[Key], how: dict[str, Any], run: Run, name: str
) -> Scores[Key]:
    """(key, score) of each pair in the order in which they are ready; a refused one gives its ValueError.

    how: truncate and instruction of pairs that do not say it themselves. name: of the model's architecture.
    """
    if scorer is None:
        if embedder.compares:
            return _compare_all(embedder, pairs, how, run)
        why = (
            f"{name} does not read two texts together; compare vectors of LLM.embed, or name a cross-encoder, or "
            "score_tokens='yes,no' for a reranker that generates"
        )
        return ((key, ValueError(why)) for key, _ in pairs)

    def text(key: Key, pair: Pair) -> Text[Key]:
        parts = pair_parts(pair, **how)
        text = scorer.text(key, parts.both, truncate=parts.truncate, instruction=parts.instruction)
        return dataclasses.replace(text, cache_salt=parts.cache_salt)

    def output(text: Text[Key], state: np.ndarray, num_cached: int) -> ScoreOutput:
        score = scorer.score(state)
        return ScoreOutput(prompt_token_ids=tuple(text.token_ids), score=score, num_cached_tokens=num_cached)

    return run_all(pairs, text, output, run)


def _compare_all(embedder: Embedder, pairs: Pairs[Key], how: dict[str, Any], run: Run) -> Scores[Key]:
    names = side_prompts(embedder.layout.prompts)

    def texts() -> Iterator[tuple[tuple[_Query, Any, bool] | _Query, Mapping[str, Any]]]:
        query = _Query(wish=())
        for key, pair in pairs:
            try:
                parts = pair_parts(pair, **how)
                both = both_of(parts.both)
                if parts.instruction is not None:
                    raise ValueError(TOLD)
            except ValueError as error:
                yield (_Query(wish=(), found=error), key, True), {}  # refused, with the query's error
                continue
            shared = {"truncate": parts.truncate, "cache_salt": parts.cache_salt or None}
            left, right = (
                {"prompt": text, "prompt_name": name if parts.ranks else None, **shared}
                for text, name in zip(both, names, strict=True)
            )
            if query.wish != (wish := tuple(left.values())):
                query = _Query(wish=wish)
                yield query, left
            yield (query, key, parts.query_counts), right

    for of, found in embed_all(embedder, texts(), {}, run):
        if isinstance(of, _Query):
            of.found = found
            yield from ((key, _score(found, counts, other)) for key, counts, other in of.waiting)
            of.waiting.clear()
            continue
        query, key, counts = of
        if query.found is None:
            query.waiting.append((key, counts, found))
        else:
            yield key, _score(query.found, counts, found)


def _score(query: Found, query_counts: bool, document: Found) -> ScoreOutput | ValueError:
    if isinstance(query, ValueError) or isinstance(document, ValueError):
        return query if isinstance(query, ValueError) else document  # type: ignore[return-value]
    read = [query, document] if query_counts else [document]
    return ScoreOutput(
        prompt_token_ids=tuple(token for each in read for token in each.prompt_token_ids),
        score=cosine(query.embedding, document.embedding),
        num_cached_tokens=sum(each.num_cached_tokens for each in read),
    )
