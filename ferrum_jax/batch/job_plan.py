"""The dry run: what a job would do, counted from its input, without weights and without writing anything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from ferrum_jax.batch.deadline.end_terms import EndTerms
from ferrum_jax.batch.deadline.forecaster import Forecaster, Outlook, WorkerReport
from ferrum_jax.batch.deadline.phrases import seconds_phrase, terms_phrase, verdict_phrase
from ferrum_jax.batch.engine_rows import num_written
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.journal import Journal
from ferrum_jax.batch.reach import Measured, measured
from ferrum_jax.batch.worker_reports import earlier_reports
from ferrum_jax.inputs.prompt import PromptIds
from ferrum_jax.io.files.store import Store

if TYPE_CHECKING:
    from ferrum_jax.tasks.transcription.foreseen import Foresee

_MAX_NAMED = 5
_COUNTED = (  # fields of a plan that are counted prompt by prompt
    *("num_refused", "prompt_tokens", "saved_tokens", "longest_prompt", "most_output_tokens", "num_groups"),
    *("num_grouped", "num_sounds", "num_windows", "num_unsaid", "sound_s"),
)
_OTHER_JOB_SPREAD = 0.25  # of the throughput of another job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Rows and tokens of a job. Saved tokens are those of full blocks that a row shares with the row before it.

    num_groups: runs of neighbours that each share a block with the one before; num_grouped: rows in them.
    num_sounds: in num_windows that run as rows; the headers of num_unsaid do not say how long they are, so that one
    window of each is counted. sound_s: of the others.
    most_output_tokens: where every row generates all it may. bad: what is wrong with the first bad rows.
    """

    num_rows: int
    num_bad: int
    num_done: int
    num_refused: int  # too long for the model, or a damaged sound
    num_parts: int
    prompt_tokens: int
    saved_tokens: int
    longest_prompt: int
    most_output_tokens: int
    num_groups: int
    num_grouped: int
    num_sounds: int
    num_windows: int
    num_unsaid: int
    sound_s: float
    bad: Sequence[str]
    num_reused: int = 0  # rows that take an earlier answer, if this model gave it; no other count has them

    @property
    def tokens(self) -> int:
        """The most tokens that the job computes."""
        return self.prompt_tokens - self.saved_tokens + self.most_output_tokens


def make_plan(
    rows: Rows, store: Store, token_ids: PromptIds, foresee: Foresee, *, block_size: int, max_model_len: int
) -> Plan:
    """The plan of what is left. store: of the journal."""
    journal = Journal(store, rows, "plan")
    journal.refresh()
    counts: dict[str, Any] = dict.fromkeys(_COUNTED, 0)
    previous: np.ndarray = np.zeros(0, np.int64)
    in_group = False
    indices = journal.unfinished(rows.order).tolist()
    for ids, salt_changed, outputs in _left(measured(rows, indices, token_ids, max_model_len, foresee), counts):
        shared = 0 if salt_changed else _num_shared(previous, ids) // block_size * block_size
        shared = min(shared, (len(ids) - 1) // block_size * block_size)
        counts["prompt_tokens"] += len(ids)
        counts["saved_tokens"] += shared
        counts["longest_prompt"] = max(counts["longest_prompt"], len(ids))
        counts["most_output_tokens"] += outputs
        counts["num_groups"] += bool(shared) and not in_group
        counts["num_grouped"] += 0 if not shared else 1 if in_group else 2
        in_group, previous = bool(shared), ids
    return Plan(
        num_rows=len(rows),
        num_bad=rows.num_bad,
        num_done=journal.num_ok + journal.num_failed,
        num_parts=len(rows.parts()),
        bad=[bad.message for _, (_, bad) in zip(range(_MAX_NAMED), rows.bad_rows(), strict=False)],
        **counts,
    )


def _left(prompts: Iterable[Measured | None], counts: dict[str, Any]) -> Iterator[tuple[np.ndarray, bool, int]]:
    """Token ids of each prompt to run, whether its salt is not that of the one before, and the most it generates.

    Counts what is refused, and sounds.
    """
    before = ""
    for each in prompts:
        if each is None:
            counts["num_refused"] += 1
            continue
        if (sound := each.sound) is not None:
            counts["num_sounds"] += 1
            counts["num_windows"] += sound.num_windows
            counts["num_unsaid"] += sound.seconds is None
            counts["sound_s"] += sound.seconds or 0.0
        yield each.ids, each.salt != before, each.outputs * each.row.asked.n
        before = each.salt


def _num_shared(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def measured_outlook(
    rows: Rows, store: Store, terms: EndTerms, now: float, known: WorkerReport | None = None
) -> tuple[Outlook, str] | None:
    """One worker's forecast at the throughput of earlier workers, and its source; None before any measurement.

    store: of the journal. now: seconds since 1970. known: of another job, whose rows may stop sooner or later; it
    counts where this job has had no worker.
    """
    journal = Journal(store, rows, "plan")
    journal.refresh()
    forecaster = Forecaster(
        rows.tokens,
        clock=lambda: now,
        end_s=terms.deadline,
        budget=terms.budget,
        price_per_hour=terms.price_per_hour,
    )
    earlier, by = earlier_reports(store), "by earlier runs"
    if known is not None and known.throughput is not None and all(each.throughput is None for each in earlier):
        spread = math.hypot(known.throughput.spread, _OTHER_JOB_SPREAD)
        other = dataclasses.replace(
            known, throughput=known.throughput._replace(spread=spread), spent_s=0.0, is_alive=False
        )
        earlier, by = [*earlier, other], "by another job here"
    forecaster.tell(earlier)
    undone = journal.unfinished(rows.order)
    forecaster.kept = float(sum(num_written(journal.partial(index)) for index in undone.tolist()))
    outlook = forecaster.outlook(undone)
    return None if outlook is None else (outlook, by)


def bounded_rows(least_s: float, terms: EndTerms, now: float) -> list[tuple[str, str]]:
    """The least time and cost, by the device's own limits, before anything was measured."""
    found = _asked_rows(terms, now, None)
    found += [("expected time", f"more than {least_s:,.1f} s, by the device's own limits; a run will measure it")]
    cost = None if terms.price_per_hour is None else least_s / 3600 * terms.price_per_hour
    if cost is not None:
        found.append(("expected cost", f"more than {cost:,.2f} at {terms.price_per_hour:,.2f} an hour"))
    if terms.deadline is not None and least_s > terms.deadline - now:
        num_workers = math.ceil(least_s / (terms.deadline - now))
        found.append(("does not fit", f"{num_workers:,} workers would be needed at the least"))
    if cost is not None and terms.budget is not None and cost > terms.budget:
        found.append(("does not fit", f"it costs more than the budget of {terms.budget:,.2f}"))
    return found


def outlook_rows(outlook: Outlook, by: str, terms: EndTerms, now: float) -> list[tuple[str, str]]:
    """Time and cost with their ranges, and whether they fit the terms. by: the forecast's source."""
    takes = seconds_phrase(outlook.low_s, outlook.seconds, outlook.high_s)
    found = _asked_rows(terms, now, outlook.spent)
    found += [(f"expected time of one worker, {by}", takes)]
    if outlook.cost is not None:
        spent = f", {outlook.spent:,.2f} of it spent" if outlook.spent else ""
        cost = f"{outlook.cost:,.2f} ({outlook.low_cost:,.2f} to {outlook.high_cost:,.2f}){spent}"
        found.append(("expected cost of all", cost))
    if terms.has_end:
        found.append(("by then", verdict_phrase(outlook, terms, now)))
    return found


def _asked_rows(terms: EndTerms, now: float, spent: float | None) -> list[tuple[str, str]]:
    return [("asked for", terms_phrase(terms, now, spent))] if terms.has_end else []


def plan_table(plan: Plan, engine: Mapping[str, str], expected: Sequence[tuple[str, str]], title: str) -> Table:
    """The plan as a person reads it. engine: what is known of the engine, by name. expected: of time and cost."""
    table = Table(title=Text(title), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    share = plan.saved_tokens / max(plan.prompt_tokens, 1)
    for name, value in (
        ("rows", f"{plan.num_rows:,}"),
        ("bad rows", f"{plan.num_bad:,}"),
        ("rows that are too long, that the chat template refuses, or whose sound is damaged", f"{plan.num_refused:,}"),
        ("rows done", f"{plan.num_done:,}"),
        *([("rows with an earlier answer", f"{plan.num_reused:,}")] if plan.num_reused else []),
        ("parts that workers take", f"{plan.num_parts:,}"),
        *_sounds(plan),
        ("tokens in", f"{plan.prompt_tokens:,}"),
        ("of them shared with the row before", f"{plan.saved_tokens:,} ({share:.1%})"),
        ("groups that share a prefix", f"{plan.num_groups:,} of {plan.num_grouped:,} rows"),
        ("longest prompt", f"{plan.longest_prompt:,} tokens"),
        ("tokens out, at most", f"{plan.most_output_tokens:,}"),
        *engine.items(),
        *expected,
        *(("bad row", message) for message in plan.bad),
    ):
        table.add_row(Text(name), Text(value))
    return table


def _sounds(plan: Plan) -> Iterator[tuple[str, str]]:
    """Lines of the table about sounds."""
    if plan.num_sounds:
        yield "sounds", f"{plan.num_sounds:,} of {plan.sound_s:,.0f} s, in {plan.num_windows:,} windows"
    if plan.num_unsaid:
        yield "sounds of unknown length, each counted as one window", f"{plan.num_unsaid:,}"
