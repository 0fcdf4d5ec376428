"""The report of a check as one HTML page that needs nothing beside it, for a bug report."""

from __future__ import annotations

from ferrum_jax.cli.device_check.report import INTERPRETED, Report, scrubbed, tables
from ferrum_jax.io.pages.html_page import document, escaped, table


def page(report: Report) -> str:
    """The page. All texts are escaped."""
    values = report.as_json()
    devices = values["machine"]["devices"]
    name = f"{devices['count']} x {devices['kind']}" if devices else "no device"
    wrong = [(text,) for text in (*scrubbed(report.all_problems), *values["notes"])]
    note = INTERPRETED if any(line.get("is_interpreted") for line in report.kernels) else ""
    return document(
        "ferrum-jax check",
        f"<h1>{escaped(name)}</h1><p>ferrum-jax check, {report.seconds:.0f} s: {escaped(report.state)}</p>",
        f"<h2>Wrong, or not done</h2>{table((), wrong)}" if wrong else "",
        *(f"<h2>{escaped(title)}</h2>{table(head if any(head) else (), rows)}" for title, head, rows in tables(values)),
        f"<p>{note}</p>",
    )
