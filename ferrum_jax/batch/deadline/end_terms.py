"""Terms: by when a job is to end and what it may cost, read strictly from what a user gives.

    06:00, 06:00:30, 06:00+01:00           the next such time of day; without a zone the machine's own
    2026-11-28T06:00, 2026-11-28T06:00Z    that moment
    2h, 90m, 1h30m, 1d                     so long from now
    40, 3.50                               money, in whatever currency the price is

Seconds here are those since 1970.
"""

import dataclasses
import datetime
import math
import re

_MOST_S = 366 * 86_400.0
_ZONE = r"(?:Z|[+-]\d\d:\d\d)?"
_OF_DAY = re.compile(rf"\d\d:\d\d(?::\d\d)?{_ZONE}", re.ASCII)
_MOMENT = re.compile(rf"\d{{4}}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?{_ZONE}", re.ASCII)
_MIDNIGHT = re.compile(rf"(?:^|[T ])24:00(?::00)?{_ZONE}$", re.ASCII)  # which newer versions of Python take
_SPAN = re.compile(r"(?=\d)(?:([\d.]+)d)?(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s)?", re.ASCII)
_UNITS = (86_400.0, 3_600.0, 60.0, 1.0)
_MONEY = re.compile(r"\d{1,12}(?:\.\d{1,6})?", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndTerms:
    """A run's deadline and budget.

    deadline: seconds since 1970 at which the run has ended. budget: what all workers and runs of the job may cost,
    of the price_per_hour that each costs from its start. Raises ValueError for a budget without a price.
    """

    deadline: float | None = None
    budget: float | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.price_per_hour is None:
            raise ValueError(
                f"a budget of {self.budget:,.2f} needs the price of a worker; give --price-per-hour beside --budget"
            )

    @property
    def has_end(self) -> bool:
        """Whether the run may be stopped before all rows are done."""
        return self.deadline is not None or self.budget is not None


def deadline_of(text: str, now: float, zone: datetime.tzinfo | None = None) -> float:
    """The moment that a deadline names. zone: for a text without a time zone; None is the machine's.

    Raises ValueError for another form, for no time of a clock or calendar, and for what has passed.
    """
    try:
        if _MIDNIGHT.search(text):
            raise ValueError("midnight is 00:00 of the day that it begins")
        if _OF_DAY.fullmatch(text):
            return _next(datetime.time.fromisoformat(text), now, zone)
        if _MOMENT.fullmatch(text):
            found = datetime.datetime.fromisoformat(text)
            moment = (found if found.tzinfo else found.replace(tzinfo=zone)).timestamp()
        else:
            raise ValueError("its form is another")
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"the deadline is {text!r} ({error}); give a time of day as 06:00, or a moment as 2026-11-28T06:00 or "
            "2026-11-28T06:00+01:00"
        ) from error
    if moment <= now:
        raise ValueError(f"the deadline is {text!r}, which has passed: it is {said(now, zone)}; give one to come")
    if moment > now + _MOST_S:
        raise ValueError(f"the deadline is {text!r}, {said(moment, zone)}; give one within 366 days")
    return moment


def _next(found: datetime.time, now: float, zone: datetime.tzinfo | None) -> float:
    zone = found.tzinfo or zone
    today = datetime.datetime.fromtimestamp(now, zone).date()
    for days in (0, 1, 2):
        day = today + datetime.timedelta(days=days)
        moment = datetime.datetime.combine(day, found.replace(tzinfo=zone)).timestamp()
        if moment > now:
            return moment
    raise AssertionError("a day has each time of day")


def span_of(text: str) -> float:
    """The seconds of a span such as 2h, 90m or 1h30m. Raises ValueError for another form, less than 1 s or a year."""
    found = _SPAN.fullmatch(text)
    try:
        seconds = sum(float(n) * unit for n, unit in zip(found.groups(), _UNITS, strict=True) if n) if found else 0.0
    except ValueError:  # 1.2.3h
        seconds = 0.0
    if not 1.0 <= seconds <= _MOST_S:
        raise ValueError(f"--within is {text!r}; give it with its unit, from 1s to 366d, as 2h, 90m or 1h30m")
    return seconds


def money_of(text: str, what: str) -> float:
    """An amount above 0. what: it is, as an error says it."""
    value = float(text) if _MONEY.fullmatch(text) else 0.0
    if not 0.0 < value < math.inf:
        raise ValueError(f"{what} is {text!r}; give a number above 0 without a currency, as 40 or 3.50")
    return value


def said(moment: float, zone: datetime.tzinfo | None = None) -> str:
    """The moment with its time zone, as in 2026-11-28 06:00 CET, UTC+01:00. zone: None is the machine's."""
    found = _local(moment, zone)
    name, offset = found.tzname() or "", found.strftime("%z")
    of_utc = f"UTC{offset[:3]}:{offset[3:5]}"
    known = name if name == "UTC" else of_utc if name[:1] in "+-" or name == of_utc else f"{name}, {of_utc}"
    time = f"{found:%Y-%m-%d %H:%M:%S}" if found.second else f"{found:%Y-%m-%d %H:%M}"
    return f"{time} {known}"


def of_day(moment: float, now: float, zone: datetime.tzinfo | None = None) -> str:
    """The time of day, with seconds where it is near and with the date where it is another day."""
    found, today = _local(moment, zone), _local(now, zone)
    time = f"{found:%H:%M:%S}" if moment - now < 600 else f"{found:%H:%M}"
    return time if found.date() == today.date() else f"{found:%m-%d} {time}"


def _local(moment: float, zone: datetime.tzinfo | None) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(moment), zone).astimezone(zone)
