"""The routes of a server and who may ask them; errors in OpenAI's form, and every request's id in a header."""

import contextlib
import logging
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ferrum_jax.io.error_text import bounded
from ferrum_jax.openai.errors import param_of
from ferrum_jax.serve.app import (
    adapter_routes,
    batch_routes,
    control_routes,
    file_routes,
    model_routes,
    openapi,
    page_routes,
    sound_routes,
    text_routes,
)
from ferrum_jax.serve.http.api_keys import OPEN, find_key
from ferrum_jax.serve.http.exchange import CLOSE, ClientLeft, id_of, rest_of_body
from ferrum_jax.serve.http.http_errors import HttpError, http_error
from ferrum_jax.serve.http.service import Service, counted
from ferrum_jax.serve.http.settings import ServerSettings

Handler = Callable[[Request], Awaitable[Response]]
_OPEN, _KEYS, _ADMIN = "open", "keys", "admin"  # who may ask
_LEFT = 499  # as nginx logs a client that closed its connection
_MOST_TRACE = 20_000  # characters of a traceback
_log = logging.getLogger("ferrum_jax.serve")

_ROUTES: tuple[tuple[str, str, Handler, str, str | None], ...] = (  # the last is the kind of the body
    ("POST", "/v1/completions", text_routes.completions, _KEYS, "completion"),
    ("POST", "/v1/chat/completions", text_routes.chat_completions, _KEYS, "chat"),
    ("POST", "/v1/responses", text_routes.responses, _KEYS, "response"),
    ("POST", "/v1/embeddings", text_routes.embeddings, _KEYS, "embedding"),
    ("POST", "/v1/score", text_routes.score, _KEYS, "score"),
    ("POST", "/score", text_routes.score, _KEYS, "score"),
    ("POST", "/v1/rerank", text_routes.rerank, _KEYS, "rerank"),
    ("POST", "/classify", text_routes.classify, _KEYS, "classification"),
    ("POST", "/pooling", text_routes.pooling, _KEYS, "reward"),
    ("POST", "/rerank", text_routes.rerank, _KEYS, "rerank"),
    ("POST", "/v2/rerank", text_routes.rerank, _KEYS, "rerank"),
    ("POST", "/v1/audio/transcriptions", sound_routes.transcriptions, _KEYS, "transcription"),
    ("POST", "/v1/audio/translations", sound_routes.translations, _KEYS, "translation"),
    ("POST", "/v1/files", file_routes.upload, _KEYS, None),
    ("GET", "/v1/files", file_routes.files, _KEYS, None),
    ("GET", "/v1/files/{file_id}", file_routes.file, _KEYS, None),
    ("DELETE", "/v1/files/{file_id}", file_routes.delete, _KEYS, None),
    ("GET", "/v1/files/{file_id}/content", file_routes.content, _KEYS, None),
    ("POST", "/v1/batches", batch_routes.create, _KEYS, "batch"),
    ("GET", "/v1/batches", batch_routes.batches, _KEYS, None),
    ("GET", "/v1/batches/{batch_id}", batch_routes.batch, _KEYS, None),
    ("DELETE", "/v1/batches/{batch_id}", batch_routes.delete, _KEYS, None),
    ("POST", "/v1/batches/{batch_id}/cancel", batch_routes.cancel, _KEYS, None),
    ("GET", "/v1/models", model_routes.models, _KEYS, None),
    ("GET", "/v1/models/{name:path}", model_routes.model, _KEYS, None),
    ("POST", "/v1/load_lora_adapter", adapter_routes.load, _ADMIN, "load_adapter"),
    ("POST", "/v1/unload_lora_adapter", adapter_routes.unload, _ADMIN, "unload_adapter"),
    ("POST", "/pause", control_routes.pause, _ADMIN, None),
    ("POST", "/resume", control_routes.resume, _ADMIN, None),
    ("GET", "/is_paused", control_routes.is_paused, _ADMIN, None),
    ("POST", "/sleep", control_routes.sleep, _ADMIN, None),
    ("POST", "/wake_up", control_routes.wake_up, _ADMIN, None),
    ("GET", "/is_sleeping", control_routes.is_sleeping, _ADMIN, None),
    ("POST", "/update_weights", control_routes.update_weights, _ADMIN, "update_weights"),
    ("GET", "/weights_checksum", control_routes.weights_checksum, _ADMIN, None),
    ("POST", "/tokenize", model_routes.tokenize, _KEYS, "tokenize"),
    ("POST", "/detokenize", model_routes.detokenize, _KEYS, "detokenize"),
    ("GET", "/version", model_routes.version, _KEYS, None),
    ("GET", "/livez", model_routes.livez, _OPEN, None),
    ("GET", "/health", model_routes.ready, _OPEN, None),
    ("GET", "/ready", model_routes.ready, _OPEN, None),
    ("GET", "/openapi.json", openapi.openapi, _OPEN, None),
    ("GET", "/docs", openapi.docs, _OPEN, None),
    ("GET", "/metrics", model_routes.metrics, _ADMIN, None),
    ("GET", "/", page_routes.page, _ADMIN, None),
    ("GET", "/page/events", page_routes.events, _ADMIN, None),
)


def application(settings: ServerSettings, lifespan: Any) -> Starlette:
    """The routes. lifespan: puts a `Service` into the application's state."""
    middleware = []
    if settings.cors_origins:
        origins = list(settings.cors_origins)
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    found = Starlette(
        routes=[Route(path, _guarded(handler, who), methods=[method]) for method, path, handler, who, _ in _ROUTES],
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={HTTPException: _unrouted, Exception: _failed},
    )
    found.state.answered = answered()
    found.state.batches, found.state.uploads = batch_routes.folder_of(settings), Counter()
    return found


def answered() -> list[openapi.ServedPath]:
    """The paths that a server has, as they are described to who asks."""
    return [
        openapi.ServedPath(method, path, (handler.__doc__ or "").split("\n")[0], body, who != _OPEN)
        for method, path, handler, who, body in _ROUTES
    ]


def _guarded(handler: Handler, who: str) -> Handler:
    """The handler for those who may ask, with errors in OpenAI's form and the request's id in the header."""

    async def guarded(request: Request) -> Response:
        service: Service = request.app.state.service
        request.scope.setdefault("state", {})  # hosts other than uvicorn may give none
        request_id = id_of(request.scope)
        try:
            _identify(request, service.settings, who)
            with counted(service) if who == _KEYS else contextlib.nullcontext():
                response = await handler(request)
        except ClientLeft:
            response = Response(status_code=_LEFT, headers={"Connection": "close"})
        except Exception as error:
            known = http_error(error)
            if known is None:
                _log.error("request %s failed\n%s", request_id, bounded(traceback.format_exc(), _MOST_TRACE))
                known = HttpError(500, "the server failed; its log says how", code="internal_error")
            if known.status == 400 and known.param is None:
                known.param = param_of(known.message, request.scope["state"].get("fields", ()))
            is_whole = known.status == 408 or await rest_of_body(request, service.settings.body_s)
            headers = known.headers if is_whole else {**known.headers, **CLOSE}
            response = JSONResponse(known.body, known.status, headers=headers)
        response.headers["X-Request-Id"] = id_of(request.scope)  # which a body may have given
        service.metrics.answered(request.scope["route"].path, response.status_code)
        return response

    return guarded


def _identify(request: Request, settings: ServerSettings, who: str) -> None:
    """Puts the key into the scope. Raises HttpError for one that is missing or unknown."""
    if who == _OPEN or not (settings.keys or settings.admin_keys):
        return
    keys = settings.admin_keys if who == _ADMIN else settings.keys
    if not keys and who == _KEYS:
        return
    given = request.headers.getlist("authorization")
    if len(given) > 1:
        raise HttpError(400, "the header Authorization is given twice; send one", code="invalid_api_key")
    found = find_key(keys, given[0] if given else None, basic=who == _ADMIN)
    if found is None:
        message = "the header Authorization has no key that may ask this; give it as 'Bearer KEY'"
        headers = {"WWW-Authenticate": "Bearer" if who == _KEYS else 'Basic realm="key as password"'}
        raise HttpError(401, message, code="invalid_api_key", headers=headers)
    request.scope["state"]["key"] = found if who == _KEYS else OPEN


async def _unrouted(request: Request, error: Exception) -> Response:
    """A path or a method that is not here."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    message = f"there is no {what}" if error.status_code == 404 else f"{what}: {error.detail}"
    headers = dict(error.headers or {})
    if not await rest_of_body(request, request.app.state.service.settings.body_s):
        headers.update(CLOSE)
    return JSONResponse(HttpError(error.status_code, message).body, error.status_code, headers=headers)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse(HttpError(500, "the server failed; its log says how", code="internal_error").body, 500)
