"""/v1/embeddings: texts in, vectors out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.serve.app.text_routes import warning_headers
from ferrum_jax.serve.bodies.http_body import asked_vectors
from ferrum_jax.serve.http.answer_forms import vectors_answer
from ferrum_jax.serve.http.exchange import Exchange


async def embeddings(request: Request) -> Response:
    exchange = Exchange(request)
    service = exchange.service
    asked = asked_vectors(await exchange.body(), service.settings.limits)
    model = exchange.model(asked.model)
    vectors = await exchange.unless_left(service.vectors(asked, exchange.key), asked.timeout_s)
    num_tokens = sum(vector.num_tokens for vector in vectors)
    service.metrics.prompt_tokens(num_tokens)
    answer = vectors_answer(vectors, num_tokens, model=model, as_base64=asked.as_base64)
    return exchange.json(answer, warning_headers(asked.warnings))
