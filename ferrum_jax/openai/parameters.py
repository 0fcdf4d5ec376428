"""The fields of one request's body: which are known, which refused and why, and what they become.

Sampling fields are those of `SamplingParams`; OpenAI's other names are mapped to them. A null is a field
that was not given, except `max_tokens: null`, which means up to the model's limit (the default for chat).
Whatever would change the answer and is not supported is refused by name, with what to do instead; all
functions here raise ValueError with the field, its value and what is allowed. `Rules` say what is known where: a server
streams, and a job does not.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from array import array
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from ferrum_jax.asked.sampling import MAX_LOGIT_BIAS, SAMPLING_ELSEWHERE, SamplingParams
from ferrum_jax.asked.structured_outputs import StructuredOutputsParams, compact
from ferrum_jax.asked.tools import format_of, tools_asked
from ferrum_jax.openai.json_text import JsonError, decoded
from ferrum_jax.prompt import Content, Prompt, check_detail, take_apart
from ferrum_jax.quoting import MOST_NAMED, named, quoted

SAMPLING_FIELDS = frozenset(f.name for f in dataclasses.fields(SamplingParams))
LABELS = frozenset(
    {"model", "user", "metadata", "prompt_cache_key"}
)  # say who asks; by definition without effect on the answer
_PROMPT_OPTIONS = frozenset({"cache_salt", "add_special_tokens"})
_CHAT_OPTIONS = frozenset({"add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"})
_TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_KNOWN = (
    SAMPLING_FIELDS | LABELS | _PROMPT_OPTIONS | {"return_token_ids", "response_format", "return_tokens_as_token_ids"}
)
KNOWN_COMPLETION = _KNOWN | {"prompt"}
KNOWN_EMBEDDING = LABELS | {"input", "cache_salt"}
KNOWN_CHAT = _KNOWN | _CHAT_OPTIONS | _TOOL_FIELDS | {"messages", "max_completion_tokens", "top_logprobs"}
KNOWN_CHAT |= {"reasoning_effort", "include_reasoning"}

_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
_STRUCTURE = ("structured_outputs", "response_format", "tools", "tool_choice", "parallel_tool_calls")
MOST_PARTS = 16_384  # of a chat: messages, their parts and their calls
_LONGEST_TYPO = 64  # characters of a name for which a known one is looked for
_as_json = json.JSONEncoder(ensure_ascii=False).encode
_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}

# field -> (values that ask for nothing, what to do instead)
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "a batch row is answered in one piece; leave it out"),
    "stream_options": ((), "a batch row is answered in one piece; leave it out"),
    "suffix": (("",), "infilling is not supported; put all text before the gap into prompt"),
    **{name: (elsewhere.harmless, elsewhere.instead) for name, elsewhere in SAMPLING_ELSEWHERE.items()},
    "tools": (([],), "tools are for messages"),
    "tool_choice": (("none",), "tools are for messages"),
    "parallel_tool_calls": ((), "tools are for messages"),
    "functions": (([],), "give them as tools"),
    "function_call": (("none",), "give tools with tool_choice"),
    "modalities": ((["text"],), "only text is generated; leave it out"),
    "audio": ((), "only text is generated; leave it out"),
    "prediction": ((), "leave it out"),
    "reasoning_effort": ((), "it goes with messages; give those in place of a prompt"),
    "service_tier": (("auto", "default"), "leave it out"),
    "include_reasoning": ((True,), "it goes with messages; give those in place of a prompt"),
    "request_id": ((), "a row's name is its custom_id; leave it out"),
    "store": ((False,), "nothing is stored but the output file; leave it out"),
    "priority": ((0,), "put urgent rows into a job of their own"),
    "chat_template": ((), "change the template in the checkpoint's folder"),
    "documents": (([],), "put them into a message, as the model's template would"),
    "logprob_token_ids": (([],), "read them out of logprobs, whose count may be 20"),
    "continue_final_message": ((False,), "it goes with messages; give those in place of a prompt"),
    "chat_template_kwargs": (({},), "it goes with messages; give those in place of a prompt"),
    "adapter": ((), "vectors are made without one; leave it out"),
    "input": ((), "it is for /v1/embeddings; give prompt or messages"),
    "encoding_format": ((), "it is for /v1/embeddings; leave it out"),
    "dimensions": ((), "it is for /v1/embeddings; leave it out"),
}


class FieldError(ValueError):
    """What is wrong with a field; param: its name."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Which fields one kind of request may have, and why not others.

    refused: field -> (values that ask for nothing, what to do instead).
    """

    known: frozenset[str]
    refused: Mapping[str, tuple[tuple[Any, ...], str]]

    def problems(self, body: Mapping[str, Any]) -> list[str]:
        """The fields that are not known or not supported, in the body's order."""
        return [key for key in body if key not in self.known and not self._is_harmless(key, body[key])]

    def _is_harmless(self, key: str, given: Any) -> bool:
        harmless = self.refused[key][0] if key in self.refused else ()
        return given is None or any(given == value and type(given) is type(value) for value in harmless)

    def refuse(self, body: Mapping[str, Any]) -> None:
        """Raises FieldError that says of the first few problems what is wrong, and counts the others."""
        found = self.problems(body)
        if not found:
            return
        first = sorted(found[:MOST_NAMED])
        said = [self._why(key, body[key]) for key in first]
        if len(found) > len(first):
            said.append(f"{len(found) - len(first):,} more fields are not taken either")
        if any(key not in self.refused for key in first):
            said.append(f"known are {', '.join(sorted(self.known))}")
        raise FieldError("; ".join(said), first[0])

    def _why(self, key: str, given: Any) -> str:
        if key in self.refused:
            return f"{key} = {quoted(given, _as_json)} is not supported: {self.refused[key][1]}"
        return not_known(key, self.known)


def not_known(name: str, known: Collection[str]) -> str:
    """That a name is not known, and which one may have been meant."""
    meant = get_close_matches(name, known, n=1) if len(name) <= _LONGEST_TYPO else []
    return f"{named([name])} is not known" + (f" (did you mean {meant[0]}?)" if meant else "")


JOB_COMPLETION = Rules(known=KNOWN_COMPLETION | {"adapter"}, refused=REFUSED)
JOB_CHAT = Rules(known=KNOWN_CHAT | {"adapter"}, refused=REFUSED)
JOB_EMBEDDING = Rules(known=KNOWN_EMBEDDING | {"encoding_format", "dimensions"}, refused=REFUSED)
_KNOWN_PAIR = LABELS | {"cache_salt", "instruction", "truncate"}
JOB_SCORE = Rules(known=_KNOWN_PAIR | {"text_1", "text_2"}, refused=REFUSED)
JOB_RERANK = Rules(known=_KNOWN_PAIR | {"query", "documents", "top_n", "return_documents"}, refused=REFUSED)


def sampling_values(body: Mapping[str, Any], *, is_chat: bool, rules: Rules | None = None) -> dict[str, Any]:
    """The fields of SamplingParams that the body gives. Raises ValueError for what is not supported.

    rules: those of a job's row, unless others are given.
    """
    (rules or (JOB_CHAT if is_chat else JOB_COMPLETION)).refuse(body)
    values = {key: body[key] for key in SAMPLING_FIELDS if body.get(key) is not None}
    if "max_tokens" in body or is_chat:
        values["max_tokens"] = _max_tokens(body)
    if is_chat:
        logprobs = _chat_logprobs(body)
        values.pop("logprobs", None)
        if logprobs is not None:
            values["logprobs"] = logprobs
        values.pop("echo", None)  # a chat echoes the message that it continues, which the row has
    elif values.get("echo") is True:
        if type(values.get("max_tokens")) is int and values["max_tokens"] == 0:
            values["max_tokens"] = 1  # every step draws a token; `Row.generates` leaves it out of the answer
        if "logprobs" in values:
            values.setdefault("prompt_logprobs", values["logprobs"])
    structure = _structure({name: body[name] for name in _STRUCTURE if body.get(name) is not None})
    if structure is not None:
        values["structured_outputs"] = structure
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    for field, one in (("stop", str), ("stop_token_ids", int), ("allowed_token_ids", int), ("bad_words", list)):
        if field in values and not (isinstance(values[field], list) or (one is str and isinstance(values[field], str))):
            raise ValueError(f"{field} is {quoted(values[field])}; it must be a list")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _structure(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The structure that a body asks for by one of its names; one object for equal wishes."""
    if not given:
        return None
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
    """The fields of a body that belong to its prompt, as a mapping in `ferrum_jax.prompt` has them."""
    names = _PROMPT_OPTIONS | _CHAT_OPTIONS if is_chat else _PROMPT_OPTIONS
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


def with_options(content: Content, options: Mapping[str, Any]) -> Prompt:
    """The content together with the options that a body gives for it."""
    if not options:
        return content
    is_text = isinstance(content, str)
    name = "prompt" if is_text else "messages" if isinstance(content[0], dict) else "prompt_token_ids"
    prompt = {name: content, **options}
    take_apart(prompt)
    return prompt


def prompts_of(field: str, prompts: object, most: int | None = None) -> tuple[Content, ...]:
    """What a row asks about: one prompt or, where it is a list of texts or of lists of token ids, several.

    most: prompts that are taken; None for any number.
    """
    if field == "messages":
        return (messages_of(field, prompts),)
    one = token_ids_of if field == "prompt_token_ids" else _prompt_of
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list):
        if most is not None and len(prompts) > most:
            raise ValueError(f"{field} has {len(prompts):,} prompts; at most {most:,} are taken at once")
        return tuple(one(f"{field}[{index}]", prompt) for index, prompt in enumerate(prompts))
    return (one(field, prompts),)


def _prompt_of(field: str, prompt: object) -> str | array[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{field} is empty; give at least one token")
        return prompt
    return token_ids_of(field, prompt)


def token_ids_of(field: str, token_ids: object) -> array[int]:
    if not isinstance(token_ids, list):
        kind = "a list of token ids" if field.startswith("prompt_token_ids") else "a string or a list of token ids"
        raise ValueError(f"{field} is {quoted(token_ids)}; it must be {kind}")
    if not token_ids:
        raise ValueError(f"{field} is empty; give at least one token")
    packed = packed_ids(token_ids)
    if packed is None:
        wrong = next(t for t in token_ids if type(t) is not int or not 0 <= t < 2**31)
        raise ValueError(f"{field} holds {quoted(wrong)}; token ids are whole numbers, 0 or more and less than 2**31")
    return packed


def packed_ids(token_ids: object) -> array[int] | None:
    """The ids as int32; None for an empty list, or for anything but a list of token ids."""
    if not isinstance(token_ids, list) or set(map(type, token_ids)) != {int} or min(token_ids) < 0:
        return None
    try:
        return array("i", token_ids)
    except OverflowError:  # an id is too large for int32
        return None


def messages_of(field: str, messages: object) -> list[dict[str, Any]]:
    """The messages as templates read them. Raises ValueError for more than MOST_PARTS, with their parts and calls."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{field} is {quoted(messages)}; it must be a list with at least one message")
    if (count := len(messages)) <= MOST_PARTS:
        lists = (each.get(name) for each in messages if isinstance(each, dict) for name in ("content", "tool_calls"))
        count += sum(len(each) for each in lists if isinstance(each, list))
    if count > MOST_PARTS:
        raise ValueError(f"{field} has {count:,} messages, parts and calls; at most {MOST_PARTS:,} are taken")
    return [_message(f"{field}[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{name} is {quoted(message)}; it must be an object with role and content")
    unknown = sorted(key for key in message if key not in _MESSAGE_FIELDS and message[key] is not None)
    if unknown:
        known = ", ".join(_MESSAGE_FIELDS)
        raise ValueError(f"{name} has {quoted(unknown)}; only {known} are supported, put the rest into content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{name}.role is {quoted(role)}; it must be a string such as 'user'")
    more: dict[str, Any] = {key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None}
    if message.get("tool_calls"):
        more["tool_calls"] = _earlier_calls(f"{name}.tool_calls", message["tool_calls"])
        content = "" if content is None else content
    if isinstance(content, list):
        if role != "assistant" and any(isinstance(p, dict) and p.get("type") == "image_url" for p in content):
            return {"role": role, "content": [_part(name, part) for part in content], **more}
        content = "".join(_text_part(name, part) for part in content)
    more |= _earlier_thought(name, message, content)
    if not isinstance(content, str):
        raise ValueError(f"{name}.content is {quoted(content)}; it must be a string or a list of text parts")
    return {"role": role, "content": content, **more}


def _earlier_thought(name: str, message: Mapping[str, Any], content: object) -> dict[str, str]:
    """What an assistant's message thought, under the names by which templates read it."""
    field = "reasoning" if message.get("reasoning") is not None else "reasoning_content"
    thought = message.get(field)
    if thought is not None and not isinstance(thought, str):
        raise ValueError(f"{name}.{field} is {quoted(thought)}; it must be a string")
    if not thought:
        return {}
    return {"reasoning_content": thought} | ({} if content else {"thinking": thought})


def _earlier_calls(name: str, calls: object) -> list[dict[str, Any]]:
    """The calls of an assistant's message, with their arguments as objects, as templates read them."""
    if not isinstance(calls, list):
        raise ValueError(f"{name} is {quoted(calls)}; it must be a list of calls")
    found = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{name}[{index}] is {quoted(call)}; it must have a function with name and arguments")
        arguments = function.get("arguments") or "{}"
        try:
            arguments = decoded(arguments) if isinstance(arguments, str) else arguments
        except JsonError as error:
            raise ValueError(f"{name}[{index}].function.arguments is no JSON: {error}") from error
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _part(name: str, part: object) -> dict[str, Any]:
    """A part of a message with images: a text, or the URL of an image."""
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return {"type": "text", "text": _text_part(name, part)}
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) and set(image) <= {"url", "detail"} else None
    if not isinstance(url, str) or set(part) != {"type", "image_url"}:
        example = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        raise ValueError(f"{name}.content has an image that is not like {example}")
    check_detail(image.get("detail"))  # type: ignore[union-attr]
    return {"type": "image_url", "image_url": {"url": url}}


def _text_part(name: str, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else part
    raise ValueError(f"{name}.content has a part {quoted(kind)}; only text and image_url parts are supported")


def model_of(body: Mapping[str, Any]) -> str | None:
    """The name of the model that a row asks for; None where it asks for none."""
    model = body.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise ValueError(f"model is {quoted(model)}; it must be the name of a model, or be left out")
    return model


def adapter_of(body: Mapping[str, Any]) -> str | None:
    """The name of the adapter that a row asks for; None where it asks for none."""
    adapter = body.get("adapter")
    if adapter is not None and (not isinstance(adapter, str) or not adapter):
        raise ValueError(f"adapter is {quoted(adapter)}; it must be the name of an adapter, or be left out")
    return adapter


def flag(body: Mapping[str, Any], key: str) -> bool | None:
    """None where it is not given."""
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {quoted(value)}; it must be true or false")
    return value
