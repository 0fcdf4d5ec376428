"""Bodies of HTTP requests: what they ask for, in the names of OpenAI and vLLM, checked before anything is queued.

The fields and their meaning are those of a batch job's rows (`ferrum_jax/openai/parameters.py`); a server has some
more, since it streams, and serves several who ask at once. Every error names its field.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ferrum_jax.asked.sampling import WHOLE_VOCABULARY, SamplingParams
from ferrum_jax.openai.answer_options import AnswerOptions, answer_options
from ferrum_jax.openai.json_text import JsonError, decoded
from ferrum_jax.openai.parameters import (
    KNOWN_CHAT,
    KNOWN_COMPLETION,
    KNOWN_EMBEDDING,
    REFUSED,
    FieldError,
    Rules,
    flag,
    model_of,
    prompt_options,
    prompts_of,
    sampling_values,
    with_options,
)
from ferrum_jax.openai.reading_fields import count_of, is_base64
from ferrum_jax.prompt import Prompt, named_text
from ferrum_jax.quoting import quoted

MOST_VALUES = 1_000_000  # of one body
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
WITHOUT_EFFECT = frozenset({"service_tier", "safety_identifier"})
_HERE = frozenset({"stream", "stream_options", "priority", "timeout", "request_id"}) | WITHOUT_EFFECT
_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})
_INSTEAD: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        **{name: rule for name, rule in REFUSED.items() if name not in _HERE},
        "store": ((False,), "nothing is stored; leave it out"),
        "adapter": ((), "name the adapter as the model"),
    }
)
COMPLETION = Rules(known=KNOWN_COMPLETION | _HERE, refused=_INSTEAD)
CHAT = Rules(known=KNOWN_CHAT | _HERE, refused=_INSTEAD)
_HOW = ("pooling", "normalize", "prompt_name", "truncate", "dimensions")  # a vector is made
_VECTOR_HERE = frozenset({"encoding_format", "priority", "timeout", *_HOW})
EMBEDDING = Rules(
    known=KNOWN_EMBEDDING | _VECTOR_HERE | WITHOUT_EFFECT,
    refused={name: rule for name, rule in _INSTEAD.items() if name not in (*_VECTOR_HERE, "input")},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """What one request may ask for at most. ignores_unknown: unknown fields become a warning and no error."""

    max_n: int = 128
    max_prompts: int = 2048
    ignores_unknown: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedText:
    """A completion or a chat's answer. prompts: one or several; params: of each. echoed: what an answer begins with."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    is_chat: bool
    streams: bool
    includes_usage: bool
    usage_in_every_chunk: bool
    returns_token_ids: bool
    form: AnswerOptions
    echo: bool
    echoed: str
    generates: bool
    model: str | None
    request_id: str | None
    priority: int
    timeout_s: float | None
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedVectors:
    """Vectors of texts. options: how they are made, and the salt."""

    prompts: tuple[str | list[int], ...]
    options: Mapping[str, Any]
    as_base64: bool
    model: str | None
    priority: int
    timeout_s: float | None
    warnings: tuple[str, ...]


def read_body(content: bytes) -> dict[str, Any]:
    """The object of a body. Raises FieldError, without a field, for what is none."""
    if (count := num_commas(content)) >= MOST_VALUES:
        raise FieldError(f"the body has {count + 1:,} values; at most {MOST_VALUES:,} are read", None)
    try:
        found = decoded(content.decode())
    except UnicodeDecodeError as error:
        raise FieldError(f"the body is not UTF-8 at byte {error.start + 1}", None) from error
    except JsonError as error:
        raise FieldError(f"the body is {error}", None) from error
    if not isinstance(found, dict):
        raise FieldError(f"the body is a JSON {type(found).__name__}; it must be an object", None)
    return found


def num_commas(content: bytes) -> int:
    """How many commas of a JSON text part its values, looked for only where the text has too many of any kind.

    The decoder makes millions of small values without once letting another thread run, so they are counted before.
    """
    count = content.count(b",")
    if count < MOST_VALUES:
        return count
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    found = np.frombuffer(plain, np.uint8)
    is_inside = np.bitwise_xor.accumulate(found == ord('"'))
    return int(np.count_nonzero((found == ord(",")) & ~is_inside))


def asked_text(given: Mapping[str, Any], limits: BodyLimits, *, is_chat: bool) -> AskedText:
    """What a body asks for. Raises FieldError for the first thing that is wrong."""
    with_rules = CHAT if is_chat else COMPLETION
    body, warnings = known_fields(given, with_rules, limits)
    with naming_fields(body):
        return _text(body, with_rules, limits, warnings, is_chat=is_chat)


def _text(
    body: Mapping[str, Any], rules: Rules, limits: BodyLimits, warnings: tuple[str, ...], *, is_chat: bool
) -> AskedText:
    params = SamplingParams.from_dict(sampling_values(body, is_chat=is_chat, rules=rules))
    streams = flag(body, "stream") is True
    options = _stream_options(body, streams=streams)
    if streams and params.prompt_logprobs is not None:
        raise ValueError(
            "stream is true beside log-probabilities of the prompt, which come with the whole; leave it out"
        )
    if params.prompt_logprobs == WHOLE_VOCABULARY:
        raise ValueError("prompt_logprobs is -1, the whole vocabulary of each token, which is not sent over HTTP")
    name = "messages" if is_chat else "prompt"
    if body.get(name) is None:
        raise FieldError(f"{name} is missing; the body must have it", name)
    contents = prompts_of(name, body[name], limits.max_prompts)
    _check_choices(len(contents), params.n, limits)
    of_prompt = prompt_options(body, is_chat=is_chat)
    echo = flag(body, "echo") is True
    return AskedText(
        prompts=tuple(with_options(content, of_prompt) for content in contents),
        params=params,
        is_chat=is_chat,
        streams=streams,
        includes_usage=options.get("include_usage", False),
        usage_in_every_chunk=options.get("continuous_usage_stats", False),
        returns_token_ids=flag(body, "return_token_ids") is True or not params.detokenize,
        form=answer_options(body, params.logprobs),
        echo=echo,
        echoed=_continued(contents[0]) if echo and is_chat else "",
        generates=not (params.echo and body.get("max_tokens") == 0),
        model=model_of(body),
        request_id=_request_id(body),
        warnings=(*warnings, *(params.structured_outputs.warnings if params.structured_outputs else ())),
        **urgency(body),
    )


def _request_id(body: Mapping[str, Any]) -> str | None:
    found = body.get("request_id")
    if found is not None and (not isinstance(found, str) or not REQUEST_ID.fullmatch(found)):
        raise ValueError(f"request_id is {quoted(found)}; it must be 1 to 128 letters, digits or any of _ . : -")
    return found


def asked_vectors(given: Mapping[str, Any], limits: BodyLimits) -> AskedVectors:
    """What a body of /v1/embeddings asks for. Raises FieldError for the first thing that is wrong."""
    body, warnings = known_fields(given, EMBEDDING, limits)
    as_base64 = is_base64(body)
    if body.get("input") is None:
        raise FieldError("input is missing; the body must have it", "input")
    with naming_fields(body):
        contents = prompts_of("input", body["input"], limits.max_prompts)
        _check_how(body)
        return AskedVectors(
            prompts=tuple(each if isinstance(each, str) else list(each) for each in contents),  # type: ignore[misc]
            options={name: body[name] for name in _HOW if body.get(name) is not None} | salt_of(body),
            as_base64=as_base64,
            model=model_of(body),
            warnings=warnings,
            **urgency(body),
        )


def _check_how(body: Mapping[str, Any]) -> None:
    """Raises for fields of a vector that are of another type; the model says which of their values it takes."""
    for name in ("normalize", "truncate"):
        flag(body, name)
    for name in ("pooling", "prompt_name"):
        if body.get(name) is not None and not isinstance(body[name], str):
            raise FieldError(f"{name} is {quoted(body[name])}; it must be a string", name)
    count_of(body, "dimensions")


def known_fields(
    given: Mapping[str, Any], rules: Rules, limits: BodyLimits
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The body without what is to be ignored, and a warning for each field of that."""
    if not limits.ignores_unknown:
        rules.refuse(given)
        return given, ()
    problems = dict.fromkeys(rules.problems(given))
    ignored = tuple(f"{name} was ignored" for name in problems)
    return {name: value for name, value in given.items() if name not in problems}, ignored


def _check_choices(count: int, n: int, limits: BodyLimits) -> None:
    if n > limits.max_n:
        raise FieldError(f"n is {n}; at most {limits.max_n} choices are made of a prompt here", "n")
    if n * count > limits.max_prompts:
        raise FieldError(f"n is {n} of {count} prompts; at most {limits.max_prompts} choices are made at once", "n")


def _stream_options(body: Mapping[str, Any], *, streams: bool) -> Mapping[str, bool]:
    options = body.get("stream_options")
    if options is None:
        return {}
    if not streams:
        raise FieldError("stream_options is given without stream; set stream to true", "stream_options")
    if not isinstance(options, dict):
        raise FieldError(f"stream_options is {quoted(options)}; it must be an object", "stream_options")
    unknown = sorted(set(options) - _STREAM_OPTIONS)
    if unknown:
        known = ", ".join(sorted(_STREAM_OPTIONS))
        raise FieldError(f"stream_options has {quoted(unknown)}; known are {known}", f"stream_options.{unknown[0]}")
    for name, value in options.items():
        if value is not None and not isinstance(value, bool):
            place = f"stream_options.{name}"
            raise FieldError(f"{place} is {quoted(value)}; it must be true or false", place)
    return {name: value is True for name, value in options.items()}


def urgency(body: Mapping[str, Any]) -> dict[str, Any]:
    """When a request is to run: the fields of what is asked. Raises FieldError."""
    priority, timeout = body.get("priority"), body.get("timeout")
    if priority is not None and (type(priority) is not int or abs(priority) >= 2**31):
        raise FieldError(f"priority is {quoted(priority)}; it must be a whole number, and lower runs first", "priority")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
        raise FieldError(f"timeout is {quoted(timeout)}; it must be a number of seconds, more than 0", "timeout")
    return {"priority": priority or 0, "timeout_s": timeout}


def _continued(messages: Any) -> str:
    """What an echo of a chat begins with: the assistant's message that goes on."""
    return messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""


def salt_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The salt of a body's texts, where it gives one. Raises FieldError for what is none."""
    with naming_fields(body):
        salt = named_text("cache_salt", body.get("cache_salt"))
    return {"cache_salt": salt} if salt else {}


@contextlib.contextmanager
def naming_fields(body: Mapping[str, Any]) -> Iterator[None]:
    """Makes a ValueError a FieldError of the field that its message begins with."""
    try:
        yield
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(str(error), param_of(str(error), body)) from error


def param_of(message: str, fields: Container[str]) -> str | None:
    """The field that a message is about, if it is one of these: it begins with it, or with other words for it.

    Parts such as messages[0].content stay.
    """
    found = re.match(r"[A-Za-z_]\w*(?:\[[^\]]*\]|\.\w+)*", message)
    name = "" if found is None else found[0]
    if re.split(r"[.\[]", name)[0] in fields:
        return name
    meant = next((names for words, names in _MEANT.items() if message.startswith(words)), ())
    return next((each for each in meant if each in fields), None)


_PROMPT, _SCHEMA = ("prompt", "messages", "input"), ("response_format", "text", "structured_outputs")
_MEANT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "the prompt": _PROMPT,
        "this model's maximum context length": _PROMPT,
        "the JSON schema": _SCHEMA,
        "structured_outputs.json": _SCHEMA,
        "the chat template reads": ("chat_template_kwargs",),
    }
)
