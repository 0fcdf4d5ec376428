"""Where two answers part: at which token, and by how much the model prefers its own there.

The row is answered once more with the likeliest tokens of every place. The margin is the model's score of its own
token less that of the token written, where the score is what a draw compares: the log-probability, or over the
temperature with the noise of the row's seed added. A margin near 0 is a tie that rounding may decide; a large one is
not rounding.
"""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ferrum_jax.batch.batch_llm import BatchLLM, RowRequest, run_rows
from ferrum_jax.batch.input.formats import Row
from ferrum_jax.batch.verify.output_lines import Line
from ferrum_jax.core.outputs import CompletionOutput, Logprob, RequestOutput
from ferrum_jax.openai.asked import GENERATES
from ferrum_jax.sampling_params import MAX_LOGPROBS, SamplingParams

_MAX_BYTES = 4  # of a character, whose tokens have no text of their own
_DEFAULT = SamplingParams()
_EDITS = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parting:
    """The first token that differs. choice: its place in the line, from 0. token: its place in the choice, from 0.

    written, here: the tokens' texts, None where a text ends or the token is not known. margin: None where it is not
    known. is_at_least: the token written is not among the likeliest, so the margin may be larger.
    """

    choice: int
    token: int
    written: str | None
    here: str | None
    margin: float | None = None
    is_at_least: bool = False

    def is_tie(self, margin: float) -> bool:
        return self.margin is not None and not self.is_at_least and abs(self.margin) <= margin


def parting_of(llm: BatchLLM, row: Row, written: Line, here: Line, now: datetime.datetime) -> Parting | None:
    """Where the first choice that differs parts; None where none does, or the row generates nothing."""
    ours, theirs = _choices(here), _choices(written)
    both = enumerate(zip(ours, theirs, strict=False))
    number = next((i for i, (a, b) in both if (a.get("token_ids"), _text(a)) != (b.get("token_ids"), _text(b))), None)
    if row.kind != GENERATES or number is None:
        return None
    place, index = divmod(number, row.asked.n)
    params = dataclasses.replace(row.params_of(place), logprobs=MAX_LOGPROBS)
    answers = run_rows(llm, [RowRequest(0, row.kind, row.prompts[place], params)], now=now)
    output = next((answer for _, answer in answers), None)
    if not isinstance(output, RequestOutput):
        return None
    return _parting(output, output.outputs[index], params, ours[number], theirs[number], number)


def _choices(line: Line) -> list[Mapping[str, Any]]:
    """The choices of an answered line, which may have none."""
    body = (line.response or {}).get("body")
    choices = body.get("choices") if isinstance(body, dict) else None
    return [choice if isinstance(choice, dict) else {} for choice in choices] if isinstance(choices, list) else []


def _text(choice: Mapping[str, Any]) -> str | None:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return text if isinstance(text, str) else None


def _parting(
    output: RequestOutput, choice: CompletionOutput, params: SamplingParams, here: Any, written: Any, number: int
) -> Parting | None:
    """number: of the choice in the line."""
    entries = list(zip(choice.token_ids, choice.logprobs or (), strict=False))
    texts = [entry[token].decoded_token or "" for token, entry in entries]
    ids, one, theirs = written.get("token_ids"), _text(here), _text(written)
    other, rest = None, None  # the token written, or the text from there on
    if isinstance(ids, list):
        place = _first_difference(ids, choice.token_ids)
        other = ids[place] if place < len(ids) else None
    elif one is not None and theirs is not None:
        start = max(one.find("".join(texts)[:8]), 0) if params.echo else 0
        shared = _first_difference(one, theirs) - start
        ends = _ends(one[start:], texts)
        place = next((i for i, end in enumerate(ends) if end > shared), len(texts))
        rest = theirs[start + (ends[place - 1] if place else 0) :]
    else:
        return None
    if place >= len(entries):
        return Parting(choice=number, token=place, written=_shown(rest), here=None)
    own, entry = entries[place]
    if rest is not None:
        fits = {t: each.decoded_token for t, each in entry.items() if t != own and each.decoded_token}
        fits = {t: text for t, text in fits.items() if rest.startswith(text)}
        other = max(fits, key=lambda token: len(fits[token]), default=None)  # the longest with which the text goes on
    margin, is_at_least = _margin(params, entry, own, other, (choice.index, len(output.prompt_token_ids) + place))
    shown = entry[other].decoded_token if isinstance(other, int) and other in entry else _shown(rest)
    return Parting(choice=number, token=place, written=shown, here=texts[place], margin=margin, is_at_least=is_at_least)


def _ends(text: str, pieces: Sequence[str]) -> list[int]:
    """Where each token's text ends in the text: where the one before ends, of a token that the text does not show."""
    ends, end = [], 0
    for piece in pieces:
        found = text.find(piece, end, end + len(piece) + _MAX_BYTES)
        end = end if found < 0 else found + len(piece)
        ends.append(end)
    return ends


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    shared = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(shared, min(len(one), len(other)))


def _shown(text: str | None) -> str | None:
    """The beginning of what stands where no token is known."""
    return text[:12] or None if text is not None else None


def _margin(
    params: SamplingParams, entry: dict[int, Logprob], own: int, other: int | None, place: tuple[int, int]
) -> tuple[float | None, bool]:
    """The margin, and whether it is at least that. place: of the draw, a choice and a position."""
    if any(getattr(params, name) != getattr(_DEFAULT, name) for name in _EDITS):
        return None, False  # the draw compared other logits than the model's own
    if params.temperature == 0:
        lowest = min(entry.values(), key=lambda each: each.logprob) if other not in entry else entry[other]
        return entry[own].logprob - lowest.logprob, other not in entry
    if other not in entry:
        return None, False
    noise = _noise(params.seed or 0, *place, (own, other))
    margin = (entry[own].logprob - entry[other].logprob) / params.temperature + noise[0] - noise[1]
    return (margin, False) if margin >= 0 else (None, False)  # top-k, top-p or min-p left the other out


def _noise(seed: int, choice: int, position: int, tokens: tuple[int, int]) -> list[float]:
    """The noise that a draw adds to these tokens' scores."""
    from ferrum_jax.runtime.sampling.noise import gumbel
    from ferrum_jax.runtime.sampling.record_words import CHOICE, NUM_PARAMETERS, SEED_HIGH, SEED_LOW

    words = np.zeros((1, NUM_PARAMETERS), np.int32)
    bits = seed & (2**64 - 1)
    words[0, CHOICE] = choice
    words[0, SEED_HIGH : SEED_LOW + 1] = np.array([bits >> 32, bits & (2**32 - 1)], np.uint32).view(np.int32)
    size = 1 << max(tokens).bit_length()  # few shapes are compiled
    found = np.asarray(gumbel(words, np.array([position], np.int32), size))  # type: ignore[arg-type]
    return [float(found[0, token]) for token in tokens]
