"""Pairs whose texts are read each by itself, by a model of vectors: a pair's score is the cosine of both.

A query that pairs have one after the other is read once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ferrum_jax.embeddings.embedder import Embedder, Run, embed_all
from ferrum_jax.embeddings.scorer import both_of, pair_parts
from ferrum_jax.outputs import EmbeddingOutput, ScoreOutput, cosine
from ferrum_jax.prompt import side_prompts

Key = TypeVar("Key")
Found = EmbeddingOutput | ValueError
TOLD = "instruction is for models that score pairs; this one compares vectors of single texts"


@dataclasses.dataclass(kw_only=True, eq=False)
class _Query:
    """A query of pairs that follow one another. found: its vector, once it is there."""

    wish: tuple[Any, ...]
    found: Found | None = None
    waiting: list[tuple[Any, bool, Found]] = dataclasses.field(default_factory=list)  # documents that were ready before


def compare_all(
    embedder: Embedder, requests: Iterable[tuple[Key, Any]], run: Run, *, truncate: bool, instruction: str | None
) -> Generator[tuple[Key, ScoreOutput | ValueError], None, None]:
    """(key, score) of each pair in the order in which they are ready; a refused one gives its ValueError."""
    names = side_prompts(embedder.layout.prompts)

    def texts() -> Iterator[tuple[tuple[_Query, Any, bool] | _Query, Mapping[str, Any]]]:
        query = _Query(wish=())
        for key, pair in requests:
            try:
                parts = pair_parts(pair, truncate, instruction)
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
