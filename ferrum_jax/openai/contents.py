"""The contents of a body: prompts, and messages of chats as templates read them. All raise ValueError."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from ferrum_jax.inputs.prompt import INPUT_AUDIO, SEEN, Content, check_detail, url_of_input_audio
from ferrum_jax.io.error_text import quoted
from ferrum_jax.io.ints import as_whole
from ferrum_jax.openai.json_text import JsonError, decoded

_SEEN = {f"{noun}_url": noun for noun in SEEN} | {INPUT_AUDIO: "audio"}
_EXAMPLES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
MAX_PARTS = 16_384  # of a chat: messages, their parts and their calls
_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
_WITHOUT_CONTENT = ("tool_calls", "reasoning_content")  # of an assistant; beside them its content may be null
_NOTHING = (None, [], {}, "")  # what other servers write into messages where there is nothing


def prompts_of(field: str, prompts: object, most: int | None = None) -> tuple[Content, ...]:
    """The prompts of a row: one, or several in a list of texts or of lists of token ids.

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
    return prompt if isinstance(prompt, str) else token_ids_of(field, prompt)


def token_ids_of(field: str, token_ids: object) -> array[int]:
    if not isinstance(token_ids, list):
        kind = "a list of token ids" if field.startswith("prompt_token_ids") else "a string or a list of token ids"
        raise ValueError(f"{field} is {quoted(token_ids)}; it must be {kind}")
    if not token_ids:
        raise ValueError(f"{field} is empty; give at least one token")
    packed = packed_ids(token_ids) or packed_ids(token_ids := [*map(as_whole, token_ids)])
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
    """The messages as templates read them. Raises ValueError for more than MAX_PARTS, with their parts and calls."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{field} is {quoted(messages)}; it must be a list with at least one message")
    if (count := len(messages)) <= MAX_PARTS:
        lists = (each.get(name) for each in messages if isinstance(each, dict) for name in ("content", "tool_calls"))
        count += sum(len(each) for each in lists if isinstance(each, list))
    if count > MAX_PARTS:
        raise ValueError(f"{field} has {count:,} messages, parts and calls; at most {MAX_PARTS:,} are taken")
    return [_message(f"{field}[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{name} is {quoted(message)}; it must be an object with role and content")
    unknown = sorted(key for key in message if key not in _MESSAGE_FIELDS and message[key] not in _NOTHING)
    if unknown:
        known = ", ".join(_MESSAGE_FIELDS)
        raise ValueError(f"{name} has {quoted(unknown)}; only {known} are supported, put the rest into content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{name}.role is {quoted(role)}; it must be a string such as 'user'")
    more: dict[str, Any] = {key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None}
    if message.get("tool_calls"):
        more["tool_calls"] = _earlier_calls(f"{name}.tool_calls", message["tool_calls"])
    more |= _earlier_thought(name, message)
    if isinstance(content, list):
        reads = _part if role != "assistant" else _text_part
        content = [reads(name, part) for part in content]
    elif not isinstance(content, str) and (content is not None or more.keys().isdisjoint(_WITHOUT_CONTENT)):
        raise ValueError(f"{name}.content is {quoted(content)}; it must be a string or a list of text parts")
    return {"role": role, "content": content, **more}


def _earlier_thought(name: str, message: Mapping[str, Any]) -> dict[str, str]:
    """The reasoning of an assistant's message."""
    field = "reasoning" if message.get("reasoning") is not None else "reasoning_content"
    thought = message.get(field)
    if thought is not None and not isinstance(thought, str):
        raise ValueError(f"{name}.{field} is {quoted(thought)}; it must be a string")
    return {} if thought is None else {"reasoning_content": thought}


def _earlier_calls(name: str, calls: object) -> list[dict[str, Any]]:
    """The calls of an assistant's message, whose arguments a template reads as a text or as an object."""
    if not isinstance(calls, list):
        raise ValueError(f"{name} is {quoted(calls)}; it must be a list of calls")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{name}[{index}] is {quoted(call)}; it must have a function with name and arguments")
        arguments = function.get("arguments")
        try:
            decoded(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        except JsonError as error:
            raise ValueError(f"{name}[{index}].function.arguments is no JSON: {error}") from error
    return calls


def _part(name: str, part: object) -> dict[str, Any]:
    """A part of a message with images, videos or sounds: a text, or the URL of one of these."""
    noun = _noun_of(part)
    if noun is None or not isinstance(part, dict):
        return _text_part(name, part)
    kind = part["type"]
    if kind == INPUT_AUDIO:
        try:
            return {"type": "audio_url", "audio_url": {"url": url_of_input_audio(part)}}
        except ValueError as error:
            raise ValueError(f"{name}.content: {error}") from error
    given, known = part.get(kind), {"url", "detail"} if noun == "image" else {"url"}
    url = given.get("url") if isinstance(given, dict) and set(given) <= known else None
    if not isinstance(url, str) or set(part) != {"type", kind}:
        example = f'{{"type": "{kind}", "{kind}": {{"url": "data:{_EXAMPLES[noun]};base64,..."}}}}'
        raise ValueError(f"{name}.content has a{'n' * (noun != 'video')} {noun} that is not like {example}")
    check_detail(given.get("detail"))  # type: ignore[union-attr]
    return {"type": kind, kind: {"url": url}}


def _noun_of(part: object) -> str | None:
    """ "image", "video" or "audio" of a part that is one; None of any other value."""
    kind = part.get("type") if isinstance(part, dict) else None
    return _SEEN.get(kind) if isinstance(kind, str) else None


def _text_part(name: str, part: object) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kind = part.get("type") if isinstance(part, dict) else part
    raise ValueError(
        f"{name}.content has a part {quoted(kind)}; only text, image_url, video_url, audio_url and input_audio parts "
        "are supported"
    )
