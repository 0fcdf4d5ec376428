"""Log-probabilities in OpenAI's forms and vLLM's: four lists of a completion, a list of tokens of a chat, by token id.

JSON has no minus infinity; NO_PROBABILITY stands for it, as at OpenAI.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ferrum_jax.core.outputs import Logprob, RequestOutput
from ferrum_jax.openai.asked import AnswerOptions

NO_PROBABILITY = -9999.0
Entry = Mapping[int, Logprob]  # of one place in a text: the token that stands there, and alternatives


class Tokens(Protocol):
    """Tokens with their log-probabilities: a choice, or what is new of it."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[Entry] | None: ...

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def stop_reason(self) -> int | str | None: ...


def completion_logprobs(
    entries: Iterable[tuple[int, Entry]],
    *,
    first: tuple[int, str] | None = None,
    offset: int = 0,
    ids_as_names: bool = False,
) -> dict[str, list[Any]]:
    """Four lists with an entry a token. text_offset counts the characters of tokens before, `offset` of them earlier.

    first: an echo's first token, which has no log-probability, and its text. ids_as_names: tokens go by their ids.
    """
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(name: str, logprob: float | None, tops: dict[str, float] | None, length: int) -> None:
        nonlocal offset
        for values, value in zip(found.values(), (name, logprob, tops, offset), strict=True):
            values.append(value)
        offset += length

    if first is not None:
        add((not ids_as_names and first[1]) or f"token_id:{first[0]}", None, None, len(first[1]))
    for token_id, entry in entries:
        name, logprob = _name(token_id, entry[token_id], ids_as_names), number(entry[token_id].logprob)
        add(name, logprob, _top_by_name(token_id, entry, ids_as_names), len(entry[token_id].decoded_token or ""))
    return found


def choice_entries(choice: Tokens) -> list[tuple[int, Entry]]:
    """The tokens of a choice, each with its log-probabilities. A last one that ended the text unseen is called ""."""
    found = list(zip(choice.token_ids, choice.logprobs or (), strict=True))
    if not found or choice.finish_reason != "stop" or isinstance(choice.stop_reason, str):
        return found
    *others, last = [entry[token_id].decoded_token or "" for token_id, entry in found]
    said, text = "".join(others), choice.text
    if "\ufffd" not in last and text.endswith(said) and not text.endswith(said + last):
        token_id, entry = found[-1]
        found[-1] = token_id, {**entry, token_id: dataclasses.replace(entry[token_id], decoded_token="")}
    return found


def echo_entries(output: RequestOutput) -> tuple[tuple[int, str], list[tuple[int, Entry]]]:
    """The prompt's first token with its text, and the others with their log-probabilities, as an echo has them."""
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    entries: list[tuple[int, Entry]] = [(token_id, entry) for token_id, entry in pairs if entry is not None]
    return (output.prompt_token_ids[0], _first_text(output.prompt or "", entries)), entries


def _first_text(prompt: str, entries: Sequence[tuple[int, Entry]]) -> str:
    """The text of a prompt's first token: what the texts of the others leave of the prompt.

    "" where it has none, as BOS, or where they do not make up the rest.
    """
    rest = "".join([entry[token_id].decoded_token or "" for token_id, entry in entries])
    return prompt.removesuffix(rest) if prompt.endswith(rest) else ""


def _top_by_name(chosen: int, entry: Entry, ids_as_names: bool) -> dict[str, float]:
    """Log-probabilities by token text, best first. Where tokens share a text the others go by their id."""
    taken = {_name(chosen, entry[chosen], ids_as_names)}
    found: dict[str, float] = {}
    for token_id, logprob in _ranked(entry):
        name = _name(token_id, logprob, ids_as_names)
        if token_id != chosen and name in taken:
            name = f"token_id:{token_id}"
        taken.add(name)
        found[name] = number(logprob.logprob)
    return found


def chat_logprobs(choice: Tokens, options: AnswerOptions) -> list[dict[str, Any]]:
    """An object for each token of a choice, with as many of the likeliest tokens there as were asked for."""
    found, as_id = [], options.ids_as_names
    for token_id, entry in zip(choice.token_ids, choice.logprobs or (), strict=True):
        alternatives = [_chat_token(other, logprob, as_id) for other, logprob in _ranked(entry)[: options.num_tops]]
        found.append(_chat_token(token_id, entry[token_id], as_id) | {"top_logprobs": alternatives})
    return found


def _chat_token(token_id: int, logprob: Logprob, as_id: bool) -> dict[str, Any]:
    """`bytes` is null where the token's text alone does not tell its bytes (part of a character, no tokenizer)."""
    text = logprob.decoded_token
    token_bytes = None if text is None or "\ufffd" in text else list(text.encode())
    return {"token": _name(token_id, logprob, as_id), "logprob": number(logprob.logprob), "bytes": token_bytes}


def by_token_id(entry: Entry) -> dict[str, dict[str, Any]]:
    """vLLM's form of a prompt's log-probabilities."""
    return {
        str(token_id): {
            "logprob": number(logprob.logprob),
            "rank": logprob.rank,
            "decoded_token": logprob.decoded_token,
        }
        for token_id, logprob in _ranked(entry)
    }


def _ranked(entry: Entry) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda item: (-item[1].logprob, item[0]))


def _name(token_id: int, logprob: Logprob, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id or logprob.decoded_token is None else logprob.decoded_token


def number(value: float) -> float:
    """The float rule: nine significant digits, which tell any two float32 apart."""
    return float(f"{value:.9g}") if math.isfinite(value) else NO_PROBABILITY
