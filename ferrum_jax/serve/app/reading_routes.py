"""Texts in, and of each what a model reads out of it: vectors, scores, a ranking, classes, rewards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.openai.asked import EMBEDS, REWARDS
from ferrum_jax.openai.bodies import asked_reading
from ferrum_jax.openai.readings import num_read, reading_answer
from ferrum_jax.serve.app.text_routes import warning_headers
from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.link.engine_client import RequestRefused


def reads(kind: str, says: str) -> Callable[[Request], Awaitable[Response]]:
    """Answers bodies of a kind of READING. says: what the answer has."""

    async def answer(request: Request) -> Response:
        return await _answer(Exchange(request), kind)

    answer.__doc__ = says
    return answer


embeddings = reads("embedding", "The vectors of texts.")
score = reads("score", "vLLM's score: of each text of text_2 beside that of text_1.")
rerank = reads("rerank", "Documents in the order of how well they fit a query.")
classify = reads("classification", "vLLM's classes: of each text, by a model with a head for them.")
pooling = reads("reward", "The reward of each text, by a reward model.")


async def _answer(exchange: Exchange, kind: str) -> Response:
    service = exchange.service
    asked = await exchange.asked(lambda body, limits: asked_reading(body, limits, kind=kind))
    head: dict[str, Any] = {"model": exchange.model(asked.model)}
    outputs = await exchange.unless_left(service.read(asked, exchange.key), asked.timeout_s)
    service.metrics.prompt_tokens(num_read(outputs))
    warnings = asked.warnings
    if asked.kind == EMBEDS:
        warnings = (*service.client.facts["of_vectors"], *warnings)
    else:
        name = "pool" if asked.kind == REWARDS else "classify" if kind == "classification" else kind
        head |= {"id": f"{name}-{exchange.id}", "created": service.now()}
    try:
        answer = reading_answer(asked, outputs, head, asked.right if kind == "rerank" else ())
    except ValueError as error:
        raise RequestRefused(str(error)) from error
    return exchange.json(answer, warning_headers(warnings))
