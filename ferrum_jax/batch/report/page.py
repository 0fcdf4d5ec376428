"""The report as one HTML page that needs nothing beside it: what ran, how it went, what failed, and plots over time."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.batch.report.plots import figures
from ferrum_jax.core.progress import clock
from ferrum_jax.io.pages.html_page import document, escaped, table

_TITLE = "Batch job "
OPENS_WITH = document(_TITLE).partition("</title>")[0].encode()  # by which a file is known as such a page
_COUNTED = ("rows", "prompt_tokens", "cached_tokens", "output_tokens")


def page(report: Mapping[str, Any]) -> str:
    """The page of a report that `record.report` made."""
    output, model = str(report["output"]), report.get("identity", {}).get("model", "a model that is not named")
    return document(
        f"{_TITLE}{output}",
        f"<h1>{escaped(output.rpartition('/')[2])}</h1><p>{escaped(output)}</p>",
        f"<p>Batch job of {escaped(model)}, begun {_moment(report['created'])} UTC: {escaped(_state(report))}</p>",
        table((), _totals(report)),
        _errors(report),
        f"<h2>Over time</h2>{figures(report['runs'])}<h2>Runs</h2>{_runs(report)}<h2>What ran</h2>",
        *(f"<h3>{escaped(name)}</h3>{table((), _facts(values))}" for name, values in _cards(report)),
    )


def _state(report: Mapping[str, Any]) -> str:
    rows, runs = report["rows"], report["runs"]
    left = rows["all"] - rows["ok"] - rows["failed"]
    if left:
        why = f"stopped: {runs[-1]['ended']}" if runs else "not begun"
        return f"{why}; {left:,} of {rows['all']:,} rows are left"
    failed = "1 row" if rows["failed"] == 1 else f"{rows['failed']:,} rows"
    return f"complete, {failed} failed" if rows["failed"] else "complete"


def _totals(report: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    rows, prompt, wall_s = report["rows"], report["prompt_tokens"], report["wall_s"]
    return [
        ("rows answered", f"{rows['ok']:,} of {rows['all']:,}"),
        *([("with an earlier job's answer", f"{report['reused']['rows']:,}")] if "reused" in report else []),
        ("rows failed", f"{rows['failed']:,}, {rows['invalid']:,} of them invalid input"),
        ("tokens in", f"{prompt:,}"),
        ("of them reused", f"{report['cached_tokens']:,}, {report['cached_tokens'] / max(prompt, 1):.1%}"),
        ("tokens out", f"{report['output_tokens']:,}, {report['output_tokens'] / max(wall_s, 1e-9):,.1f} a second"),
        ("time of all runs", clock(wall_s)),
        ("padding of token slots", f"{report['padding_waste']:.1%}"),
        *((name.replace("_", " "), f"{count:,}") for name, count in report.get("media", {}).items()),
    ]


def _errors(report: Mapping[str, Any]) -> str:
    """The first rows that failed; where the others are."""
    failed, shown = report["rows"]["failed"], report["errors"]
    if not failed:
        return ""
    rows = [(error["custom_id"] or "no custom_id", error["code"], error["message"]) for error in shown]
    more = failed - len(rows)
    how_many = f"{more:,} {'more' if rows else 'rows'}"
    rest = f"<p>{how_many}; each has its line in the output of the complete job.</p>" if more else ""
    there = table(("row", "error", "what was wrong"), rows) if rows else ""
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
    tokens = [f"{report[name]:,}" for name in _COUNTED[1:]]
    rows.append(("all", "", "", f"{done:,}", *tokens, clock(report["wall_s"]), ""))
    return table(columns, rows)


def _run(run: Mapping[str, Any]) -> Sequence[str]:
    start_s = run["engine"].get("startup_s")
    start = "" if start_s is None else f"{start_s:,.1f} s"
    counts = (f"{run[name]:,}" for name in _COUNTED)
    return (run["worker"], _moment(run["at"] - run["wall_s"]), run["ended"], *counts, clock(run["wall_s"]), start)


def _cards(report: Mapping[str, Any]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """Model and settings, the environments, the end that was set, and the engine of the last run."""
    cards = [("Job", report.get("identity", {}))]
    if differing := report.get("differing_bits"):
        cards.append(("Bits may differ between rows", {"why": "; ".join(differing)}))
    environments = report.get("environments", [])
    for number, environment in enumerate(environments, start=1):
        cards.append(("Environment" if len(environments) == 1 else f"Environment {number}", environment))
    if "ending" in report:
        cards.append(("End", report["ending"]))
    if report["runs"]:
        cards.append(("Engine of the last run", report["runs"][-1]["engine"]))
    return cards


def _facts(values: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    return [
        (name.replace("_", " "), value if isinstance(value, str) else json.dumps(value))
        for name, value in values.items()
    ]


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
