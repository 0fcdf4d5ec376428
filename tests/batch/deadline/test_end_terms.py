"""What a user says of a job's end is read strictly, and said again with its time zone."""

import argparse
import datetime
import os
import time

import pytest

from ferrum_jax.batch.deadline.end_terms import EndTerms, deadline_of, money_of, of_day, said, span_of
from ferrum_jax.batch.deadline.forecaster import Outlook
from ferrum_jax.batch.deadline.phrases import progress_phrase, terms_phrase, verdict_phrase
from ferrum_jax.cli.batch import add_end, end_terms
from tests.rows import rows_beside

EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30), "EAST")
NOON = datetime.datetime(2026, 11, 27, 12, 0, tzinfo=EAST).timestamp()


@pytest.mark.parametrize(("text", "meant"), rows_beside(__file__)["deadlines"])
def test_a_deadline_is_the_next_such_time_of_day_or_that_moment(text, meant):
    assert deadline_of(text, NOON, EAST) == datetime.datetime.fromisoformat(meant).timestamp()


@pytest.mark.parametrize("text", rows_beside(__file__)["no deadlines"])
def test_what_is_no_deadline_is_refused_with_the_value_and_the_forms(text):
    with pytest.raises(ValueError, match="the deadline is ") as found:
        deadline_of(text, NOON, EAST)
    assert repr(text) in str(found.value) and "; give " in str(found.value)


@pytest.mark.parametrize("text", ["24:00", "24:00:00Z", "2026-11-28T24:00", "2026-11-28 24:00+01:00"])
def test_a_deadline_at_24_is_told_how_midnight_is_written(text):
    with pytest.raises(ValueError, match="midnight is 00:00 of the day that it begins"):
        deadline_of(text, NOON, EAST)


def test_a_deadline_that_has_passed_or_is_far_away_is_refused_with_its_zone():
    with pytest.raises(ValueError, match=r"which has passed: it is 2026-11-27 12:00 EAST, UTC\+05:30; give"):
        deadline_of("2026-11-27T11:59", NOON, EAST)
    with pytest.raises(ValueError, match="within 366 days"):
        deadline_of("2028-01-01T00:00", NOON, EAST)


def test_a_time_of_day_is_that_of_the_machine_also_where_its_clocks_are_changed(monkeypatch):
    monkeypatch.setitem(os.environ, "TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        evening = datetime.datetime(2026, 10, 24, 22, 0, tzinfo=datetime.UTC).timestamp()  # midnight in CEST
        found = deadline_of("06:00", evening)
        assert found - evening == 7 * 3600 and said(found) == "2026-10-25 06:00 CET, UTC+01:00"
        assert said(evening) == "2026-10-25 00:00 CEST, UTC+02:00"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(("text", "seconds"), rows_beside(__file__)["spans"])
def test_a_span_has_its_units(text, seconds):
    assert span_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "7200", "2 h", "h", "-2h", "0s", "0.5s", "2h2h", "30m1h", "1.2.3h", ".h", "400d", "２h"]
)
def test_what_is_no_span_is_refused_with_the_value_and_the_forms(text):
    with pytest.raises(ValueError, match="give it with its unit, from 1s to 366d") as found:
        span_of(text)
    assert repr(text) in str(found.value)


def test_money_is_a_number_above_0_without_a_currency():
    assert money_of("40", "the budget") == 40.0 and money_of("3.50", "the budget") == 3.5
    for text in ("", "0", "-1", "40 EUR", "$4", "nan", "inf", "1e3", "4,50", "0.0000001"):
        with pytest.raises(ValueError, match=f"the budget is {text!r}".replace("$", r"\$")):
            money_of(text, "the budget")


def test_a_budget_without_a_price_is_refused():
    with pytest.raises(ValueError, match="give --price-per-hour beside --budget"):
        EndTerms(budget=40.0)


def terms_of(*flags: str) -> EndTerms:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_end(parser)
    return end_terms(parser.parse_args(flags), now=lambda: NOON)


def test_flags_give_the_terms_and_none_of_them_gives_no_end():
    assert terms_of() == EndTerms() and not EndTerms().has_end
    assert terms_of("--within", "2h").deadline == NOON + 7200
    found = terms_of("--deadline", "2026-11-28T06:00Z", "--budget", "40", "--price-per-hour", "3.5")
    assert (found.budget, found.price_per_hour, found.has_end) == (40.0, 3.5, True)
    assert not terms_of("--price-per-hour", "3.5").has_end
    with pytest.raises(ValueError, match="the price of an hour is 'x'"):
        terms_of("--price-per-hour", "x")


OUTLOOK = Outlook(
    seconds=3600.0, spread=0.05, low_s=3000.0, high_s=4320.0, cost=9.0, low_cost=8.5, high_cost=9.6, spent=1.5
)
TERMS = EndTerms(deadline=NOON + 18 * 3600, budget=40.0, price_per_hour=7.5)


def test_the_terms_are_said_with_the_time_zone():
    text = terms_phrase(TERMS, NOON, 1.5, EAST)
    assert "Ends by 2026-11-28 06:00 EAST, UTC+05:30, in 18:00:00." in text
    assert "Costs at most 40.00 at 7.50 an hour, 1.50 of it spent." in text and text.endswith("order of the input.")


def test_the_line_of_progress_has_end_and_cost_in_80_columns():
    text = progress_phrase(OUTLOOK, EndTerms(deadline=NOON + 7200, price_per_hour=7.5), NOON, EAST)
    assert text == "ends 13:00 (12:50 to 13:12), by 14:00; costs 9.00 (8.50 to 9.60), now 1.50"
    assert len(text) <= 80
    late = Outlook(**{**vars(OUTLOOK), "fits": False, "cost": None})
    assert progress_phrase(late, TERMS, NOON, EAST) == "ends 13:00 (12:50 to 13:12), not by 11-28 06:00"
    assert of_day(NOON + 59, NOON, EAST) == "12:00:59"


def test_what_does_not_fit_is_said_with_what_would():
    late = {**vars(OUTLOOK), "fits": False, "share": 0.4}
    text = verdict_phrase(Outlook(**{**late, "num_workers": 3}), TERMS, NOON, EAST)
    assert text.startswith("Does not fit: what is left takes about 1:00:00 (0:50:00 to 1:12:00)")
    assert "about 40% of it will be done" in text and "3 workers like this one would do it by 2026-11-28 06:00" in text
    text = verdict_phrase(Outlook(**{**late, "num_workers": 4, "num_alive": 2}), TERMS, NOON, EAST)
    assert "and 2 are at work" in text
    assert "No number of workers" in verdict_phrase(Outlook(**late), TERMS, NOON, EAST)
    dear = EndTerms(budget=5.0, price_per_hour=7.5)
    assert "It would fit a budget of 9.60." in verdict_phrase(Outlook(**late), dear, NOON, EAST)
    fits = verdict_phrase(Outlook(**{**vars(OUTLOOK), "fits": True}), TERMS, NOON, EAST)
    assert fits == "Fits: what is left takes about 1:00:00 (0:50:00 to 1:12:00), and will have cost 9.00."
