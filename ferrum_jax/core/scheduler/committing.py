"""Commits a step's sampled tokens to the books of one data shard.

A row has one place, and with drafts one more behind each. The token drawn at its first place is the row's next one.
That of the place behind a draft is one more if the draft came true: if it is the token that the row has there, drawn or
forced by its grammar. So tokens are taken one at a time, and what each brings about is known before the next. In a step
with a horizon the places behind the first are taken likewise, as long as their row goes on.

A drafted token may be one for which the model computes NaN, and attention carries that to tokens before it in the same
step, because 0 x NaN is NaN. So a place that is not finite ends its row only where no draft is behind it. Elsewhere the
row computes it again, and has no drafts any more.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.metrics import SpeculationCounts
from ferrum_jax.core.outputs import NOT_FINITE
from ferrum_jax.core.plan import ShardPlan
from ferrum_jax.core.request import Request
from ferrum_jax.core.scheduler.running_rows import RunningRows, append_tokens

Got = list[tuple[Request, int]]  # requests that got a token, or an error in its place, and the place


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRows:
    """A shard's part of a plan, and which admission each of its rows was."""

    plan: ShardPlan
    requests: list[Request]
    epochs: np.ndarray  # [rows] int64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardBooks:
    """The books that a commit writes. awaited: see `append_tokens`. counts: of drafts."""

    rows: RunningRows
    cache: CacheManager
    awaited: set[int]
    counts: SpeculationCounts


def committed(planned: PlannedRows, token_ids: np.ndarray, first: int, books: ShardBooks) -> Iterator[Got]:
    """The requests whose row drew a token; then, as often as it is asked, those whose next draft came true.

    token_ids: [places]. first: of these places among those of all shards.
    """
    plan, requests, rows, cache = planned.plan, planned.requests, books.rows, books.cache
    current = rows.epochs[plan.slots] == planned.epochs
    done, places = plan.starts + plan.counts - plan.num_drafts, plan.first_places
    has_drafts = len(plan.drafts) > 0
    spoilt = current & (plan.num_drafts > 0) & (token_ids[places] == NOT_FINITE) & has_drafts
    for row in np.flatnonzero(spoilt).tolist():
        _give_up(planned, books, row)
    got = append_tokens(
        requests, plan.samples * ~spoilt, done, current, token_ids[places], books.awaited, places + first
    )
    _publish(cache, requests, plan.slots, np.where(current & ~spoilt, done, 0))
    yield _unkeyed(cache, got)
    left = np.flatnonzero((plan.num_drafts > 0) & ~spoilt)
    for depth in itertools.count() if len(left) else ():
        if has_drafts:
            came_true = [_came_true(planned, token_ids, books, row, depth) for row in left.tolist()]
            for row in left[np.logical_not(came_true)].tolist():
                books.counts.count(len(plan.drafts_of(row)), depth)
        else:  # a row that was preempted goes on too
            went_on = [requests[row].finish_reason is None for row in left.tolist()]
            came_true = (went_on & (plan.num_drafts[left] > depth)).tolist()
        left = left[came_true]
        if not len(left):
            return
        going_on, slots = [requests[row] for row in left.tolist()], plan.slots[left]
        for request in going_on if has_drafts else ():
            request.num_computed += 1
        rows.computed[slots] += has_drafts
        known, place, all_of_them = done[left] + depth + 1, places[left] + depth + 1, np.ones(len(left), bool)
        got = append_tokens(going_on, all_of_them, known, all_of_them, token_ids[place], books.awaited, place + first)
        _publish(cache, going_on, slots, known * current[left])
        yield _unkeyed(cache, got)


def _give_up(planned: PlannedRows, books: ShardBooks, row: int) -> None:
    """Have a row compute again, without drafts, what it knows: nothing can be drawn at its first place."""
    request, num_drafts = planned.requests[row], len(planned.plan.drafts_of(row))
    books.counts.count(num_drafts, 0)
    request.takes_drafts = False
    books.cache.settle_drafts(request.slot, are_whole=False)
    _go_back(planned, books.rows, row)


def _came_true(planned: PlannedRows, token_ids: np.ndarray, books: ShardBooks, row: int, depth: int) -> bool:
    """Whether the row still runs and has the token that was drafted at this depth. If not, it goes on from there."""
    plan, request, rows = planned.plan, planned.requests[row], books.rows
    if rows.epochs[plan.slots[row]] != planned.epochs[row]:
        return False  # it has ended, and what it held is given back
    drafts = plan.drafts_of(row)
    position = int(plan.starts[row] + plan.counts[row]) - len(drafts) + depth
    if depth < len(drafts) and drafts[depth] == request.token_ids[position]:
        if depth + 1 == len(drafts) or token_ids[plan.first_places[row] + depth + 1] != NOT_FINITE:
            return True
        request.takes_drafts = False
    if not books.cache.settle_drafts(request.slot, are_whole=depth == len(drafts)):
        _go_back(planned, rows, row)
    return False


def _go_back(planned: PlannedRows, rows: RunningRows, row: int) -> None:
    """Have a row compute again what it knows from where the step began."""
    request = planned.requests[row]
    request.num_computed = rows.computed[request.slot] = int(planned.plan.starts[row])
    rows.extend(request)


def _publish(cache: CacheManager, requests: Sequence[Request], slots: np.ndarray, known: np.ndarray) -> None:
    """Publish full blocks of rows. known: [rows] their first tokens that are computed and known."""
    for row in cache.rows_to_publish(slots, known).tolist():
        cache.publish(requests[row], requests[row].slot, int(known[row]))


def _unkeyed(cache: CacheManager, got: Got) -> Got:
    """The result unchanged; blocks of a request that ended with an error are forgotten."""
    for request, _ in got:
        if request.finish_reason == "error":
            cache.unkey(request)
    return got
