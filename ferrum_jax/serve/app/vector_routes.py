"""/v1/embeddings: texts in, vectors out; /v1/score and /v1/rerank: how alike texts are."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.core.outputs import cosine
from ferrum_jax.openai.answers import ranking, read_usage, vectors_answer
from ferrum_jax.openai.asked import AskedScores
from ferrum_jax.openai.bodies import asked_scores, asked_vectors
from ferrum_jax.openai.logprob_forms import number
from ferrum_jax.serve.app.text_routes import warning_headers
from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.http.http_errors import HttpError
from ferrum_jax.serve.link.engine_client import EngineVector


async def embeddings(request: Request) -> Response:
    """The vectors of texts."""
    exchange = Exchange(request)
    service = exchange.service
    asked = await exchange.asked(asked_vectors)
    model = exchange.model(asked.model)
    vectors = await exchange.unless_left(service.vectors(asked, exchange.key), asked.timeout_s)
    num_tokens = sum(vector.num_tokens for vector in vectors)
    service.metrics.prompt_tokens(num_tokens)
    values = [vector.values for vector in vectors]
    answer = vectors_answer(values, num_tokens, {"model": model}, as_base64=asked.form.as_base64)
    return exchange.json(answer, warning_headers((*service.client.facts["of_vectors"], *asked.warnings)))


async def score(request: Request) -> Response:
    """vLLM's score: of each text of text_2 beside that of text_1."""
    exchange = Exchange(request)
    asked = await exchange.asked(functools.partial(asked_scores, ranks=False))
    scores, answer = await _compared(exchange, asked)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    answer |= {"id": f"score-{exchange.id}", "object": "list", "created": exchange.service.now(), "data": data}
    return exchange.json(answer, warning_headers(asked.warnings))


async def rerank(request: Request) -> Response:
    """Documents in the order of how well they fit a query."""
    exchange = Exchange(request)
    asked = await exchange.asked(functools.partial(asked_scores, ranks=True))
    scores, answer = await _compared(exchange, asked)
    documents = asked.right if asked.form.shows_documents else None
    results = ranking(scores, asked.form.top_n, documents)
    answer |= {"id": f"rerank-{exchange.id}", "results": results}
    return exchange.json(answer, warning_headers(asked.warnings))


async def _compared(exchange: Exchange, asked: AskedScores) -> tuple[list[float], dict[str, Any]]:
    """Scores of a model that reads both texts together, or else cosines; and what every answer has."""
    service = exchange.service
    model = exchange.model(asked.model)
    if service.client.facts["scores"]:
        read = await exchange.unless_left(service.scores(asked, exchange.key), asked.timeout_s)
        return [number(float(each.values[0])) for each in read], _answer(exchange, model, read)
    if not service.client.facts["compares"]:
        message = (
            f"{service.client.facts['architecture']} is no encoder, and its folder does not say how vectors of its "
            "texts are made; texts are scored by models of embeddings"
        )
        raise HttpError(400, message, param="model", code="model_not_supported")
    both = _both(exchange, asked)
    left, right = await exchange.unless_left(both, asked.timeout_s)
    left_of_each = left * len(right) if len(left) == 1 else left
    cosines = [number(cosine(one.values, other.values)) for one, other in zip(left_of_each, right, strict=True)]
    return cosines, _answer(exchange, model, [*left, *right])


def _answer(exchange: Exchange, model: str, read: Sequence[EngineVector]) -> dict[str, Any]:
    num_tokens = sum(vector.num_tokens for vector in read)
    exchange.service.metrics.prompt_tokens(num_tokens)
    return {"model": model, "usage": read_usage(num_tokens)}


async def _both(exchange: Exchange, asked: AskedScores) -> tuple[list[EngineVector], list[EngineVector]]:
    service = exchange.service
    try:
        async with asyncio.TaskGroup() as group:
            sides = asked.sides(service.client.facts["prompts"])
            tasks = [group.create_task(service.vectors(each, exchange.key)) for each in sides]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return tasks[0].result(), tasks[1].result()
