"""Structures that were cut off, where a job requires valid ones."""

from collections.abc import Sequence

from ferrum_jax.batch.input.formats import BadRow, Row
from ferrum_jax.batch.row_answers import Answer
from ferrum_jax.core.outputs import RequestOutput


def cut_off(row: Row, answers: Sequence[Answer]) -> BadRow | None:
    """The error of a row in which a choice ended before its structure did, or None."""
    if row.asked.structured_outputs is None:
        return None
    choices = [choice for answer in answers if isinstance(answer, RequestOutput) for choice in answer.outputs]
    for number, choice in enumerate(choices):
        if choice.finish_reason == "stop" and choice.stop_reason is None:
            continue
        what = "max_tokens" if choice.finish_reason == "length" else f"the stop {choice.stop_reason!r}"
        why = f"{what} cut choice {number} off after {len(choice.token_ids)} tokens, before its structure was whole"
        return BadRow(id=row.id, custom_id=row.custom_id, code="structure_cut_off", message=why)
    return None
