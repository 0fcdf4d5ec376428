"""The picture of `scripts/bench_shard.py`: a panel for each number, a bar for each form on each mesh."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

_COLOURS = {"single": "#555555", "pmap": "#c98a2b", "jit": "#3a7ca5", "shard_map": "#2f8f5b"}
_PANELS: tuple[tuple[str, str, Callable[[Any], float | None]], ...] = (
    ("tokens a second", "{:,.0f}", lambda r: r.tok_s),
    ("scaling efficiency, %", "{:.0f}", lambda r: None if r.efficiency is None else 100 * r.efficiency),
    ("collectives of a step", "{:,.0f}", lambda r: sum(r.collectives.values())),
    ("their bytes on a device, MB", "{:.2f}", lambda r: r.collective_bytes / 1e6),
    ("memory of a device, MB", "{:,.0f}", lambda r: r.memory_bytes / 1e6),
    ("compile time, s", "{:.1f}", lambda r: r.compile_s),
)


def plot(results: Sequence[Any], path: pathlib.Path, title: str) -> None:
    """Writes the PNG. Panels without data are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [panel for panel in _PANELS if any(panel[2](r) is not None for r in results)]
    names = [result.name for result in results]
    rows = -(-len(panels) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(12, rows * (0.9 + 0.24 * len(results))), sharey=True)
    for axis, (label, form, value) in zip(axes.flat, panels, strict=False):
        values = [value(result) or 0.0 for result in results]
        bars = axis.barh(names, values, color=[_COLOURS[result.form] for result in results])
        axis.bar_label(bars, [form.format(v) for v in values], padding=3, fontsize=8)
        axis.set_title(label, fontsize=10, loc="left")
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    axes.flat[0].invert_yaxis()  # the first form on top
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 0.98))  # room for the title
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
