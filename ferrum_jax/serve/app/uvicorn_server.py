"""A uvicorn server over an application, ended by its owner and by no signal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn

from ferrum_jax.serve.app.guarded_protocol import GuardedProtocol

_IDLE_S = 75  # longer than clients (5 s) and load balancers (60 s) keep a connection, so that none asks one that closes
_LAST_S = 2  # for answers that are being written when it ends


class UvicornServer(uvicorn.Server):
    """Ends once `should_exit` is set."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_server(
    app: Any, *, root_path: str = "", ssl_keyfile: str | None = None, ssl_certfile: str | None = None
) -> UvicornServer:
    """Without a log of its own, and without trust in headers that a proxy may have set."""
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        root_path=root_path,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_LAST_S,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
    )
    return UvicornServer(config)
