"""Plots of a job's runs over time: they stand one after the other, each with its start."""

from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.batch.report.recorder import SPECULATION
from ferrum_jax.core.progress import clock
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.io.pages.html_page import plot

_MAX_POINTS = 120
_SAMPLED = (*SPECULATION, "read_tokens", "written_tokens")  # counts that stand in samples alone
_COUNTS = ("rows", "prompt_tokens", "cached_tokens", "output_tokens")


def figures(runs: Sequence[Mapping[str, Any]]) -> str:
    """Plots of the runs, one of drafts only where there were some; a sentence where samples are too few for lines."""
    points = _points(runs)
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
    until = clock(points[-1]["wall_s"])
    return "".join(
        (
            plot("Throughput, tokens a second", speeds, until),
            plot("Prompt tokens from the prefix cache, %", {"reused": hits}, until, top=100.0),
            plot("KV pool and padding, %", shares, until, top=100.0),
            plot("Tokens a row", lengths, until),
            plot("Accepted length, tokens of a draft", drafts, until) if drafts["drafted"] else "",
        )
    )


def _points(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Samples of all runs, thinned for a plot, with counts and times added up over runs."""
    found: list[dict[str, float]] = []
    bases = dict.fromkeys(("wall_s", *_COUNTS, *_SAMPLED), 0.0)
    nothing = dict.fromkeys(_SAMPLED, 0.0)  # of runs that did not record it
    for run in runs:
        bases["wall_s"] += run["engine"].get("startup_s") or 0.0
        named = (zip(run["samples"]["fields"], values, strict=True) for values in run["samples"]["values"])
        samples = [_with_computed(nothing | dict(sample)) for sample in named]
        found += [sample | {name: sample[name] + base for name, base in bases.items()} for sample in samples]
        last = {**run, **{name: (samples or [nothing])[-1][name] for name in _SAMPLED}}
        bases = {name: base + last[name] for name, base in bases.items()}
    return found[:: max(1, ceil_div(len(found), _MAX_POINTS))]


def _with_computed(sample: dict[str, float]) -> dict[str, float]:
    """The sample; one of an older version counted tokens when their rows ended."""
    if sample["read_tokens"] or sample["written_tokens"]:
        return sample
    return sample | {"read_tokens": sample["prompt_tokens"], "written_tokens": sample["output_tokens"]}
