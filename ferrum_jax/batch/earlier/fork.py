"""Jobs that go on from jobs: each row is an earlier conversation, its answer and a further turn of the user.

A row keeps its custom_id and what its prompt is made with; how it is sampled is for the new job to say. Rows with
nothing to go on from become bad rows, which say why.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ferrum_jax.batch.earlier.trusted import EarlierOutput, opened
from ferrum_jax.batch.input.lines import load_line, unreadable_line
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.job_record import JobRecord
from ferrum_jax.batch.verify.output_lines import Line, line_in
from ferrum_jax.batch.verify.verify_job import opened_rows, rows_in

_KEPT = ("tools", "chat_template_kwargs", "reasoning_effort", "add_special_tokens", "cache_salt", "adapter")


def forked_lines(path: str, source: str | None, turns: Sequence[str], adapter: str | None = None) -> Iterator[bytes]:
    """JSON lines, in the order of the earlier rows. path, source: the earlier output and input; None is as its report
    says. turns: one for each row, or one for all. adapter: that all rows ask for; None keeps their own.

    Raises ValueError where output, report and input do not belong together, and at the end where no row goes on.
    """
    with opened(path) as output, contextlib.ExitStack() as stack:
        for _ in output.lines():
            pass  # only what is whole is read as lines of these rows
        record = output.record
        source = source or str(record.input["path"])
        rows = rows_in(stack.enter_context(opened_rows(source)), record)
        if (len(rows), rows.layout) != (record.input["rows"], record.input["layout"]):
            raise ValueError(f"{source} is not the input that {path} answers; name that one with --input")
        if len(turns) not in (1, len(rows)):
            raise ValueError(f"{path} has {len(rows):,} rows, but there are {len(turns):,} turns; give one each or one")
        yield from _lines(output, rows, turns, adapter)


def _lines(output: EarlierOutput, rows: Rows, turns: Sequence[str], adapter: str | None) -> Iterator[bytes]:
    num_forked, why = 0, "it has no rows"
    for index, (_, raw) in enumerate(output.lines()):
        line, turn = line_in(raw), turns[index % len(turns)]
        assert line.id == rows.digest(index), "the output has the rows of the input in their order"
        try:
            row = _forked(line, load_line(rows.line(index)), turn, output.record)
        except ValueError as error:
            why = str(error)
            yield unreadable_line(line.custom_id, f"nothing goes on from {output.path}, because {why}")
            continue
        num_forked += 1
        yield json.dumps({**row, "adapter": adapter} if adapter is not None else row).encode() + b"\n"
    if not num_forked:
        raise ValueError(f"no row goes on from {output.path}: {why}")


def _forked(line: Line, asked: Mapping[str, Any], turn: str, record: JobRecord) -> dict[str, Any]:
    """Raises ValueError for a row with nothing to go on from."""
    if line.error is not None:
        raise ValueError("the earlier row failed")
    body, choices = asked.get("body", asked), line.response["body"].get("choices", ())
    if body.get("messages") is None:
        raise ValueError("the earlier row is no chat, and has no turns")
    if len(choices) != 1:
        raise ValueError(f"the earlier row has {len(choices)} answers, and a conversation goes on from one")
    messages, said = body["messages"], choices[0]["message"]
    if messages[-1]["role"] == "assistant":
        raise ValueError("the earlier answer went on in a message that was begun")
    if not isinstance(said["content"], str) or "tool_calls" in said:
        raise ValueError("the earlier answer calls tools, or has no text")
    ends = [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": turn}]
    named = {"adapter": body["model"]} if body.get("model") in record.adapters else {}
    kept = {name: body[name] for name in _KEPT if body.get(name) is not None}
    return {"custom_id": line.custom_id, "messages": [*messages, *ends], **named, **kept}
