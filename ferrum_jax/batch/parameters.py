"""The fields of one request's body: which are known, which refused and why, and what they become.

Sampling fields are those of `SamplingParams`; OpenAI's other names are mapped to them. A null is a field
that was not given, except `max_tokens: null`, which means up to the model's limit (the default for chat).
Whatever would change the answer and is not supported is refused by name, with what to do instead; all
functions here raise ValueError with the field, its value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from ferrum_jax.prompt import Prompt, take_apart
from ferrum_jax.request import SamplingParams

_SAMPLING_FIELDS = frozenset(f.name for f in dataclasses.fields(SamplingParams))
LABELS = frozenset({"model", "user", "metadata"})  # say who asks; by definition without effect on the answer
_KNOWN = _SAMPLING_FIELDS | LABELS | {"return_token_ids", "cache_salt"}
_KNOWN_COMPLETION = _KNOWN | {"prompt"}
_KNOWN_EMBEDDING = LABELS | {"input", "cache_salt"}
_KNOWN_CHAT = _KNOWN | {"messages", "max_completion_tokens", "top_logprobs"}

# field -> (values that ask for nothing, what to do instead)
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "a batch row is answered in one piece; leave it out"),
    "stream_options": ((), "a batch row is answered in one piece; leave it out"),
    "echo": ((False,), "join prompt and text afterwards, or ask for prompt_logprobs"),
    "suffix": (("",), "infilling is not supported; put all text before the gap into prompt"),
    "best_of": ((1,), "ask for n choices with logprobs and keep the best"),
    "tools": (([],), "describe the tools in a message"),
    "tool_choice": (("none",), "describe the tools in a message"),
    "functions": (([],), "describe the functions in a message"),
    "function_call": (("none",), "describe the functions in a message"),
    "parallel_tool_calls": ((), "describe the tools in a message"),
    "response_format": (({"type": "text"},), "ask for the format in the prompt and use stop strings"),
    "modalities": ((["text"],), "only text is generated; leave it out"),
    "audio": ((), "only text is generated; leave it out"),
    "prediction": ((), "leave it out"),
    "reasoning_effort": ((), "ask for it in a message, as the model's own page says"),
    "service_tier": (("auto", "default"), "leave it out"),
    "store": ((False,), "nothing is stored but the output file; leave it out"),
    "priority": ((0,), "put urgent rows into a job of their own"),
    "chat_template": ((), "change the template in the checkpoint's folder"),
    "chat_template_kwargs": (({},), "change the template in the checkpoint's folder"),
    "input": ((), "it is for /v1/embeddings; give prompt or messages"),
    "encoding_format": (("float",), "vectors are lists of numbers; leave it out"),
    "dimensions": ((), "cut the vector afterwards"),
}


def sampling_values(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """The fields of SamplingParams that the body gives. Raises ValueError for what is not supported."""
    _refuse(body, _KNOWN_CHAT if is_chat else _KNOWN_COMPLETION)
    values = {key: body[key] for key in _SAMPLING_FIELDS if body.get(key) is not None}
    if "max_tokens" in body or is_chat:
        values["max_tokens"] = _max_tokens(body)
    if is_chat:
        logprobs = _chat_logprobs(body)
        values.pop("logprobs", None)
        if logprobs is not None:
            values["logprobs"] = logprobs
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    for field, one in (("stop", str), ("stop_token_ids", int)):
        if field in values and not (isinstance(values[field], list) or (one is str and isinstance(values[field], str))):
            raise ValueError(f"{field} is {values[field]!r}; it must be a list")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _refuse(body: Mapping[str, Any], known: frozenset[str]) -> None:
    problems = []
    for key in sorted(set(body) - known):
        if body[key] is None:
            continue
        if key not in _REFUSED:
            meant = get_close_matches(key, known, n=1)
            hint = f" (did you mean {meant[0]}?)" if meant else ""
            problems.append(f"{key} is not known{hint}; known are {', '.join(sorted(known))}")
            continue
        harmless, repair = _REFUSED[key]
        if not any(body[key] == value and type(body[key]) is type(value) for value in harmless):
            problems.append(f"{key} = {json.dumps(body[key], ensure_ascii=False)} is not supported: {repair}")
    if problems:
        raise ValueError("; ".join(problems))


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    given = {body[key] for key in ("max_tokens", "max_completion_tokens") if isinstance(body.get(key), int | float)}
    if len(given) > 1:
        raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
    found = body.get("max_completion_tokens")
    return body.get("max_tokens") if found is None else found


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """OpenAI's chat pair (logprobs: bool, top_logprobs: count) as one count; a plain count is taken too."""
    asked, top = body.get("logprobs"), body.get("top_logprobs")
    if asked is None or asked is False:
        if top is not None:
            raise ValueError(f"top_logprobs is {top!r} without logprobs; set logprobs to true")
        return None
    if asked is True:
        return 0 if top is None else top
    if top is not None:
        raise ValueError(f"logprobs is {asked!r} beside top_logprobs; set logprobs to true")
    return asked


def _logit_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise ValueError(f"logit_bias is {bias!r}; it must be an object of token id to bias")
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit():
            raise ValueError(f"logit_bias has the key {key!r}; keys must be token ids")
        if int(key) in found:
            raise ValueError(f"logit_bias has token {int(key)} twice; give it once")
        found[int(key)] = value
    return found


def with_salt(content: str | array[int] | list[dict[str, str]], cache_salt: object) -> Prompt:
    """The prompt of a body that may name a cache_salt."""
    if cache_salt is None:
        return content
    is_text = isinstance(content, str)
    name = "prompt" if is_text else "messages" if isinstance(content[0], dict) else "prompt_token_ids"
    prompt = {name: content, "cache_salt": cache_salt}
    take_apart(prompt)
    return prompt


def refuse_unknown_for_embedding(body: Mapping[str, Any]) -> None:
    _refuse(body, _KNOWN_EMBEDDING)


def prompt_of(field: str, prompt: object) -> str | array[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{field} is empty; give at least one token")
        return prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise ValueError(f"{field} is a list of {len(prompt)} prompts; write one line for each")
    return token_ids_of(field, prompt)


def token_ids_of(field: str, token_ids: object) -> array[int]:
    if not isinstance(token_ids, list):
        kind = "a list of token ids" if field == "prompt_token_ids" else "a string or a list of token ids"
        raise ValueError(f"{field} is {token_ids!r}; it must be {kind}")
    if not token_ids:
        raise ValueError(f"{field} is empty; give at least one token")
    packed = packed_ids(token_ids)
    if packed is None:
        wrong = next(t for t in token_ids if type(t) is not int or not 0 <= t < 2**31)
        raise ValueError(f"{field} holds {wrong!r}; token ids are whole numbers, 0 or more and less than 2**31")
    return packed


def packed_ids(token_ids: object) -> array[int] | None:
    """The ids as int32; None for all that is no list of them, or an empty one."""
    if not isinstance(token_ids, list) or set(map(type, token_ids)) != {int} or min(token_ids) < 0:
        return None
    try:
        return array("i", token_ids)
    except OverflowError:  # out of its range
        return None


def messages_of(field: str, messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{field} is {messages!r}; it must be a list with at least one message")
    return [_message(f"{field}[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, message: object) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"{name} is {message!r}; it must be an object with role and content")
    unknown = sorted(key for key in message if key not in ("role", "content") and message[key] is not None)
    if unknown:
        raise ValueError(f"{name} has {unknown}; only role and content are supported, put the rest into content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{name}.role is {role!r}; it must be a string such as 'user'")
    if isinstance(content, list):
        content = "".join(_text_part(name, part) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{name}.content is {content!r}; it must be a string or a list of text parts")
    return {"role": role, "content": content}


def _text_part(name: str, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else part
    raise ValueError(f"{name}.content has a part {kind!r}; only text parts are supported")


def flag(body: Mapping[str, Any], key: str) -> bool | None:
    """None where it is not given."""
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; it must be true or false")
    return value
