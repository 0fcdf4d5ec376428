"""Rows that read texts and generate none: those that ask for vectors, for scores of pairs, or for a ranking.

Their bodies are those of /v1/embeddings, /v1/score and /v1/rerank. A pair is an object, as `LLM.score` takes it:
`query` and `document`, and where the row has them `instruction`, `truncate` and `cache_salt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ferrum_jax.openai.parameters import JOB_EMBEDDING, JOB_RERANK, JOB_SCORE, flag
from ferrum_jax.openai.reading_fields import count_of, is_base64, text_of
from ferrum_jax.quoting import quoted

EMBEDDINGS_URL, SCORE_URL, RERANK_URL = "/v1/embeddings", "/v1/score", "/v1/rerank"
READING_URLS = (EMBEDDINGS_URL, SCORE_URL, RERANK_URL)
_RULES = {EMBEDDINGS_URL: JOB_EMBEDDING, SCORE_URL: JOB_SCORE, RERANK_URL: JOB_RERANK}


class ReadingForm(NamedTuple):
    """How the answer of a row is written. dimensions: of its vectors, None for all; top_n: of its ranking."""

    dimensions: int | None = None
    as_base64: bool = False
    top_n: int | None = None
    shows_documents: bool = True


def form_of(url: str, fields: Mapping[str, Any]) -> ReadingForm:
    """Raises ValueError for a field that is not known, or has a value that it cannot have."""
    _RULES[url].refuse(fields)
    return ReadingForm(
        dimensions=count_of(fields, "dimensions"),
        as_base64=is_base64(fields),
        top_n=count_of(fields, "top_n"),
        shows_documents=flag(fields, "return_documents") is not False,
    )


def pairs_of(url: str, fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The pairs of a row. Raises ValueError for what are no texts."""
    names = ("query", "documents") if url == RERANK_URL else ("text_1", "text_2")
    left, right = (_texts(name, fields.get(name), is_one=name == "query") for name in names)
    if len(left) not in (1, len(right)):
        raise ValueError(f"{names[0]} has {len(left)} texts and {names[1]} has {len(right)}; give one, or as many")
    shared: dict[str, Any] = {"truncate": True} if flag(fields, "truncate") is True else {}
    for name in ("instruction", "cache_salt"):
        if (value := fields.get(name)) is not None:
            if not isinstance(value, str):
                raise ValueError(f"{name} is {quoted(value)}; it must be a text")
            shared[name] = value
    left = left * len(right) if len(left) == 1 else left
    return tuple({"query": one, "document": other, **shared} for one, other in zip(left, right, strict=True))


def _texts(name: str, given: object, *, is_one: bool) -> list[str]:
    texts: list[Any] = [given] if isinstance(given, str) else [] if is_one or not isinstance(given, list) else given
    texts = [text_of(each) for each in texts]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        what = "a text that is not empty" if is_one else "a text or a list of texts, none of them empty"
        raise ValueError(f"{name} is {quoted(given)}; it must be {what}")
    return texts
