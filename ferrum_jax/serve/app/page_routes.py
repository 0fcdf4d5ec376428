"""The page at /: one file without a request to anywhere else, fed by one stream of events. It shows no user's text."""

import asyncio
import functools
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.core.metrics import MEDIA
from ferrum_jax.inputs.prompt import SEEN
from ferrum_jax.serve.http.event_stream import EventStream, RequestEvents
from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.http.service import Service
from ferrum_jax.text.prompts import PromptEncoder

_EVERY_S = 1.0
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_POLICY += "; frame-ancestors 'none'"  # no other page may show it in a frame of its own
_SHOWN = ("num_running", "live", "cached", "clean", "hit_tokens", "missed_tokens", "cached_prompts", "preemptions")
_SHOWN += ("evictions", "weights_bytes", "kv_bytes", "prompts_bytes", "states_bytes", "host_cache_bytes", "executables")
_SHOWN += tuple(MEDIA)
_SHOWN += ("executables_loaded", "executables_missing", "block_size", "recent_steps", "steps", "host_entries")


async def page(request: Request) -> Response:
    """How the server is, and a field to try it."""
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
    return Response(page_html(), media_type="text/html", headers=headers)


@functools.cache
def page_html() -> bytes:
    """The page at /."""
    return Path(__file__).with_name("page.html").read_bytes()


async def events(request: Request) -> Response:
    """How the server is, once a second."""
    exchange = Exchange(request)
    return EventStream(
        _Views(exchange.service, []), b"retry: 2000\n\n", exchange, {}, timeout_s=float("inf"), counts=False
    )


class _Views(RequestEvents):
    """Events of what the page shows. Nothing is buffered for a page that is not read."""

    async def _all(self) -> AsyncGenerator[bytes, None]:
        while not self._service.drains:
            yield b"data: " + json.dumps(view(self._service), separators=(",", ":")).encode() + b"\n\n"
            await asyncio.sleep(_EVERY_S)


def view(service: Service) -> dict[str, Any]:
    """What the page shows now: counts and times, no text and no key."""
    stats, facts, metrics = service.client.stats, service.client.facts, service.metrics
    return {
        "model": service.settings.names[0],
        "version": service.settings.version,
        "state": service.sick() or ("draining" if service.drains else "ready" if service.is_open else "starting"),
        "up_s": time.time() - service.started,
        "tokens_in": metrics.num_prompt_tokens,
        "tokens_out": metrics.num_generated_tokens,
        "waiting": service.num_waiting + stats.get("num_waiting", 0),
        "times": metrics.recent(),
        "facts": {name: facts.get(name) for name in ("architecture", "max_model_len", "num_rows", "generates")},
        "chats": service.prompts.chat is not None,
        "takes": _taken(service.prompts),
        "writes_down": service.transcriber is not None and service.prompts.sounds is None,
        "max_body_bytes": service.settings.max_body_bytes,
        **{name: stats[name] for name in _SHOWN if name in stats},
    }


def _taken(prompts: PromptEncoder) -> list[str]:
    """What parts of a chat may be beside text, of "image", "video" and "audio"."""
    images = prompts.images
    is_taken = images is not None, images is not None and images.videos is not None, prompts.sounds is not None
    return [noun for noun, taken in zip(SEEN, is_taken, strict=True) if taken]
