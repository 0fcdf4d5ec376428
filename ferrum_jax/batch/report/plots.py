"""Plots of a job's runs over time: they stand one after the other, each with its start, a dashed line between them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ferrum_jax.batch.report.recorder import SPECULATION
from ferrum_jax.ints import ceil_div
from ferrum_jax.pages.svg_plot import Frame

_FRAME = Frame(height=240, right=30, top=12, bottom=34)
_MOST_POINTS = 120
_MOST_ROWS = 200
_WORD_WIDTH = 72  # of a band that has room for its word
_SAMPLED = (*SPECULATION, "read_tokens", "written_tokens")  # counts that stand in samples alone
_COUNTS = ("rows", "prompt_tokens", "cached_tokens", "output_tokens")

Series = Mapping[str, Sequence[tuple[float, float]]]  # name -> (seconds, value)


def figures(runs: Sequence[Mapping[str, Any]]) -> str:
    """Plots of the runs, one of drafts only where there were some; a sentence where samples are too few for lines."""
    points, axis = _points(runs)
    if len(points) < 3:
        return "<p>The runs were too short for plots.</p>"

    def rate(name: str, per: str, scale: float = 1.0) -> list[tuple[float, float]]:
        """By how much `name` rises per unit of `per`, between points at which `per` has risen.

        Where `per` falls, another engine counts from 0.
        """
        found, last = [], points[0]
        for point in points:
            if point[per] > last[per]:
                found.append((point["wall_s"], scale * max(point[name] - last[name], 0.0) / (point[per] - last[per])))
            if point[per] != last[per]:
                last = point
        return found

    def level(name: str) -> list[tuple[float, float]]:
        return [(point["wall_s"], 100 * point[name]) for point in points]

    hits = rate("cached_tokens", "prompt_tokens", 100.0)
    shares = {"pool in use": level("pool_use"), "padding": level("padding_waste")}
    speeds = {"in": rate("read_tokens", "wall_s"), "out": rate("written_tokens", "wall_s")}
    lengths = {"in": rate("prompt_tokens", "rows"), "out": rate("output_tokens", "rows")}
    drafts = {name: rate(f"{name}_tokens", "speculation_steps") for name in ("accepted", "drafted")}
    return "".join(
        (
            _rows(runs, axis),
            _plot("Throughput, tokens a second", speeds, axis),
            _plot("Prompt tokens from the prefix cache, %", {"reused": hits}, axis, top=100.0),
            _plot("KV pool and padding, %", shares, axis, top=100.0),
            _plot("Tokens a row", lengths, axis),
            _plot("Accepted length, tokens of a draft", drafts, axis) if drafts["drafted"] else "",
        )
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Axis:
    """Seconds of all runs together. begins: when each began to answer, after its start; ends: when each ended.

    bands: (from, to, what was done there) of times at which a run answers nothing yet, or slower.
    """

    begins: Sequence[float]
    ends: Sequence[float]
    bands: Sequence[tuple[float, float, str]]

    @property
    def last(self) -> float:
        return max(self.ends, default=0.0) or 1.0


def _points(runs: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, float]], _Axis]:
    """Samples of all runs, thinned for a plot, with counts added up over runs; and when runs began and ended."""
    found: list[dict[str, float]] = []
    bases = dict.fromkeys(("wall_s", *_COUNTS, *_SAMPLED), 0.0)
    nothing = dict.fromkeys(_SAMPLED, 0.0)  # of runs that did not record it
    begins: list[float] = []
    ends: list[float] = []
    bands: list[tuple[float, float, str]] = []
    for run in runs:
        start_s = run["engine"].get("startup_s") or 0.0
        bands.append((bases["wall_s"], bases["wall_s"] + start_s, "starting"))
        bases["wall_s"] += start_s
        begins.append(bases["wall_s"])
        named = (zip(run["samples"]["fields"], values, strict=True) for values in run["samples"]["values"])
        samples = [_with_computed(nothing | dict(sample)) for sample in named]
        for came in run["engine"].get("executables_compiled", ()):
            began_s = begins[-1] + came["began_s"]
            bands.append((began_s, began_s + came["seconds"], "compiling"))
        found += [sample | {name: sample[name] + base for name, base in bases.items()} for sample in samples]
        last = {**run, **{name: (samples or [nothing])[-1][name] for name in _SAMPLED}}
        bases = {name: base + last[name] for name, base in bases.items()}
        ends.append(bases["wall_s"])
    thinned = found[:: max(1, ceil_div(len(found), _MOST_POINTS))]
    return thinned, _Axis(begins=begins, ends=ends, bands=bands)


def _with_computed(sample: dict[str, float]) -> dict[str, float]:
    """The sample; one of an older version counted tokens when their rows ended."""
    if sample["read_tokens"] or sample["written_tokens"]:
        return sample
    return sample | {"read_tokens": sample["prompt_tokens"], "written_tokens": sample["output_tokens"]}


def _rows(runs: Sequence[Mapping[str, Any]], axis: _Axis) -> str:
    """A line for each row that was kept, from when the engine had it to its end; nothing where none was."""
    rows = [
        [None if each is None else begin + each for each in times]
        for begin, run in zip(axis.begins, runs, strict=True)
        for times in run.get("row_times", {}).get("values", ())
    ]
    rows = sorted(rows)[:: max(1, ceil_div(len(rows), _MOST_ROWS))]
    if not rows:
        return ""
    parts = [*_scales(axis, None)]
    for number, (began, first, ended) in enumerate(rows):
        y = 1 - (number + 0.5) / len(rows)
        for kind, start, end in (("b", began, first), ("a", began if first is None else first, ended)):
            if start is not None and end is not None and end > start:
                parts.append(_FRAME.line(kind, (start / axis.last, y), (end / axis.last, y)))
    return _figure("Rows", {"b": "until the first token", "a": "tokens"}, parts)


def _plot(title: str, series: Series, axis: _Axis, top: float | None = None) -> str:
    """Lines over seconds. top: the end of the y axis; without it, a round number above the highest value."""
    drawn = list(itertools.chain.from_iterable(series.values()))
    top = top or _round_above(max((y for _, y in drawn), default=0.0))
    parts = [*_scales(axis, top)]
    for kind, points in zip("ab", series.values(), strict=False):
        parts.append(_FRAME.lines(kind, ((x / axis.last, y / top) for x, y in points)))
    return _figure(title, dict(zip("ab", series, strict=False)), parts)


def _figure(title: str, names: Mapping[str, str], parts: Sequence[str]) -> str:
    """names: of the series, by class."""
    return _FRAME.figure(title, names, f"{' and '.join(names.values())} over time", parts)


def _scales(axis: _Axis, top: float | None) -> Iterator[str]:
    """Axes, what was done while nothing was answered, and where runs ended. top: None has no numbers at the y axis."""
    for start, end, what in axis.bands:
        x, width = _FRAME.x(start / axis.last), _FRAME.inner_width * (end - start) / axis.last
        if width >= 1:
            size = f'width="{width:.1f}" height="{_FRAME.inner_height}"'
            yield f'<rect class="band" x="{x:.1f}" y="{_FRAME.top}" {size}/>'
        if width >= _WORD_WIDTH:
            yield f'<text x="{x + width / 2:.1f}" y="{_FRAME.top + 16}" text-anchor="middle">{what}</text>'
    for tick in (0.0, 0.5, 1.0):
        yield _FRAME.horizontal(tick, "" if top is None else _number(top * tick))
        yield _FRAME.below(tick, _clock(axis.last * tick))
    for end in axis.ends[:-1]:
        yield _FRAME.vertical(end / axis.last, "end")


def _round_above(value: float) -> float:
    """The least number of 1, 2, 4, 6, 8, 10 times a power of ten that is not below `value`: its half is short too."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 4, 6, 8, 10) if factor * power >= value)


def _number(value: float) -> str:
    """At most five letters, which have room beside a plot on a telephone."""
    for unit, power in (("M", 1e6), ("k", 1e4)):
        if value >= power:
            return f"{value / (1e6 if unit == 'M' else 1e3):.3g} {unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    """Seconds, minutes or hours, whichever a person reads at once."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"
