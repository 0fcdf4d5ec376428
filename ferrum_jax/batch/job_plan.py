"""The dry run: what a job would do, counted from its input, without weights and without writing anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.job_identity import object_in
from ferrum_jax.batch.journal.journal import Journal
from ferrum_jax.batch.reach import measured
from ferrum_jax.files.store import Store
from ferrum_jax.prompt import PromptIds

_MOST_NAMED = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Rows and tokens of a job. Saved tokens are those of full blocks that a row shares with the row before it.

    num_groups: runs of neighbours that each share a block with the one before; num_grouped: rows in them.
    most_output_tokens: where every row generates all it may. bad: what is wrong with the first bad rows.
    """

    num_rows: int
    num_bad: int
    num_done: int
    num_refused: int  # too long for the model
    num_parts: int
    prompt_tokens: int
    saved_tokens: int
    longest_prompt: int
    most_output_tokens: int
    num_groups: int
    num_grouped: int
    bad: Sequence[str]

    @property
    def tokens(self) -> int:
        """What is computed at most."""
        return self.prompt_tokens - self.saved_tokens + self.most_output_tokens


def make_plan(rows: Rows, store: Store, token_ids: PromptIds, *, block_size: int, max_model_len: int) -> Plan:
    """The plan of what is left. store: of the journal."""
    journal = Journal(store, rows, "plan")
    journal.refresh()
    counts: dict[str, int] = dict.fromkeys(("refused", "prompt", "saved", "longest", "output", "groups", "grouped"), 0)
    previous: np.ndarray = np.zeros(0, np.int64)
    in_group = False
    for ids, salt_changed, outputs in _left(rows, journal, token_ids, max_model_len, counts):
        shared = 0 if salt_changed else _num_shared(previous, ids) // block_size * block_size
        shared = min(shared, (len(ids) - 1) // block_size * block_size)
        counts["prompt"] += len(ids)
        counts["saved"] += shared
        counts["longest"] = max(counts["longest"], len(ids))
        counts["output"] += outputs
        counts["groups"] += bool(shared) and not in_group
        counts["grouped"] += 0 if not shared else 1 if in_group else 2
        in_group, previous = bool(shared), ids
    return Plan(
        num_rows=len(rows),
        num_bad=rows.num_bad,
        num_done=journal.num_ok + journal.num_failed,
        num_refused=counts["refused"],
        num_parts=len(rows.parts()),
        prompt_tokens=counts["prompt"],
        saved_tokens=counts["saved"],
        longest_prompt=counts["longest"],
        most_output_tokens=counts["output"],
        num_groups=counts["groups"],
        num_grouped=counts["grouped"],
        bad=[bad.message for _, (_, bad) in zip(range(_MOST_NAMED), rows.bad_rows(), strict=False)],
    )


def _left(
    rows: Rows,
    journal: Journal,
    token_ids: PromptIds,
    max_model_len: int,
    counts: dict[str, int],
) -> Iterator[tuple[np.ndarray, bool, int]]:
    """Token ids of each row to run, whether its salt is not that of the row before, and the most it generates."""
    before = ""
    for found in measured(rows, journal.unfinished(rows.order).tolist(), token_ids, max_model_len):
        if found is None:
            counts["refused"] += 1
            continue
        row, salt, ids, outputs = found
        yield ids, salt != before, outputs * row.asked.n
        before = salt


def _num_shared(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def measured_rate(store: Store, name: str) -> float | None:
    """Tokens a second, computed and generated, of the runs that the output's report knows; None if there are none."""
    found = object_in(store.read(f"{name}.report.json"))
    if found is None or "wall_s" not in found:
        return None
    tokens = found["prompt_tokens"] - found["cached_tokens"] + found["output_tokens"]
    return tokens / found["wall_s"] if tokens and found["wall_s"] else None


def expected_time(plan: Plan, rate: float | None, least_s: float) -> str:
    """In words. rate: tokens a second of earlier runs of this job, None if there are none."""
    if rate is None:
        return f"more than {least_s:,.1f} s, by the device's own limits; a run will measure it"
    return f"at most {plan.tokens / rate:,.1f} s, at the pace of earlier runs"


def plan_table(plan: Plan, engine: Mapping[str, str], expected: str, title: str) -> Table:
    """The plan as a person reads it. engine: what is known of the engine, by name."""
    table = Table(title=Text(title), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    share = plan.saved_tokens / max(plan.prompt_tokens, 1)
    for name, value in (
        ("rows", f"{plan.num_rows:,}"),
        ("bad rows", f"{plan.num_bad:,}"),
        ("rows too long, or refused by the chat template", f"{plan.num_refused:,}"),
        ("rows done", f"{plan.num_done:,}"),
        ("parts that workers take", f"{plan.num_parts:,}"),
        ("tokens in", f"{plan.prompt_tokens:,}"),
        ("of them shared with the row before", f"{plan.saved_tokens:,} ({share:.1%})"),
        ("groups that share a prefix", f"{plan.num_groups:,} of {plan.num_grouped:,} rows"),
        ("longest prompt", f"{plan.longest_prompt:,} tokens"),
        ("tokens out, at most", f"{plan.most_output_tokens:,}"),
        *engine.items(),
        ("expected time", expected),
        *(("bad row", message) for message in plan.bad),
    ):
        table.add_row(name, Text(value))
    return table
