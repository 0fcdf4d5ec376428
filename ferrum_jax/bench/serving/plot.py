"""The picture of a run: each request from its arrival to its end, and how times are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.bench.serving.http_client import Answered
from ferrum_jax.bench.serving.run import quantile

_WAIT, _STREAM, _BAD = "#c2410c", "#0b6e99", "#b91c1c"


def draw(answers: Sequence[Answered], path: Path, title: str) -> None:
    """Writes the picture. It needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.4, 1))
    above, below = halves
    _draw_requests(above.subplots(), answers)
    good = [each for each in answers if not each.error]
    series = {
        "time to first token": [each.ttft_s for each in good],
        "between tokens": [value for each in good for value in each.between_s],
        "whole request": [each.latency_s for each in good],
    }
    for axes, (name, values) in zip(below.subplots(1, 3, sharey=True), series.items(), strict=True):
        _draw_share(axes, name, values)
    figure.savefig(path, dpi=110)


def _draw_requests(axes: Any, answers: Sequence[Answered]) -> None:
    start = min(each.sent for each in answers)
    for row, each in enumerate(sorted(answers, key=lambda answer: answer.sent), 1):
        first = each.event_times[0] if each.event_times else each.ended
        axes.hlines(row, each.sent - start, first - start, color=_BAD if each.error else _WAIT, linewidth=1.5)
        axes.hlines(row, first - start, each.ended - start, color=_STREAM, linewidth=1.5)
    names = {_WAIT: "until the first token", _STREAM: "tokens"}
    if any(each.error for each in answers):
        names[_BAD] = "failed"
    for colour, name in names.items():
        axes.plot([], [], color=colour, label=name)
    axes.set(xlabel="seconds", ylabel="request")
    axes.margins(x=0.01, y=0.02)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False, ncols=3, bbox_to_anchor=(0, 1.08))


def _draw_share(axes: Any, name: str, values_s: list[float]) -> None:
    """How many took no longer than this: from nothing to a little beyond the p99, which a few outliers would dwarf."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(ylabel="share of them" if name.startswith("time") else None)
    if not values_s:
        axes.set_title(f"{name}\nnone", fontsize=10)
        axes.set_xticks([])
        return
    median, most = (quantile(values_s, share) for share in (0.5, 0.99))
    unit, scale = ("s", 1.0) if most >= 2.0 else ("ms", 1000.0)
    axes.ecdf([scale * value for value in values_s], color=_STREAM)
    axes.set_xlim(0, 1.1 * scale * most)
    for value in (median, most):
        axes.axvline(scale * value, color=_WAIT, linewidth=1, linestyle=":")
    axes.set_title(f"{name}\np50 {_shown(scale * median)} {unit}, p99 {_shown(scale * most)} {unit}", fontsize=10)
    axes.set(xlabel=unit)
    axes.locator_params(axis="x", nbins=6)
    axes.grid(alpha=0.3)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
