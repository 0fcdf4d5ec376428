"""Flags that say by when a job is to end and what it may cost."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from ferrum_jax.batch.deadline.end_terms import EndTerms, deadline_of, money_of, span_of
from ferrum_jax.cli.parsers import add_flags


def add_end(batch: argparse.ArgumentParser) -> None:
    """Adds --deadline, --within, --budget and --price-per-hour."""
    group = batch.add_argument_group(
        "the end of the job and its cost",  # the short help shows this line in place of the four
        "Set by --deadline, --within, --budget, --price-per-hour; see --help-all.",
    )
    until = group.add_mutually_exclusive_group()
    times = {
        "--deadline TIME": "stop in order by then, with exit code 75 if rows are left: 06:00 is the next one in the "
        "machine's time zone; 2026-11-28T06:00, and with a zone 2026-11-28T06:00+01:00. Rows run by priority, then in "
        "the input's order",
        "--within TIME": "stop in order so long after the start: 2h, 90m, 1h30m",
    }
    add_flags(until, times)
    costs = {
        "--budget MONEY": "stop in order before all workers and starts of the job have cost more; needs "
        "--price-per-hour",
        "--price-per-hour MONEY": "what an hour of this machine costs: plan and progress then show costs, in the same "
        "currency",
    }
    add_flags(group, costs)


def end_terms(args: argparse.Namespace, now: Callable[[], float] = time.time) -> EndTerms:
    """The deadline and budget of the flags. Raises ValueError with the wrong value."""
    started = now()
    deadline = None if args.deadline is None else deadline_of(args.deadline, started)
    return EndTerms(
        deadline=deadline if args.within is None else started + span_of(args.within),
        budget=None if args.budget is None else money_of(args.budget, "the budget"),
        price_per_hour=None if args.price_per_hour is None else money_of(args.price_per_hour, "the price of an hour"),
    )
