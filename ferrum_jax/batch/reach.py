"""What a job can reach, counted from its file before the model loads: rows at once, tokens of a step, the longest row.

All rows count, those that are done too, so that a job has the same executables at each of its starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ferrum_jax.batch.input.formats import GENERATES, SCORES, TRANSCRIBES, BadRow, Row
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.prompt import PromptIds, take_apart
from ferrum_jax.scheduling.request_log import LoggedChoice, LoggedRequest
from ferrum_jax.sizes.engine_sizes import Reach

MOST_MEASURED = 20_000  # rows; a job of more reaches the limits of any engine, and its prompts take minutes to read
MOST_REPLAYED = 512
_WINDOW_PROMPT = 4  # tokens before what is written down of a window
_LONG_OUTPUT = 256  # tokens that a row without max_tokens is taken to generate


def measured(
    rows: Rows, indices: Iterable[int], token_ids: PromptIds, max_model_len: int
) -> Iterator[tuple[Row, str, np.ndarray, int] | None]:
    """The row, salt and adapter, token ids [tokens] int64 and most generated tokens of each prompt.

    None stands for a row that is refused, which one that has a prompt too long is.
    """
    for index in indices:
        row = rows.read(index)
        assert not isinstance(row, BadRow), f"row {index} is bad and was to be run"
        try:
            found = [_measured(row, prompt, token_ids, max_model_len) for prompt in row.prompts]
        except ValueError:  # a template error, or too long: the row fails alone
            yield None
        else:
            yield from found


def _measured(row: Row, prompt: Any, token_ids: PromptIds, max_model_len: int) -> tuple[Row, str, np.ndarray, int]:
    """Raises ValueError for a prompt that cannot run."""
    if row.kind == SCORES:
        prompt = f"{prompt['query']}\n{prompt['document']}"  # about as long as what the model is given
    if row.kind == TRANSCRIBES:  # its windows are known when it is read: one is counted
        ids = np.zeros(_WINDOW_PROMPT, np.int64)
        return row, "", ids, row.asked.max_tokens or max_model_len - len(ids)
    kept = row.asked.most_prompt_tokens(max_model_len)
    found = token_ids(prompt, kept=kept) if row.kind == GENERATES else token_ids(prompt, embeds=True)
    ids = np.asarray(found, np.int64)[-(kept or 0) :]
    outputs = max_model_len - len(ids) if row.asked.max_tokens is None else row.asked.max_tokens
    if outputs < 1 or len(ids) + outputs > max_model_len:
        raise ValueError(f"{len(ids)} tokens and {outputs} more are beyond {max_model_len}")
    parts = take_apart(prompt)
    return row, f"{parts.adapter}\0{parts.cache_salt}" if parts.adapter else parts.cache_salt, ids, outputs


def reach_of(rows: Rows, token_ids: PromptIds, max_model_len: int) -> Reach | None:
    """The reach of a job; None of one with more than MOST_MEASURED rows, with pairs, whose templates add to them, or
    with sounds, whose windows are not known."""
    if len(rows.order) > MOST_MEASURED or (rows.kinds == SCORES).any() or (rows.kinds == TRANSCRIBES).any():
        return None
    found = [each for each in measured(rows, rows.order.tolist(), token_ids, max_model_len) if each is not None]
    totals = [len(ids) + outputs for _, _, ids, outputs in found]
    choices = [row.asked.n for row, *_ in found]
    return Reach(
        num_rows=max(sum(choices), 1),
        num_tokens=max(sum(n * total for n, total in zip(choices, totals, strict=True)), 1),
        request_tokens=max(totals, default=1),
    )


def as_logged(rows: Rows, token_ids: PromptIds, max_model_len: int) -> list[LoggedRequest]:
    """The first MOST_REPLAYED rows as if each had run and generated all it may."""
    requests = []
    for found in measured(rows, rows.order[:MOST_REPLAYED].tolist(), token_ids, max_model_len):
        if found is None:
            continue
        row, salt, ids, outputs = found
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
