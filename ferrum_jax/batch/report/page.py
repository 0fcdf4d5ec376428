"""The report as one HTML page that needs nothing beside it: what ran, how it went, what failed, and plots over time.

Light or dark as the reader's system is, from the width of a telephone to that of a screen. All that comes from a user
(paths, names, messages, values) is escaped.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.batch.report.plots import figures
from ferrum_jax.pages.html_page import document, escaped, grid, head, table
from ferrum_jax.progress import clock

_TITLE = "Batch job "
OPENS_WITH = document(_TITLE).partition("</title>")[0].encode()  # by which a file is known as such a page
_MOST_UNFOLDED = 60  # characters of a value
_PARTS = (("good", "ok"), ("bad", "failed"))  # of the bar, with their colours
_ENGINE = {  # what of an engine's statistics stands on the page
    "num_blocks": "KV blocks",
    "kv_bytes": "KV pool of a device",
    "weights_bytes": "weights of a device",
    "steps": "steps",
    "computed_tokens": "tokens computed",
    "executables": "executables",
    "executables_loaded": "executables that were loaded",
    "startup_s": "start",
}
_MEDIA = {  # what of a report's media stands among the tiles
    "images_encoded": "images encoded",
    "video_groups_encoded": "groups of a video's frames encoded",
    "sounds_encoded": "sounds encoded, windows of one each",
    "sound_s": "seconds of sound",
}


def page(report: Mapping[str, Any]) -> str:
    """The page of a report that `record.report` made."""
    return document(
        f"{_TITLE}{report['output']}",
        _head(report),
        _tiles(report),
        _errors(report),
        "<h2>Over time</h2>",
        grid("plots", [figures(report["runs"])]),
        _runs(report),
        _facts(report),
    )


def _head(report: Mapping[str, Any]) -> str:
    path, rows = str(report["output"]), report["rows"]
    model = report.get("identity", {}).get("model", "a model that is not named")
    kind, state = _state(report)
    whole = max(rows["all"], 1)
    bar = "".join(f'<i class="{kind}" style="width:{100 * rows[name] / whole:.3f}%"></i>' for kind, name in _PARTS)
    above = f"Batch job of {model}, begun {_moment(report['created'])} UTC"
    return head(above, path.rpartition("/")[2], kind, state, path) + f'<div class="bar">{bar}</div>'


def _state(report: Mapping[str, Any]) -> tuple[str, str]:
    rows, runs = report["rows"], report["runs"]
    left = rows["all"] - rows["ok"] - rows["failed"]
    if left:
        why = f"stopped: {runs[-1]['ended']}" if runs else "not begun"
        return "soft", f"{why}; {left:,} of {rows['all']:,} rows are left"
    failed = "1 row" if rows["failed"] == 1 else f"{rows['failed']:,} rows"
    return ("bad", f"complete, {failed} failed") if rows["failed"] else ("good", "complete")


def _tiles(report: Mapping[str, Any]) -> str:
    rows, prompt, wall_s = report["rows"], report["prompt_tokens"], report["wall_s"]
    speed = report["output_tokens"] / max(wall_s, 1e-9)
    tiles = (
        (f"{rows['ok']:,}", f"of {rows['all']:,} rows answered"),
        (f"{rows['failed']:,}", f"rows failed, {rows['invalid']:,} of them invalid input"),
        (f"{prompt:,}", "tokens in"),
        (f"{report['cached_tokens'] / max(prompt, 1):.1%}", f"of them reused, {report['cached_tokens']:,}"),
        (f"{report['output_tokens']:,}", "tokens out"),
        (f"{speed:,.1f}", "tokens out a second"),
        (clock(wall_s), _of_runs(len(report["runs"]))),
        (f"{report['padding_waste']:.1%}", "of token slots were padding"),
        *((f"{report['media'][name]:,}", noun) for name, noun in _MEDIA.items() if name in report.get("media", {})),
    )
    return grid(
        "tiles",
        (f'<div class="tile"><b>{escaped(value)}</b><span>{escaped(name)}</span></div>' for value, name in tiles),
    )


def _of_runs(count: int) -> str:
    return "time of the run" if count == 1 else f"time of {count} runs together"


def _errors(report: Mapping[str, Any]) -> str:
    """The first rows that failed; where the others are."""
    failed, shown = report["rows"]["failed"], report["errors"]
    if not failed:
        return ""
    rows = [(error["custom_id"] or "no custom_id", error["code"], error["message"]) for error in shown]
    more = failed - len(rows)
    how_many = f"{more:,} {'more' if rows else 'rows'}"
    rest = f'<p class="soft">{how_many}; each has its line in the output of the complete job.</p>' if more else ""
    there = table(("row", "error", "what was wrong"), rows, "texts") if rows else ""
    return f"<h2>Rows that failed</h2>{there}{rest}"


def _runs(report: Mapping[str, Any]) -> str:
    columns = ("run", "began (UTC)", "ended", "rows", "tokens in", "reused", "tokens out", "time", "start")
    rows = [_run(run) for run in report["runs"]]
    if count := report["rows"]["invalid"]:
        rows.append(("invalid input", "", "", f"{count:,}", "", "", "", "", ""))
    if count := report["rows"]["unrecorded"]:
        read, written = (
            report[name] - sum(run[name] for run in report["runs"]) for name in ("prompt_tokens", "output_tokens")
        )
        rows.append(("killed, no record", "", "", f"{count:,}", f"{read:,}", "", f"{written:,}", "", ""))
    done = report["rows"]["ok"] + report["rows"]["failed"]
    tokens = [f"{report[name]:,}" for name in ("prompt_tokens", "cached_tokens", "output_tokens")]
    rows.append(("all", "", "", f"{done:,}", *tokens, clock(report["wall_s"]), ""))
    return f"<h2>Runs</h2>{table(columns, rows, 'runs')}"


def _run(run: Mapping[str, Any]) -> Sequence[str]:
    counts = [f"{run[name]:,}" for name in ("rows", "prompt_tokens", "cached_tokens", "output_tokens")]
    start_s = run["engine"].get("startup_s")
    start = "" if start_s is None else f"{start_s:,.1f} s"
    return (run["worker"], _moment(run["at"] - run["wall_s"]), run["ended"], *counts, clock(run["wall_s"]), start)


def _facts(report: Mapping[str, Any]) -> str:
    """Model and settings, the environments, and the engine of the last run."""
    environments = report.get("environments", [])
    cards = [("Job", report.get("identity", {}))]
    for number, environment in enumerate(environments, start=1):
        cards.append(("Environment" if len(environments) == 1 else f"Environment {number}", environment))
    if "ending" in report:
        cards.append(("End", report["ending"]))
    if report["runs"]:
        engine = report["runs"][-1]["engine"]
        found = {name: _with_unit(key, engine[key]) for key, name in _ENGINE.items() if key in engine}
        cards.append(("Engine of the last run", found))
    shown = (f'<div class="card"><h3>{escaped(name)}</h3>{_facts_of(values)}</div>' for name, values in cards)
    differing = report.get("differing_bits") or []
    note = f'<p class="bad">Bits may differ between rows: {escaped("; ".join(differing))}.</p>' if differing else ""
    return f"<h2>What ran</h2>{note}{grid('facts', shown)}"


def _facts_of(values: Mapping[str, Any]) -> str:
    """A table of names and values; long values are folded, and open at a click."""
    rows = []
    for name, value in values.items():
        text = _value(value)
        shown = escaped(text)
        if len(text) > _MOST_UNFOLDED:
            shown = f"<details><summary>{escaped(text[: _MOST_UNFOLDED // 2])} ...</summary>{shown}</details>"
        rows.append(f"<tr><td>{escaped(name.replace('_', ' '))}</td><td>{shown}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _with_unit(key: str, value: float) -> object:
    if key.endswith("_bytes"):
        return f"{value / 1e9:,.2f} GB" if value >= 1e9 else f"{value / 1e6:,.2f} MB"
    return f"{value:,.1f} s" if key.endswith("_s") else value


def _value(value: object) -> str:
    if isinstance(value, str) or value is None:
        return value or "none"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}"
    return json.dumps(value)


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
