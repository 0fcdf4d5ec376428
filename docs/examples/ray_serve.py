"""Serves a model with several engines behind one address, on a Ray cluster.

    pip install -e '.[server,ray-serve]'
    python docs/examples/ray_serve.py DIR 2
    curl http://127.0.0.1:8000/v1/models

Each replica is one engine with the HTTP of `make_app` before it, in one process. Ray spreads requests over them, so
each has caches and counters of its own, and /metrics tells of the one that happens to be asked.
"""

from __future__ import annotations

import sys
from typing import Any

from ray import serve

from ferrum_jax.config import EngineConfig


def replicas(model: str, number: int, config: EngineConfig | None = None, **actor_options: Any) -> serve.Application:
    """What `serve.run` takes. actor_options: what each replica needs, such as num_gpus=1 or resources={"TPU": 4}."""

    def build() -> Any:
        """Called in each replica as it starts."""
        from ferrum_jax.serve import AsyncLLM, make_app
        from ferrum_jax.serve.http.settings import ServerSettings

        return make_app(lambda: AsyncLLM(model, config), ServerSettings(names=("model",)))

    options = {"num_replicas": number, "max_ongoing_requests": 1000, "ray_actor_options": actor_options}
    return serve.deployment(serve.ingress(build)(), **options).bind()


if __name__ == "__main__":
    serve.run(replicas(sys.argv[1], int(sys.argv[2])), name="ferrum", route_prefix="/", blocking=True)
