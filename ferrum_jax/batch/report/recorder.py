"""A run's measurements over time, and the report: facts of the run alone, so no line holds them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrum_jax.batch.report.display import Tally
from ferrum_jax.core.metrics import MEDIA
from ferrum_jax.io import system

FIELDS = (
    *("wall_s", "rows", "prompt_tokens", "cached_tokens", "output_tokens", "pool_use", "padding_waste"),
    *("read_tokens", "written_tokens"),  # of rows in progress too; the other counts are of rows that ended
)
SPECULATION = ("speculation_steps", "drafted_tokens", "accepted_tokens")  # behind these, of an engine that drafts
_COUNTS = ("at", "wall_s", "rows", "prompt_tokens", "cached_tokens", "output_tokens")  # of a run
_MAX_SAMPLES = 400
_KEPT_SHARE, _MIN_KEPT_S, _MAX_KEPT_S = 0.05, 2.0, 60.0  # of the run's time, between two records of it


class Recorder:
    """Samples of a run, at an interval that doubles whenever there are too many."""

    def __init__(
        self, tally: Tally, interval_s: float = 0.5, keep: Callable[[Mapping[str, Any]], None] = lambda stats: None
    ) -> None:
        """keep: told now and then, with the engine's statistics, to keep the record so far: the run may be killed."""
        self._tally, self._interval_s, self._keep, self._kept_s = tally, interval_s, keep, -math.inf
        self._sampled_s = -interval_s
        self.samples: list[list[float]] = []
        self._counts_drafts = False

    @property
    def is_due(self) -> bool:
        """Whether it is time for a sample."""
        return self._tally.wall_s - self._sampled_s >= self._interval_s

    def sample(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        """Takes one if it is time; puts pool use and padding waste into the tally."""
        if not self.is_due:
            return
        tally, now_s = self._tally, self._tally.wall_s
        self._sampled_s = now_s
        found = stats()
        tally.pool_use = found["live"] / max(found["num_blocks"], 1)
        tally.padding_waste = padding_waste(found)
        counts = (tally.num_prompt_tokens, tally.num_hit_tokens, tally.num_output_tokens)
        shares = (round(tally.pool_use, 4), round(tally.padding_waste, 4))
        computed = (tally.num_prompt_tokens + tally.num_reading, tally.num_written)
        self._counts_drafts = SPECULATION[0] in found
        drafts = [found[name] for name in SPECULATION] if self._counts_drafts else []
        self.samples.append([round(now_s, 3), tally.num_own, *counts, *shares, *computed, *drafts])
        if len(self.samples) > _MAX_SAMPLES:
            del self.samples[::2]
            self._interval_s *= 2
        if now_s - self._kept_s >= min(max(_KEPT_SHARE * now_s, _MIN_KEPT_S), _MAX_KEPT_S):
            self._kept_s = now_s
            self._keep(found)

    def run(self, worker: str, ended: str, stats: Mapping[str, Any], *, journal_s: float) -> dict[str, Any]:
        """The record of the run so far. ended: why, or that it goes on. journal_s: of the run's time, at most."""
        tally = self._tally
        tally.padding_waste = padding_waste(stats)
        return {
            "worker": worker,
            "at": int(system.now()),
            "ended": ended,
            "wall_s": round(tally.wall_s, 3),
            "journal_s": round(journal_s, 3),
            "rows": tally.num_own,
            "rows_given": tally.num_given,
            "prompt_tokens": tally.num_prompt_tokens,
            "cached_tokens": tally.num_hit_tokens,
            "output_tokens": tally.num_output_tokens,
            "engine": dict(stats),
            "samples": {"fields": FIELDS + SPECULATION * self._counts_drafts, "values": self.samples},
        }


def run_in(said: Any) -> dict[str, Any] | None:
    """The run of a record that was kept; None where there is none, or it is damaged."""
    try:
        engine, samples = said["engine"], said["samples"]
        numbers = [said[name] for name in _COUNTS] + [engine[name] for name in ("padded_tokens", "computed_tokens")]
        numbers += [engine[name] for name in (*MEDIA, "startup_s") if name in engine]
        numbers += [value for row in samples["values"] for value in row]
        fits = all(len(row) == len(samples["fields"]) for row in samples["values"])
        texts = [said["worker"], said["ended"], *samples["fields"]]
    except (KeyError, TypeError):
        return None
    fits = fits and all(type(each) in (int, float) for each in numbers) and all(isinstance(each, str) for each in texts)
    return said if fits else None


def padding_waste(*stats: Mapping[str, Any]) -> float:
    """The share of token slots that were padding, of engines together; 0 to 1."""
    slots = sum(found["padded_tokens"] for found in stats)
    return 1 - sum(found["computed_tokens"] for found in stats) / slots if slots else 0.0


def media_of(*stats: Mapping[str, Any]) -> dict[str, float]:
    """Counts of media that all engines encoded, by the names of `MEDIA`; zeros are left out."""
    counts = {name: round(sum(found.get(name, 0) for found in stats), 3) for name in MEDIA}
    return {name: count for name, count in counts.items() if count}


def report(
    output: str,
    created: int,
    tally: Tally,
    runs: Sequence[Mapping[str, Any]],
    *,
    num_invalid: int,
    usage: tuple[int, int] | None = None,
    **more: object,
) -> dict[str, Any]:
    """report.json: rows and tokens of the job, and each run whose record is known.

    num_invalid: rows that no run could take. usage: tokens that all answers read and wrote; None takes those of the
    runs. `unrecorded` are rows of runs that were killed before they recorded them, so that invalid, unrecorded and the
    runs' own rows are together those that are ok or failed.
    """
    ordered = sorted(runs, key=lambda run: (run["at"], run["worker"]))
    totals = {
        name: sum(run[name] for run in ordered)
        for name in ("prompt_tokens", "cached_tokens", "output_tokens", "wall_s")
    }
    if usage is not None:
        totals["prompt_tokens"], totals["output_tokens"] = usage
    rows = {"all": tally.num_rows, "ok": tally.num_ok, "failed": tally.num_failed, "invalid": num_invalid}
    rows["unrecorded"] = max(tally.num_done - num_invalid - sum(run["rows"] for run in ordered), 0)
    waste = round(padding_waste(*(run["engine"] for run in ordered)), 4)
    return {
        "output": output,
        "created": created,
        "rows": rows,
        **totals,
        "padding_waste": waste,
        "media": media_of(*(run["engine"] for run in ordered)),
        **more,
        "runs": ordered,
    }
