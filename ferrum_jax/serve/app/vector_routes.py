"""/v1/embeddings: texts in, vectors out; /v1/score and /v1/rerank: how alike texts are."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.openai.answers import ranking, read_usage, vectors_answer
from ferrum_jax.openai.logprob_forms import number
from ferrum_jax.serve.app.text_routes import warning_headers
from ferrum_jax.serve.bodies.compare_body import AskedComparison, asked_ranking, asked_score, with_prompts
from ferrum_jax.serve.bodies.http_body import asked_vectors
from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.http.http_errors import HttpError
from ferrum_jax.serve.link.engine_client import EngineVector

Each = TypeVar("Each")


async def embeddings(request: Request) -> Response:
    exchange = Exchange(request)
    service = exchange.service
    asked = await exchange.asked(asked_vectors)
    model = exchange.model(asked.model)
    vectors = await exchange.unless_left(service.vectors(asked, exchange.key), asked.timeout_s)
    num_tokens = sum(vector.num_tokens for vector in vectors)
    service.metrics.prompt_tokens(num_tokens)
    values = [vector.values for vector in vectors]
    answer = vectors_answer(values, num_tokens, {"model": model}, as_base64=asked.as_base64)
    return exchange.json(answer, warning_headers((*service.client.facts["of_vectors"], *asked.warnings)))


async def score(request: Request) -> Response:
    """vLLM's score: of each text of text_2 beside that of text_1."""
    exchange = Exchange(request)
    asked = await exchange.asked(asked_score)
    scores, answer = await _compared(exchange, asked)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    answer |= {"id": f"score-{exchange.id}", "object": "list", "created": exchange.service.now(), "data": data}
    return exchange.json(answer, warning_headers(asked.left.warnings))


async def rerank(request: Request) -> Response:
    """Documents in the order of how well they fit a query."""
    exchange = Exchange(request)
    asked = await exchange.asked(asked_ranking)
    asked = with_prompts(asked, exchange.service.client.facts["prompts"])
    scores, answer = await _compared(exchange, asked)
    documents = [str(prompt) for prompt in asked.right.prompts] if asked.shows_documents else None
    results = ranking(scores, asked.top_n, documents)
    answer |= {"id": f"rerank-{exchange.id}", "results": results}
    return exchange.json(answer, warning_headers(asked.left.warnings))


async def _compared(exchange: Exchange, asked: AskedComparison) -> tuple[list[float], dict[str, Any]]:
    """Scores of a model that reads both texts together, or else cosines; and what every answer has."""
    service = exchange.service
    model = exchange.model(asked.left.model)
    if service.client.facts["scores"]:
        pairs = _paired(asked.left.prompts, asked.right.prompts)
        found = service.scores(asked.left, exchange.key, [list(map(str, pair)) for pair in pairs])
        read = await exchange.unless_left(found, asked.left.timeout_s)
        return [number(float(each.values[0])) for each in read], _answer(exchange, model, read)
    if not service.client.facts["compares"]:
        message = (
            f"{service.client.facts['architecture']} is no encoder, and its folder does not say how vectors of its "
            "texts are made; texts are scored by models of embeddings"
        )
        raise HttpError(400, message, param="model", code="model_not_supported")
    both = _both(exchange, asked)
    left, right = await exchange.unless_left(both, asked.left.timeout_s)
    return [number(one.cosine(other)) for one, other in _paired(left, right)], _answer(exchange, model, [*left, *right])


def _answer(exchange: Exchange, model: str, read: Sequence[EngineVector]) -> dict[str, Any]:
    num_tokens = sum(vector.num_tokens for vector in read)
    exchange.service.metrics.prompt_tokens(num_tokens)
    return {"model": model, "usage": read_usage(num_tokens)}


async def _both(exchange: Exchange, asked: AskedComparison) -> tuple[list[EngineVector], list[EngineVector]]:
    service = exchange.service
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(service.vectors(each, exchange.key)) for each in (asked.left, asked.right)]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return tasks[0].result(), tasks[1].result()


def _paired(left: Sequence[Each], right: Sequence[Each]) -> Iterable[tuple[Each, Each]]:
    """Each on the right with its own on the left, or with the only one."""
    return zip(left if len(left) > 1 else itertools.repeat(left[0]), right, strict=False)
