"""The picture of a run: each request from its arrival to its end, and how times are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.bench.serving.http_client import Answered

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
    for axes, (name, values) in zip(below.subplots(1, 3), series.items(), strict=True):
        _draw_share(axes, name, [1000 * value for value in values])
    figure.savefig(path, dpi=110)


def _draw_requests(axes: Any, answers: Sequence[Answered]) -> None:
    start = min(each.sent for each in answers)
    for row, each in enumerate(sorted(answers, key=lambda answer: answer.sent)):
        first = each.event_times[0] if each.event_times else each.ended
        axes.hlines(row, each.sent - start, first - start, color=_BAD if each.error else _WAIT, linewidth=1.5)
        axes.hlines(row, first - start, each.ended - start, color=_STREAM, linewidth=1.5)
    for colour, name in ((_WAIT, "until the first token"), (_STREAM, "tokens"), (_BAD, "failed")):
        axes.plot([], [], color=colour, label=name)
    axes.set(xlabel="seconds", ylabel="request")
    axes.legend(loc="upper left", frameon=False, ncols=3)


def _draw_share(axes: Any, name: str, values: list[float]) -> None:
    if values:
        axes.ecdf(values, color=_STREAM)
        axes.set_xlim(left=0)
    axes.set(title=name, xlabel="ms", ylabel="share of them" if name.startswith("time") else None)
    axes.grid(alpha=0.3)
