"""Sentences about a job's end: in its progress line, at its start, in its plan, and when it is known to be late.

ends 04:12 (04:10 to 04:14), by 06:00; costs 1.20 (1.10 to 1.30), now 0.31
"""

import datetime

from ferrum_jax.batch.deadline.end_terms import EndTerms, of_day, said
from ferrum_jax.batch.deadline.forecaster import Outlook
from ferrum_jax.core.progress import clock

Zone = datetime.tzinfo | None
_IN_TURN = "Rows run by priority, then in the order of the input."


def terms_phrase(terms: EndTerms, now: float, spent: float | None, zone: Zone = None) -> str:
    """The run's deadline and budget in words, with the time zone they were read in. spent: by the job so far."""
    found = []
    if terms.deadline is not None:
        found.append(f"Ends by {said(terms.deadline, zone)}, in {clock(terms.deadline - now)}.")
    if terms.budget is not None:
        before = f", {spent:,.2f} of it spent" if spent else ""
        found.append(f"Costs at most {terms.budget:,.2f} at {terms.price_per_hour:,.2f} an hour{before}.")
    return " ".join([*found, _IN_TURN])


def progress_phrase(outlook: Outlook, terms: EndTerms, now: float, zone: Zone = None) -> str:
    """The end of the job and its cost, with their ranges, in about 80 columns."""
    end, low, high = (of_day(now + each, now, zone) for each in (outlook.seconds, outlook.low_s, outlook.high_s))
    text = f"ends {end} ({low} to {high})"
    if terms.deadline is not None:
        text += f", {'by' if outlook.fits is not False else 'not by'} {of_day(terms.deadline, now, zone)}"
    if outlook.cost is not None:
        text += f"; costs {outlook.cost:,.2f} ({outlook.low_cost:,.2f} to {outlook.high_cost:,.2f})"
        text += f", now {outlook.spent:,.2f}"
        text += "" if terms.budget is None else f" of {terms.budget:,.2f}"
    return text


def verdict_phrase(outlook: Outlook, terms: EndTerms, now: float, zone: Zone = None) -> str:
    """Whether it fits, and if not, what would."""
    takes = seconds_phrase(outlook.low_s, outlook.seconds, outlook.high_s)
    cost = "" if outlook.cost is None else f", and will have cost {outlook.cost:,.2f}"
    if outlook.fits:
        return f"Fits: what is left takes about {takes}{cost}."
    text = f"Does not fit: what is left takes about {takes}{cost}; about {outlook.share:.0%} of it will be done."
    if terms.deadline is not None and outlook.num_workers is not None and outlook.num_workers > outlook.num_alive:
        at_work = "" if outlook.num_alive == 1 else f", and {outlook.num_alive} are at work"
        text += f" {outlook.num_workers:,} workers like this one would do it by {said(terms.deadline, zone)}{at_work}."
    elif terms.deadline is not None and outlook.num_workers is None:
        text += f" No number of workers would do it by {said(terms.deadline, zone)}: one row takes longer."
    if terms.budget is not None and (outlook.low_cost or 0.0) > terms.budget:
        text += f" It would fit a budget of {outlook.high_cost:,.2f}."
    return text


def seconds_phrase(low_s: float, seconds: float, high_s: float) -> str:
    """A time with its range."""
    return f"{clock(seconds)} ({clock(low_s)} to {clock(high_s)})"
