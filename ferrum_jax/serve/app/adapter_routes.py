"""Adapters that come and go over HTTP, in vLLM's bodies; off unless the server has an adapter root."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ferrum_jax.inputs.prompt import is_unicode
from ferrum_jax.io.error_text import quoted
from ferrum_jax.openai.body_fields import given
from ferrum_jax.openai.body_rules import require_known
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.http.http_errors import HttpError

_MOST_CHARACTERS = 1024


async def load(request: Request) -> Response:
    """vLLM's /v1/load_lora_adapter: gives an adapter below the root a name."""
    exchange, body = await _asked(request, "load_adapter")
    name, path = _text(body, "lora_name"), _text(body, "lora_path")
    if not name.isprintable():
        raise FieldError(f"lora_name is {quoted(name)}; it must be a text that can be printed", "lora_name")
    if name in exchange.service.settings.names:
        raise FieldError(
            f"lora_name is {quoted(name)}, which is the model's name; give the adapter another", "lora_name"
        )
    exchange.model(body.get("base_model_name"))
    await exchange.service.told("load_adapter", name, path, given(body, "load_inplace") is True)
    return PlainTextResponse(f"Success: adapter {quoted(name)} is loaded.")


async def unload(request: Request) -> Response:
    """vLLM's /v1/unload_lora_adapter: forgets a name; requests that have it run to their end."""
    exchange, body = await _asked(request, "unload_adapter")
    name = _text(body, "lora_name")
    if name not in exchange.service.adapters:
        there = ", ".join(map(repr, exchange.service.adapters)) or "none"
        message = f"lora_name is {quoted(name)}, and this server has {there}"
        raise HttpError(404, message, param="lora_name", code="model_not_found")
    await exchange.service.told("unload_adapter", name)
    return PlainTextResponse(f"Success: adapter {quoted(name)} is no longer loaded.")


async def _asked(request: Request, kind: str) -> tuple[Exchange, Mapping[str, Any]]:
    exchange = Exchange(request)
    if exchange.service.settings.adapter_root is None:
        message = "adapters are not loaded over HTTP here; the server is to be started with --adapter-root DIR"
        raise HttpError(404, message, code="adapters_off")
    body = await exchange.body()
    require_known(body, kind)
    return exchange, body


def _text(body: Mapping[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_CHARACTERS:
        raise FieldError(
            f"{field} is {quoted(value)}; it must be a text of at most {_MOST_CHARACTERS} characters", field
        )
    if not is_unicode(value):
        raise FieldError(f"{field} is {quoted(value)}, which holds half of a surrogate pair; write both halves", field)
    return value
