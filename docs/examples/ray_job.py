"""Answers a file of requests on a Ray cluster, with an engine in each actor.

    pip install -e '.[ray]'
    python docs/examples/ray_job.py DIR in.jsonl out.jsonl

Killed or not, the same command goes on: the journal stays with this program. Exit codes are those of
`ferrum-jax batch`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from rich.console import Console

from ferrum_jax import LLM, EngineConfig
from ferrum_jax.batch.ray import run_batch_on_ray


def main(
    model: str,
    source: str,
    target: str,
    config: EngineConfig | None = None,
    num_actors: int = 2,
    actor_options: dict[str, Any] | None = None,
) -> int:
    """actor_options: what each actor needs, such as {"num_gpus": 1} or {"resources": {"TPU": 4}}."""
    return run_batch_on_ray(
        functools.partial(LLM, model, config),
        source,
        target,
        model=model.rstrip("/").rpartition("/")[-1],
        num_actors=num_actors,
        actor_options=actor_options,
        console=Console(stderr=True),
    )


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:4]))
