"""What a training loop asks of a server, in vLLM's paths and query parameters; for admin keys alone."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ferrum_jax.io.error_text import quoted
from ferrum_jax.openai.body_rules import require_known
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.http.http_errors import HttpError


async def pause(request: Request) -> Response:
    """vLLM's /pause: nothing new begins; mode says what becomes of what runs: keep, wait or abort."""
    given = _query(request, "mode")
    await _asked(request, "pause", {"requests": given.get("mode", ["abort"])[-1]})
    return JSONResponse({"status": "paused"})


async def resume(request: Request) -> Response:
    """vLLM's /resume: what waits goes on."""
    _query(request)
    await _asked(request, "resume", {})
    return JSONResponse({"status": "resumed"})


async def sleep(request: Request) -> Response:
    """vLLM's /sleep: weights go to host memory (level 1) or are dropped (2); tells the bytes that are free now."""
    level = _query(request, "level").get("level", ["1"])[-1]
    if level not in ("1", "2"):
        raise FieldError(
            f"level is {quoted(level)}; it must be 1 (weights go to host memory) or 2 (they are dropped)", "level"
        )
    return JSONResponse(await _asked(request, "sleep", {"level": int(level)}))


async def wake_up(request: Request) -> Response:
    """vLLM's /wake_up: undoes sleep; tags: weights, kv_cache."""
    await _asked(request, "wake_up", {"tags": _query(request, "tags").get("tags")})
    return JSONResponse({"status": "awake"})


async def is_paused(request: Request) -> Response:
    """vLLM's /is_paused."""
    _query(request)
    return JSONResponse({"is_paused": (await _asked(request, "state", {}))["is_paused"]})


async def is_sleeping(request: Request) -> Response:
    """vLLM's /is_sleeping."""
    _query(request)
    return JSONResponse({"is_sleeping": (await _asked(request, "state", {}))["is_sleeping"]})


async def update_weights(request: Request) -> Response:
    """Takes the weights of a folder below the weights root, without a compile; tells their version."""
    exchange = _exchange(request)
    body = await exchange.body()
    require_known(body, "update_weights")
    path, requests = body.get("path"), body.get("requests")
    if not isinstance(path, str) or not path:
        raise FieldError(f"path is {quoted(path)}; it must be a folder below the weights root", "path")
    if requests not in (None, "abort", "wait", "keep"):
        raise FieldError(f"requests is {quoted(requests)}; it must be 'abort', 'wait' or 'keep'", "requests")
    return JSONResponse(await exchange.service.told("control", "update_weights", {"path": path, "requests": requests}))


async def weights_checksum(request: Request) -> Response:
    """A digest of every bit of the weights, and their version."""
    _query(request)
    return JSONResponse(await _asked(request, "weights_checksum", {}))


def _exchange(request: Request) -> Exchange:
    """Raises HttpError where nobody has an admin key: else whoever reaches the port could stop the server."""
    exchange = Exchange(request)
    if not exchange.service.settings.admin_keys:
        message = "this is asked with an admin key; the server is to be started with --admin-key-file"
        raise HttpError(404, message, code="control_off")
    return exchange


async def _asked(request: Request, verb: str, arguments: dict[str, Any]) -> Any:
    exchange = _exchange(request)
    exchange.service.require_ready()
    return await exchange.unless_left(exchange.service.told("control", verb, arguments), None)


def _query(request: Request, *known: str) -> dict[str, list[str]]:
    """The values of query parameters. Raises FieldError for one that is unknown."""
    found: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            takes = f"it takes {' and '.join(known)}" if known else "it takes none"
            raise FieldError(f"the query parameter {quoted(name)} is not known here; {takes}", name)
        found.setdefault(name, []).append(value)
    return found
