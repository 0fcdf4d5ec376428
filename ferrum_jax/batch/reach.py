"""A job's largest sizes, counted from its file before the model loads: rows at once, tokens of a step, the longest row.

All rows count, those that are done too, so that a job has the same executables at each of its starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ferrum_jax.batch.input.formats import BadRow, Row
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.core.scheduler.request_log import LoggedChoice, LoggedRequest
from ferrum_jax.inputs.prompt import PromptIds, take_apart
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.openai.asked import GENERATES, SCORES, TRANSCRIBES

if TYPE_CHECKING:
    from ferrum_jax.tasks.transcription.foreseen import Foresee, ForeseenSound

MAX_MEASURED = 20_000  # rows; a job of more reaches the limits of any engine, and its prompts take minutes to read
MAX_HEARD = 32  # sounds; a job of more reaches those limits too, and each header of an MP3 takes a process of its own
MAX_REPLAYED = 512
_LONG_OUTPUT = 256  # tokens that a row without max_tokens is taken to generate


class Measured(NamedTuple):
    """A prompt of a row. salt: and adapter. ids: int64 [tokens]. outputs: the most tokens that it generates.

    sound: of the first window of a sound, else None.
    """

    row: Row
    salt: str
    ids: np.ndarray
    outputs: int
    sound: ForeseenSound | None = None


def measured(
    rows: Rows, indices: Iterable[int], token_ids: PromptIds, max_model_len: int, foresee: Foresee
) -> Iterator[Measured | None]:
    """Each prompt of the rows, and each window of their sounds.

    None stands for a row that is refused, which one that has a prompt too long is.
    """
    for index in indices:
        row = rows.read(index)
        assert not isinstance(row, BadRow), f"row {index} is bad and was to be run"
        try:
            if row.kind == TRANSCRIBES:
                found = _windows(row, max_model_len, foresee)
            else:
                found = [_measured(row, prompt, token_ids, max_model_len) for prompt in row.prompts]
        except ValueError:  # a template error, too long, or a damaged sound: the row fails alone
            yield None
        else:
            yield from found


def _windows(row: Row, max_model_len: int, foresee: Foresee) -> Iterator[Measured]:
    """The windows of a sound. Raises ValueError for one that cannot be read."""
    sound = foresee(row.prompts[0], row.how.how)
    ids = np.asarray(sound.token_ids, np.int64)
    outputs = _most_outputs(row, len(ids), max_model_len)
    # no window shares its tokens with another: they stand for other sounds
    return (
        Measured(row, f"{row.id}\0{place}", ids, outputs, None if place else sound)
        for place in range(sound.num_windows)
    )


def _measured(row: Row, prompt: Any, token_ids: PromptIds, max_model_len: int) -> Measured:
    """Raises ValueError for a prompt that cannot run."""
    if row.kind == SCORES:
        prompt = f"{prompt['query']}\n{prompt['document']}"  # about as long as what the model is given
    kept = row.asked.most_prompt_tokens(max_model_len)
    found = token_ids(prompt, kept=kept) if row.kind == GENERATES else token_ids(prompt, embeds=True)
    ids = np.asarray(found, np.int64)[-(kept or 0) :]
    outputs = _most_outputs(row, len(ids), max_model_len)
    parts = take_apart(prompt)
    salt = f"{parts.adapter}\0{parts.cache_salt}" if parts.adapter else parts.cache_salt
    return Measured(row, salt, ids, outputs)


def _most_outputs(row: Row, num_tokens: int, max_model_len: int) -> int:
    """Tokens behind a prompt of so many. Raises ValueError where there is no room for them."""
    outputs = max_model_len - num_tokens if row.asked.max_tokens is None else row.asked.max_tokens
    is_read = row.kind not in (GENERATES, TRANSCRIBES)  # no token is computed after such a text
    room = max_model_len + is_read
    if outputs < 1 or num_tokens + outputs > room:
        raise ValueError(f"{num_tokens} tokens and {outputs} more are beyond {max_model_len}")
    return outputs


def reach_of(rows: Rows, token_ids: PromptIds, max_model_len: int, foresee: Foresee) -> Reach | None:
    """The reach of a job; None of one with more than MAX_MEASURED rows or MAX_HEARD sounds, with pairs, whose
    templates add to them, or with a sound whose header does not say its length."""
    num_sounds = int((rows.kinds == TRANSCRIBES).sum())
    if len(rows.order) > MAX_MEASURED or num_sounds > MAX_HEARD or (rows.kinds == SCORES).any():
        return None
    found = list(measured(rows, rows.order.tolist(), token_ids, max_model_len, foresee))
    if num_sounds and any(each is None or (each.sound and each.sound.seconds is None) for each in found):
        return None
    runs = [each for each in found if each is not None]
    totals = [min(len(each.ids) + each.outputs, max_model_len) for each in runs]
    choices = [each.row.asked.n for each in runs]
    return Reach(
        num_rows=max(sum(choices), 1),
        num_tokens=max(sum(n * total for n, total in zip(choices, totals, strict=True)), 1),
        request_tokens=max(totals, default=1),
    )


def as_logged(rows: Rows, token_ids: PromptIds, max_model_len: int, foresee: Foresee) -> list[LoggedRequest]:
    """The first MAX_REPLAYED rows as if each had run and generated all it may."""
    requests = []
    for found in measured(rows, rows.order[:MAX_REPLAYED].tolist(), token_ids, max_model_len, foresee):
        if found is None:
            continue
        row, salt, ids, outputs, _ = found
        if row.asked.max_tokens is None:
            outputs = min(outputs, _LONG_OUTPUT)
        choice = LoggedChoice(token_ids=[0] * outputs, finish_reason="length")
        requests.append(
            LoggedRequest(
                id=len(requests),
                arrival=0,
                prompt_token_ids=ids.tolist(),
                max_tokens=outputs,
                choices=[choice] * row.asked.n,
                cache_salt=salt,
            )
        )
    return requests
