"""Where two answers part: at which token, and by how much the model prefers its own there.

The row is answered once more with the likeliest tokens of every place. The margin is the model's score of its own
token less that of the token written, where the score is what a draw compares: the log-probability, or over the
temperature with the noise of the row's seed added. A margin near 0 is a tie that rounding may decide; a large one is
not rounding.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np

from ferrum_jax.batch.batch_llm import BatchLLM, RowRequest, run_rows
from ferrum_jax.batch.input.formats import GENERATES, Row
from ferrum_jax.batch.verify.line_difference import texts_of_choices
from ferrum_jax.batch.verify.output_lines import Line
from ferrum_jax.core.outputs import CompletionOutput, Logprob, RequestOutput
from ferrum_jax.sampling_params import MAX_LOGPROBS, SamplingParams

_MOST_BYTES = 4  # of a character, whose tokens have no text of their own
_EDITS = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parting:
    """The first token that is another. token: its place in the choice, from 0; choice: its place in the line.

    written, here: the tokens' texts, None where a text ends or the token is not known. margin: None where it is not
    known; is_least: the token written is not among the likeliest, so that the margin is at least that.
    """

    choice: int
    token: int
    written: str | None
    here: str | None
    margin: float | None = None
    is_least: bool = False

    def is_tie(self, margin: float) -> bool:
        return self.margin is not None and not self.is_least and abs(self.margin) <= margin


def parting_of(llm: BatchLLM, row: Row, written: Line, here: Line, now: datetime.datetime) -> Parting | None:
    """Where the first choice that differs parts; None where none does, or the row generates nothing."""
    if row.kind != GENERATES:
        return None
    ours, theirs = texts_of_choices(here), texts_of_choices(written)
    differing = [i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if _said(one) != _said(other)]
    if not differing:
        return None
    number = differing[0]
    place, index = divmod(number, row.asked.n)
    params = dataclasses.replace(row.params_of(place), logprobs=MAX_LOGPROBS)
    answers = run_rows(llm, [RowRequest(0, row.kind, row.prompts[place], params)], now=now)
    output = next((answer for _, answer in answers), None)
    if not isinstance(output, RequestOutput):
        return None
    return _parting(output, output.outputs[index], params, ours[number], theirs[number], number)


def _said(choice: Any) -> tuple[Any, str | None]:
    return choice.get("token_ids"), _text(choice)


def _text(choice: Any) -> str | None:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return text if isinstance(text, str) else None


def _parting(
    output: RequestOutput, choice: CompletionOutput, params: SamplingParams, here: Any, written: Any, number: int
) -> Parting | None:
    """number: of the choice in the line."""
    entries = list(zip(choice.token_ids, choice.logprobs or (), strict=False))
    texts = [entry[token].decoded_token or "" for token, entry in entries]
    ids = written.get("token_ids")
    if isinstance(ids, list):
        place = _first_difference(ids, choice.token_ids)
        other = ids[place] if place < len(ids) else None
        rest = None
    else:
        one, theirs = _text(here), _text(written)
        if one is None or theirs is None:
            return None
        start = max(one.find("".join(texts)[:8]), 0) if params.echo else 0
        shared = _first_difference(one, theirs) - start
        ends = _ends(one[start:], texts)
        place = next((i for i, end in enumerate(ends) if end > shared), len(texts))
        rest, other = theirs[start + (ends[place - 1] if place else 0) :], None
    if place >= len(entries):
        return Parting(choice=number, token=place, written=_shown(rest), here=None)
    own, entry = entries[place]
    if rest is not None:
        other = _likeliest(rest, own, entry)
    margin, is_least = _margin(output, choice, params, place, own, other, entry)
    found = entry[other].decoded_token if isinstance(other, int) and other in entry else _shown(rest)
    return Parting(choice=number, token=place, written=found, here=texts[place], margin=margin, is_least=is_least)


def _ends(text: str, pieces: Sequence[str]) -> list[int]:
    """Where each token's text ends in the text: where the one before ends, of a token that the text does not show."""
    ends, end = [], 0
    for piece in pieces:
        found = text.find(piece, end, end + len(piece) + _MOST_BYTES)
        end = end if found < 0 else found + len(piece)
        ends.append(end)
    return ends


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    shared = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(shared, min(len(one), len(other)))


def _shown(text: str | None) -> str | None:
    """The beginning of what stands where no token is known."""
    return text[:12] or None if text is not None else None


def _likeliest(rest: str, own: int, entry: dict[int, Logprob]) -> int | None:
    """The longest of the likeliest tokens with which the text goes on."""
    fits = [
        t for t, found in entry.items() if t != own and found.decoded_token and rest.startswith(found.decoded_token)
    ]
    return max(fits, key=lambda token: len(entry[token].decoded_token or ""), default=None)


def _margin(
    output: RequestOutput,
    choice: CompletionOutput,
    params: SamplingParams,
    place: int,
    own: int,
    other: int | None,
    entry: dict[int, Logprob],
) -> tuple[float | None, bool]:
    """The margin, and whether it is at least that."""
    if any(getattr(params, name) != getattr(_DEFAULT, name) for name in _EDITS):
        return None, False  # the draw compared other logits than the model's own
    if params.temperature == 0:
        if other in entry:
            return entry[own].logprob - entry[other].logprob, False
        return entry[own].logprob - min(found.logprob for found in entry.values()), True
    if other not in entry:
        return None, False
    noise = _noise(params.seed or 0, choice.index, len(output.prompt_token_ids) + place, (own, other))
    scores = [
        entry[token].logprob / params.temperature + added for token, added in zip((own, other), noise, strict=True)
    ]
    margin = scores[0] - scores[1]
    return (margin, False) if margin >= 0 else (None, False)  # top-k, top-p or min-p left the other out


_DEFAULT = SamplingParams()


def _noise(seed: int, choice: int, position: int, tokens: tuple[int, int]) -> list[float]:
    """What a draw adds to these tokens' scores."""
    from ferrum_jax.runtime.sampling.noise import gumbel
    from ferrum_jax.runtime.sampling.record_words import CHOICE, NUM_PARAMETERS, SEED_HIGH, SEED_LOW

    words = np.zeros((1, NUM_PARAMETERS), np.int32)
    bits = seed & (2**64 - 1)
    words[0, CHOICE] = choice
    words[0, SEED_HIGH : SEED_LOW + 1] = np.array([bits >> 32, bits & (2**32 - 1)], np.uint32).view(np.int32)
    size = 1 << max(tokens).bit_length()  # few shapes are compiled
    found = np.asarray(gumbel(words, np.array([position], np.int32), size))  # type: ignore[arg-type]
    return [float(found[0, token]) for token in tokens]
