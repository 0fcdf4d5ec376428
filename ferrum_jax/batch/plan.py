"""The dry run: what a job would do, counted from its input, without weights and without writing anything."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from ferrum_jax.batch.journal import Journal
from ferrum_jax.batch.reach import measured
from ferrum_jax.batch.rows import Rows
from ferrum_jax.batch.store import Store
from ferrum_jax.prompt import Content, take_apart

_MOST_NAMED = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Rows and tokens of a job. Saved tokens are those of full blocks that a row shares with the row before it.

    num_groups: runs of neighbours of which each shares a block with the one before it; num_grouped: rows in them.
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


def make_plan(
    rows: Rows, store: Store, token_ids: Callable[[Content], Sequence[int]], *, block_size: int, max_model_len: int
) -> Plan:
    """The plan of what is left. store: of the journal. token_ids: of a prompt, as the engine would have them."""
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
        num_parts=len(rows.shards()),
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
    token_ids: Callable[[Content], Sequence[int]],
    max_model_len: int,
    counts: dict[str, int],
) -> Iterator[tuple[np.ndarray, bool, int]]:
    """Token ids of each row to run, whether its salt is not that of the row before, and the most it generates."""
    salt = ""
    for found in measured(rows, journal.unfinished(rows.order).tolist(), token_ids, max_model_len):
        if found is None:
            counts["refused"] += 1
            continue
        row, ids, outputs = found
        before, salt = salt, take_apart(row.prompt).cache_salt
        yield ids, salt != before, outputs * row.asked.n


def _num_shared(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def measured_rate(store: Store, name: str) -> float | None:
    """Tokens a second, computed and generated, of the runs that the output's report knows; None if there are none."""
    content = store.read(f"{name}.report.json")
    if content is None:
        return None
    found: Mapping[str, Any] = json.loads(content)
    tokens = found["prompt_tokens"] - found["cached_tokens"] + found["output_tokens"]
    return tokens / found["wall_s"] if tokens and found["wall_s"] else None


def least_time_s(
    plan: Plan, *, weights_bytes: int, num_weights: int, num_rows: int, flops_per_s: float, bandwidth_bytes_per_s: float
) -> float:
    """What the device itself needs: two operations for each weight and prompt token, and all weights once a step.

    num_rows: that generate at once. Attention and the KV cache are left out, so it is a bound from below.
    """
    prefill_s = 2 * num_weights * (plan.prompt_tokens - plan.saved_tokens) / flops_per_s
    return prefill_s + plan.most_output_tokens / num_rows * weights_bytes / bandwidth_bytes_per_s


def expected_time(plan: Plan, rate: float | None, least_s: float) -> str:
    """In words. rate: tokens a second of earlier runs of this job, None if there are none."""
    if rate is None:
        return f"more than {least_s:,.1f} s, by the device's own limits; a run will measure it"
    return f"at most {plan.tokens / rate:,.1f} s, at the pace of earlier runs"


def plan_table(plan: Plan, engine: Mapping[str, str], expected: str, title: str) -> Table:
    """The plan as a person reads it. engine: what is known of the engine, by name."""
    table = Table(title=title, show_header=False)
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
        table.add_row(name, value)
    return table
