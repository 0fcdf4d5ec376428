"""What a job can reach, counted from its file before the model loads: rows at once, tokens of a step, the longest row.

All rows count, those that are done too, so that a job has the same executables at each of its starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ferrum_jax.batch.formats import BadRow, Row
from ferrum_jax.batch.rows import Rows
from ferrum_jax.config import Reach
from ferrum_jax.prompt import Content, take_apart
from ferrum_jax.trace import TracedChoice, TracedRequest

MOST_MEASURED = 20_000  # rows; a job of more reaches the limits of any engine, and its prompts take minutes to read
MOST_REPLAYED = 512
_LONG_OUTPUT = 256  # tokens that a row without max_tokens is taken to generate

TokenIds = Callable[[Content], Sequence[int]]


def measured(
    rows: Rows, indices: Iterable[int], token_ids: TokenIds, max_model_len: int
) -> Iterator[tuple[Row, np.ndarray, int] | None]:
    """Of each row its prompt's token ids [tokens] int64 and the most that a choice generates; None if it is refused.

    token_ids: of a prompt, as the engine would have them.
    """
    for index in indices:
        row = rows.read(index)
        assert not isinstance(row, BadRow), f"row {index} is bad and was to be run"
        try:
            ids = np.asarray(token_ids(take_apart(row.prompt).content), np.int64)
        except ValueError:  # a template error: the row fails alone
            yield None
            continue
        ids = ids[-(row.asked.truncate_prompt_tokens or 0) :]
        outputs = max_model_len - len(ids) if row.asked.max_tokens is None else row.asked.max_tokens
        yield None if outputs < 1 or len(ids) + outputs > max_model_len else (row, ids, outputs)


def reach_of(rows: Rows, token_ids: TokenIds, max_model_len: int) -> Reach | None:
    """The reach of a job; None of one with more than MOST_MEASURED rows."""
    if len(rows.order) > MOST_MEASURED:
        return None
    found = [each for each in measured(rows, rows.order.tolist(), token_ids, max_model_len) if each is not None]
    totals = [len(ids) + outputs for _, ids, outputs in found]
    choices = [row.asked.n for row, _, _ in found]
    return Reach(
        num_rows=max(sum(choices), 1),
        num_tokens=max(sum(n * total for n, total in zip(choices, totals, strict=True)), 1),
        request_tokens=max(totals, default=1),
    )


def as_traced(rows: Rows, token_ids: TokenIds, max_model_len: int) -> list[TracedRequest]:
    """The first MOST_REPLAYED rows as if each had run and generated all it may."""
    requests = []
    for found in measured(rows, rows.order[:MOST_REPLAYED].tolist(), token_ids, max_model_len):
        if found is None:
            continue
        row, ids, outputs = found
        if row.asked.max_tokens is None:
            outputs = min(outputs, _LONG_OUTPUT)
        choice = TracedChoice(token_ids=[0] * outputs, finish_reason="length")
        requests.append(
            TracedRequest(
                id=len(requests),
                arrival=0,
                prompt_token_ids=ids.tolist(),
                max_tokens=outputs,
                choices=[choice] * row.asked.n,
                cache_salt=take_apart(row.prompt).cache_salt,
            )
        )
    return requests
