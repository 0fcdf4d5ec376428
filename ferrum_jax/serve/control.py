"""What a training loop does to a server between two steps: pause it, have it sleep, give it other weights."""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ferrum_jax.engine.engine_thread import EngineThread
from ferrum_jax.llm import LLM
from ferrum_jax.serve.folders_below import folder_below


def control(
    llm: LLM, thread: EngineThread, verb: str, arguments: Mapping[str, Any], weights_root: str | None
) -> concurrent.futures.Future[Any]:
    """What the verb gives, as JSON has it. arguments: of the method of `AsyncLLM` that has its name.

    weights_root: below which weights may be read. Raises ValueError for arguments that cannot be.
    """
    if verb == "pause":
        return thread.pause(**arguments)
    if verb == "resume":
        return thread.resume()
    if verb == "update_weights":
        return thread.call(_update(llm, weights_root, **arguments))
    calls: dict[str, Callable[[], Any]] = {
        "sleep": lambda: llm.sleep(**arguments),
        "wake_up": lambda: llm.wake_up(**arguments),
        "weights_checksum": lambda: {"checksum": llm.weights_checksum(), "weights_version": llm.weights_version},
        "state": lambda: {"is_paused": thread.is_paused, "is_sleeping": llm.is_sleeping},
    }
    return thread.call(calls[verb])


def _update(llm: LLM, root: str | None, *, path: str, requests: str | None) -> Callable[[], dict[str, int]]:
    if root is None:
        raise ValueError("weights are not read over HTTP here; the server is to be started with --weights-root DIR")
    folder = folder_below(root, path, field="path", option="--weights-root")
    return lambda: {"weights_version": llm.update_weights(str(folder), requests=requests)}


def changing_facts(llm: LLM) -> dict[str, Any]:
    """What changes of a model's facts while a server runs."""
    identity = llm.identity
    weights, dot, version = (identity.weights or "").partition(".")
    known = {"adapters": llm.model.adapters.names, "identity": dataclasses.asdict(identity)}
    return known | {"fingerprint": f"{weights[:16]}{dot}{version}"}
