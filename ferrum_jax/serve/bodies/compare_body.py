"""Bodies of /v1/score and /v1/rerank: texts that are compared, in vLLM's names and those that rerankers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.openai.parameters import LABELS, FieldError, Rules, flag, model_of
from ferrum_jax.openai.reading_fields import count_of, text_of
from ferrum_jax.quoting import quoted
from ferrum_jax.serve.bodies.http_body import (
    WITHOUT_EFFECT,
    AskedVectors,
    BodyLimits,
    known_fields,
    naming_fields,
    salt_of,
    urgency,
)

_SHARED = LABELS | WITHOUT_EFFECT | {"cache_salt", "instruction", "priority", "timeout", "truncate"}
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "truncate_prompt_tokens": ((), "set truncate to true, which cuts texts to the longest that the model takes"),
    "encoding_format": (("float",), "scores are numbers; leave it out"),
}
_SCORE = Rules(known=_SHARED | {"text_1", "text_2"}, refused=_REFUSED)
_RERANK = Rules(known=_SHARED | {"query", "documents", "top_n", "return_documents"}, refused=_REFUSED)
_QUERIES, _DOCUMENTS = ("query",), ("document", "passage", "corpus")  # prompts, as sentence-transformers names them


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedComparison:
    """left: one text, or as many as right. top_n, shows_documents: of a ranking."""

    left: AskedVectors
    right: AskedVectors
    top_n: int | None = None
    shows_documents: bool = True


def asked_score(given: Mapping[str, Any], limits: BodyLimits) -> AskedComparison:
    """What a body of /v1/score asks for. Raises FieldError for the first thing that is wrong."""
    body, warnings = known_fields(given, _SCORE, limits)
    left, right = (_texts(name, body.get(name), limits) for name in ("text_1", "text_2"))
    if len(left) not in (1, len(right)):
        message = f"text_1 has {len(left)} texts and text_2 has {len(right)}; give one, or as many as text_2 has"
        raise FieldError(message, "text_1")
    with naming_fields(body):
        return AskedComparison(left=_vectors(body, left, warnings), right=_vectors(body, right, warnings))


def asked_ranking(given: Mapping[str, Any], limits: BodyLimits) -> AskedComparison:
    """What a body of /v1/rerank asks for. Raises FieldError for the first thing that is wrong."""
    body, warnings = known_fields(given, _RERANK, limits)
    query, top_n = body.get("query"), count_of(body, "top_n")
    if not isinstance(query, str) or not query:
        raise FieldError(f"query is {quoted(query)}; it must be a text that is not empty", "query")
    documents = body.get("documents")
    if not isinstance(documents, list):
        raise FieldError(f"documents is {quoted(documents)}; it must be a list of texts", "documents")
    texts = _texts("documents", [text_of(each) for each in documents], limits)
    with naming_fields(body):
        return AskedComparison(
            left=_vectors(body, (query,), warnings),
            right=_vectors(body, texts, warnings),
            top_n=top_n,
            shows_documents=flag(body, "return_documents") is not False,
        )


def with_prompts(asked: AskedComparison, known: Sequence[str]) -> AskedComparison:
    """The same, with the prompts that the checkpoint has for queries and for documents. known: their names."""

    def prompted(vectors: AskedVectors, names: tuple[str, ...]) -> AskedVectors:
        name = next((name for name in names if name in known), None)
        return (
            vectors if name is None else dataclasses.replace(vectors, options={**vectors.options, "prompt_name": name})
        )

    left, right = prompted(asked.left, _QUERIES), prompted(asked.right, _DOCUMENTS)
    return dataclasses.replace(asked, left=left, right=right)


def _texts(name: str, given: object, limits: BodyLimits) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts:
        raise FieldError(f"{name} is {quoted(given)}; it must be a text or a list of texts", name)
    if len(texts) > limits.max_prompts:
        raise FieldError(f"{name} has {len(texts)} texts; at most {limits.max_prompts} are taken at once", name)
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            place = name if isinstance(given, str) else f"{name}[{index}]"
            raise FieldError(f"{place} is {quoted(text)}; it must be a text that is not empty", place)
    return tuple(texts)


def _vectors(body: Mapping[str, Any], texts: tuple[str, ...], warnings: tuple[str, ...]) -> AskedVectors:
    options = {"truncate": flag(body, "truncate") is True, **salt_of(body)}
    if (instruction := body.get("instruction")) is not None:
        if not isinstance(instruction, str):
            raise FieldError(f"instruction is {quoted(instruction)}; it must be a text", "instruction")
        options["instruction"] = instruction
    return AskedVectors(
        prompts=texts,
        options=options,
        as_base64=False,
        model=model_of(body),
        warnings=warnings,
        **urgency(body),
    )
