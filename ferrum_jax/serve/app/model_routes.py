"""What a server says of its model and itself: models, tokens of texts, health, version, metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.io.error_text import quoted
from ferrum_jax.openai.asked import BodyLimits
from ferrum_jax.openai.body_fields import fields_of, given
from ferrum_jax.openai.body_rules import require_known
from ferrum_jax.openai.contents import messages_of, token_ids_of
from ferrum_jax.openai.errors import FieldError, naming_fields
from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.http.http_errors import HttpError
from ferrum_jax.serve.http.service import Service
from ferrum_jax.text.prompts import MOST_TIMES

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PROMPT_FIELDS = fields_of("tokenize", "http").keys() - {"model", "return_token_strs"}


async def models(request: Request) -> Response:
    """The models that are here, adapters among them."""
    exchange = Exchange(request)
    service = exchange.service
    service.require_ready()
    names = (*service.settings.listed, *service.adapters)
    return exchange.json({"object": "list", "data": [_model(service, name) for name in names]})


async def model(request: Request) -> Response:
    """One model or adapter of the server."""
    exchange = Exchange(request)
    name = request.path_params["name"]
    exchange.service.require_ready()
    exchange.model(name, generates=True)
    return exchange.json(_model(exchange.service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "ferrum_jax",
        "root": service.settings.names[0],
        "parent": service.settings.names[0] if name in service.adapters else None,
        "max_model_len": service.client.facts.get("max_model_len"),
        "made_for": _made_for(service.client.facts),
    }


def _made_for(facts: Mapping[str, Any]) -> list[str]:
    """What the model was trained for; a model that generates answers embeddings too, whose vectors mean little."""
    kinds = {"generate": facts["generates"], "embed": facts["compares"], "score": facts["scores"]}
    return [kind for kind, is_so in kinds.items() if is_so]


async def livez(request: Request) -> Response:
    """200 while this process lives, whatever the model does."""
    return Exchange(request).json({"status": "alive"})


async def ready(request: Request) -> Response:
    """200 while requests are taken: not before the model is there, nor while steps hang, nor once the server ends."""
    exchange = Exchange(request)
    exchange.service.require_ready()
    why = exchange.service.sick()
    if why is not None:
        raise HttpError(503, why, code="unhealthy")
    return exchange.json({"status": "ready"})


async def version(request: Request) -> Response:
    """The server's version."""
    exchange = Exchange(request)
    return exchange.json({"version": exchange.service.settings.version})


async def metrics(request: Request) -> Response:
    """Counters for Prometheus."""
    service = Exchange(request).service
    text = service.metrics.text(service.num_waiting, service.num_waiting_tokens)
    return Response(text, headers={"content-type": _METRICS_TYPE})


async def tokenize(request: Request) -> Response:
    """vLLM's /tokenize: token ids of a text or of messages."""
    exchange = Exchange(request)
    body = await exchange.body()
    require_known(body, "tokenize")
    exchange.model(body.get("model"), generates=True)
    shows_texts = given(body, "return_token_strs")
    prompt = {name: body[name] for name in _PROMPT_FIELDS if body.get(name) is not None}
    if "messages" in prompt:
        with naming_fields(body):
            prompt["messages"] = messages_of("messages", prompt["messages"])
    elif not isinstance(prompt.get("prompt"), str):
        raise FieldError(
            f"prompt is {quoted(body.get('prompt'))}; it must be a text, or messages a list of them", "prompt"
        )
    encode = exchange.service.encode([prompt], exchange.key, times=MOST_TIMES)
    (encoded,) = await exchange.unless_left(encode, None)
    ids = encoded.token_ids
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": exchange.service.client.facts["max_model_len"]}
    answer["tokens"] = list(ids)
    if shows_texts:
        answer["token_strs"] = [exchange.service.tokenizer.token(token_id) for token_id in ids]
    return exchange.json(answer)


async def detokenize(request: Request) -> Response:
    """vLLM's /detokenize: the text of token ids."""
    exchange = Exchange(request)
    model, ids = await exchange.asked(_asked_ids)
    exchange.model(model, generates=True)
    vocab_size = exchange.service.client.facts["vocab_size"]
    if ids and (largest := max(ids)) >= vocab_size:
        raise FieldError(f"tokens holds {largest}; the model's ids are 0 to {vocab_size - 1}", "tokens")
    text = await exchange.unless_left(exchange.service.decode(ids, exchange.key), None)
    return exchange.json({"prompt": text})


def _asked_ids(body: Mapping[str, Any], limits: BodyLimits) -> tuple[str | None, Sequence[int]]:
    """The model and the token ids of a body."""
    require_known(body, "detokenize")
    with naming_fields({"tokens"}):
        return body.get("model"), token_ids_of("tokens", body.get("tokens"))
