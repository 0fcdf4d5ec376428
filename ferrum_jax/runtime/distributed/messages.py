"""Messages between the processes of one engine, as JSON: nothing that is received can be anything but a value.

    null, true, 3, 0.5, "text", [..]            themselves; any sequence or set becomes a list, NaN and infinities stand
    {"tuple": [..]}  {"dict": [[key, value], ..]}  {"bytes": base64}  {"pixels": [shape, base64]}, an array of uint8
    {"SamplingParams": {field: value, ..}}      an object of one of CLASSES, made anew and so checked by itself

What is not listed here is refused by the name of its type, on either side.
"""

import base64
import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from ferrum_jax.config import EngineConfig
from ferrum_jax.core.outputs import CompletionOutput, Logprob
from ferrum_jax.core.request_options import RequestOptions, ScoresAsked
from ferrum_jax.inputs.audio.clip import ProcessedClip
from ferrum_jax.inputs.images.image import Normalising, ProcessedImage
from ferrum_jax.inputs.params.message import AssistantMessage, ToolCall
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.params.tools import Tool, ToolsAsked
from ferrum_jax.inputs.prompt import MediaSpan
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.inputs.sizes.speculative import SpeculativeConfig
from ferrum_jax.sampling_params import SamplingParams

MAX_MESSAGE_BYTES = 1 << 26  # of one message; a prompt of a million tokens has a tenth of this
_ARRAYS = {"pixels": np.dtype(np.uint8), "features": np.dtype(np.float32)}
CALLS = ("add", "abort", "queue_ready", "take_costs", "learn", "step", "drain", "reset_prefix_cache")


class Digest(NamedTuple):
    step: int
    digest: bytes


class Failure(NamedTuple):
    message: str
    code: int


class End(NamedTuple):
    code: int


class Broken(NamedTuple):
    """Says that an engine broke in this call of its `step`."""

    call: int


class Beat(NamedTuple):
    """Says that a process is there."""


class Call(NamedTuple):
    """A call of an engine: one of CALLS."""

    name: str
    arguments: tuple


CLASSES: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Digest, Failure, End, Broken, Beat, Call),
        *(EngineConfig, Reach, MediaSpan, SamplingParams, RequestOptions, ScoresAsked, CompletionOutput, Logprob),
        *(StructuredOutputsParams, Tool, ToolsAsked, AssistantMessage, ToolCall, ProcessedImage, Normalising),
        *(ProcessedClip, SpeculativeConfig),
    )
}


def encode(value: object) -> bytes:
    """The message. Raises ValueError for a value that has no place in one, and for one that is too long."""
    content = json.dumps(_plain(value), separators=(",", ":")).encode()
    if len(content) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"{len(content):,} bytes are to be sent to the other processes at once, and a message has at most "
            f"{MAX_MESSAGE_BYTES:,}; shorten the prompt, or give fewer or smaller images and sounds"
        )
    return content


def joined(encoded: Sequence[bytes]) -> list[bytes]:
    """The encoded values as lists, in as few messages as their lengths allow."""
    messages: list[list[bytes]] = []
    room = 0
    for each in encoded:
        if len(each) + 1 > room:
            messages.append([])
            room = MAX_MESSAGE_BYTES - 2
        messages[-1].append(each)
        room -= len(each) + 1
    return [b"[" + b",".join(message) + b"]" for message in messages]


def decode(content: bytes) -> Any:
    """The value of a message. Raises ValueError for what is none."""
    try:
        return _value(json.loads(content))
    except (
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RecursionError,
        AssertionError,
    ) as error:
        raise ValueError(f"a message cannot be read: {error}") from error


def _plain(value: object) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if kind.__name__ in CLASSES and kind is CLASSES[kind.__name__]:
        return {kind.__name__: {name: _plain(getattr(value, name)) for name in _fields(kind)}}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype in _ARRAYS.values() and value.ndim > 1:
        kind_of_array = "pixels" if value.dtype == np.uint8 else "features"
        return {kind_of_array: [list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf":
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key), _plain(each)] for key, each in value.items()]}
    if kind is tuple:
        return {"tuple": _listed(value)}
    if isinstance(value, Sequence | Set) and not isinstance(value, bytearray | memoryview):
        return _listed(value)
    raise ValueError(f"a {kind.__module__}.{kind.__qualname__} cannot be sent to the other processes")


def _listed(values: Any) -> list[Any]:
    found = list(values)
    return found if set(map(type, found)) <= {int} else [_plain(value) for value in found]  # prompts are long


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return plain if set(map(type, plain)) <= {int} else [_value(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1:
        raise ValueError(f"an object must have one key, its type, and has {len(plain)}")
    ((kind, content),) = plain.items()
    if kind == "tuple":
        return tuple(_value(content))
    if kind == "dict":
        return {_value(key): _value(value) for key, value in content}
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind in _ARRAYS:
        shape, encoded = content
        return np.frombuffer(base64.b64decode(encoded, validate=True), _ARRAYS[kind]).reshape(shape)
    if kind not in CLASSES or not isinstance(content, dict):
        raise ValueError(f"{kind[:100]!r} is not a type of message")
    return _object(CLASSES[kind], {name: _value(each) for name, each in content.items()})


def _object(kind: type, fields: dict[str, Any]) -> Any:
    if set(fields) != set(_fields(kind)):
        raise ValueError(f"{kind.__name__} has the fields {sorted(fields)}; it must have {sorted(_fields(kind))}")
    if not dataclasses.is_dataclass(kind):  # the others check themselves, or are handed back to the user alone
        for name, wanted in typing.get_type_hints(kind).items():
            if type(fields[name]) is not wanted:
                raise ValueError(f"{kind.__name__}'s {name} is {fields[name]!r}; it must be {wanted.__name__}")
    if kind is Call and fields["name"] not in CALLS:
        raise ValueError(f"{fields['name']!r} is not a call of an engine; they are {CALLS}")
    return kind(**fields)


def _fields(kind: Any) -> tuple[str, ...]:
    return kind._fields if hasattr(kind, "_fields") else tuple(field.name for field in dataclasses.fields(kind))
