"""How a body wants its text: fields of SamplingParams, and arguments of the prompt. All raise ValueError.

OpenAI's other names are mapped to those of `SamplingParams`. `max_tokens: null` means up to the model's limit, which is
the default for chat.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

from ferrum_jax.inputs.params.schema import refuse_rounded
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams, compact
from ferrum_jax.inputs.params.tools import format_of, tools_asked
from ferrum_jax.io.error_text import quoted
from ferrum_jax.sampling_params import MAX_LOGIT_BIAS, PARAMETERS

_PROMPT_OPTIONS = ("cache_salt", "add_special_tokens")
_CHAT_OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
_STRUCTURE = ("structured_outputs", "response_format", "tools", "tool_choice", "parallel_tool_calls")
_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}


def sampling_values(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """The fields of SamplingParams that the body gives."""
    values = {key: body[key] for key in PARAMETERS if body.get(key) is not None}
    if "max_tokens" in body or is_chat:
        values["max_tokens"] = _max_tokens(body)
    if is_chat:
        logprobs = _chat_logprobs(body)
        values.pop("logprobs", None)
        if logprobs is not None:
            values["logprobs"] = logprobs
        values.pop("echo", None)  # a chat echoes the message that it continues, which the row has
    elif values.get("echo") is True:
        if type(values.get("max_tokens")) in (int, float) and values["max_tokens"] == 0:
            values["max_tokens"] = 1  # every step draws a token; `Row.generates` leaves it out of the answer
        if "logprobs" in values:
            values.setdefault("prompt_logprobs", values["logprobs"])
    structure = _structure({name: body[name] for name in _STRUCTURE if body.get(name) is not None})
    if structure is not None:
        values["structured_outputs"] = structure
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    for field in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "prompt_logprob_token_ids"):
        if field in values and not isinstance(values[field], (list, str) if field == "stop" else list):
            raise ValueError(f"{field} is {quoted(values[field])}; it must be a list")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _structure(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The structure that a body asks for by one of its names; one object for equal wishes."""
    if not given:
        return None
    refuse_rounded(given)
    try:
        return _known_structure(compact(given))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{' and '.join(given)} cannot be read as JSON: {error}") from error


@functools.lru_cache(maxsize=64)
def _known_structure(text: str) -> StructuredOutputsParams | None:
    given = json.loads(text)
    demanded = tools_asked(given.get("tools"), given.get("tool_choice"), given.get("parallel_tool_calls"))
    formatted = format_of(given["response_format"]) if "response_format" in given else None
    named = {
        "structured_outputs": given.get("structured_outputs"),
        "response_format": formatted,
        "tool_choice": demanded and {"tools": demanded},
    }
    asked = [name for name, value in named.items() if value is not None]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)} both say what the answer looks like; give one of them")
    if asked == ["structured_outputs"]:
        return StructuredOutputsParams.from_dict(given["structured_outputs"])
    return StructuredOutputsParams(**named[asked[0]]) if asked else None


def with_defaults(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body, and the job's defaults for those that it gives under no name."""
    given = {key for key, value in body.items() if value is not None or key == "max_tokens"}
    given |= {field for other, field in _OTHER_NAMES.items() if other in given}
    return {**body, **{key: value for key, value in defaults.items() if key not in given}}


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
            raise ValueError(f"top_logprobs is {quoted(top)} without logprobs; set logprobs to true")
        return None
    if asked is True:
        return 0 if top is None else top
    if top is not None:
        raise ValueError(f"logprobs is {quoted(asked)} beside top_logprobs; set logprobs to true")
    return asked


def _logit_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise ValueError(f"logit_bias is {quoted(bias)}; it must be an object of token id to bias")
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias holds {len(bias):,} entries; at most {MAX_LOGIT_BIAS} are allowed")
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit():
            raise ValueError(f"logit_bias has the key {quoted(key)}; keys must be token ids")
        if int(key) in found:
            raise ValueError(f"logit_bias has token {int(key)} twice; give it once")
        found[int(key)] = value
    return found


def prompt_options(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """The fields of a body that belong to its prompt, as a mapping in `ferrum_jax.inputs.prompt` has them."""
    names = (*_PROMPT_OPTIONS, *_CHAT_OPTIONS) if is_chat else _PROMPT_OPTIONS
    found = {name: body[name] for name in names if body.get(name) is not None}
    if body.get("tool_choice") == "none" or not found.get("tools"):
        found.pop("tools", None)  # what must not be called is not shown
    if is_chat and body.get("reasoning_effort") is not None:
        found["chat_template_kwargs"] = _with_effort(found.get("chat_template_kwargs", {}), body["reasoning_effort"])
    return found


def _with_effort(variables: object, effort: object) -> dict[str, Any]:
    """The template's variables with the effort, under the name by which templates read it."""
    if not isinstance(effort, str):
        raise ValueError(f"reasoning_effort is {quoted(effort)}; it must be a string such as 'low'")
    if not isinstance(variables, Mapping):
        raise ValueError(f"chat_template_kwargs is {quoted(variables)}; it must be an object of names and values")
    if variables.get("reasoning_effort", effort) != effort:
        raise ValueError("reasoning_effort and that of chat_template_kwargs differ; give one of them")
    return {**variables, "reasoning_effort": effort}
