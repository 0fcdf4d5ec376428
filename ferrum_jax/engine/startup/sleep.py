"""Sleep: a model whose weights and pools make room for others on the devices, and its way back without a compile.

    level 1   weights go to host memory, KV and all other pools are dropped
    level 2   both are dropped; `LLM.update_weights` brings weights

On the CPU weights are in host memory already, and stay where they are at level 1.
"""

import dataclasses
from collections.abc import Collection

import jax

from ferrum_jax.engine.startup.load import Loaded
from ferrum_jax.models.sharding import local_bytes
from ferrum_jax.runtime.pools.host_memory import host_memory_kind

LEVELS = (1, 2)
TAGS = ("weights", "kv_cache")


def put_to_sleep(model: Loaded, level: int) -> tuple[Loaded, int]:
    """The model with its weights in host memory or dropped, and the bytes that each device has more."""
    if level == 2:
        for array in model.weights:
            array.delete()
        return model, model.ledger.weights_bytes
    freed = sum(local_bytes(array) for array in model.weights if _host_kind(array) != array.sharding.memory_kind)
    weights = _moved(model.weights, to_host=True)
    return dataclasses.replace(model, weights=weights), freed


def is_dropped(model: Loaded) -> bool:
    """Whether it has no weights, as after sleep at level 2."""
    return any(array.is_deleted() for array in model.weights)


def woken(model: Loaded) -> Loaded:
    """The model with its weights on the devices. Raises ValueError where they were dropped."""
    if is_dropped(model):
        raise ValueError("the weights were dropped, as sleep(level=2) does; give new ones with update_weights")
    return dataclasses.replace(model, weights=_moved(model.weights, to_host=False))


def tags_to_wake(tags: Collection[str] | None, asleep: Collection[str]) -> frozenset[str]:
    """The tags to wake. Raises ValueError for an unknown tag, and for a tag that is awake."""
    wanted = frozenset(asleep) if tags is None else frozenset([tags] if isinstance(tags, str) else tags)
    unknown = sorted(wanted - set(TAGS))
    if unknown:
        raise ValueError(f"tags are {unknown}; they must be among {TAGS}")
    awake = sorted(wanted - set(asleep))
    if awake or not wanted:
        raise ValueError(f"{' and '.join(awake) or 'the engine'} cannot wake up: not asleep; call sleep() first")
    return wanted


def _moved(weights: tuple[jax.Array, ...], *, to_host: bool) -> tuple[jax.Array, ...]:
    """The arrays in host memory or on their devices, moved and freed one after the other."""
    kept: list[jax.Array] = []
    for array in weights:
        kind = _host_kind(array) if to_host else _device_kind(array)
        if array.sharding.memory_kind == kind:
            kept.append(array)
            continue
        kept.append(jax.device_put(array, array.sharding.with_memory_kind(kind)).block_until_ready())
        array.delete()
    return tuple(kept)


def _host_kind(array: jax.Array) -> str:
    device = next(iter(array.sharding.device_set))
    return _device_kind(array) if device.platform == "cpu" else host_memory_kind(device)


def _device_kind(array: jax.Array) -> str:
    return next(iter(array.sharding.device_set)).default_memory().kind
