"""The findings, as a person reads them, and as JSON."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from ferrum_jax.batch.verify.line_difference import DIFFERENT
from ferrum_jax.batch.verify.verify_job import VERDICTS, Options, RowVerdict, Verified
from ferrum_jax.io.error_text import quoted

_MAX_VALUES = 3  # of a row that differs


def shown(found: Verified, model: str, options: Options) -> Iterator[Any]:
    """Tables and sentences for the terminal. model: as it was named."""
    table = Table(title=Text(f"{found.output}, verified with {model}"), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, count in (
        ("lines read", found.num_lines),
        ("findings in them, the report and the input", found.findings.counts.total()),
        ("rows answered again", found.num_answered),
        *((name, found.counts[name]) for name in VERDICTS),
    ):
        table.add_row(name, f"{count:,}")
    yield table
    for sentence in found.findings.sentences:
        yield Text(f"- {sentence}")
    if found.differing:
        yield _rows(found)
    if found.promise is not None:
        yield Text(found.promise.why)
    yield Text(_conclusion(found, options))
    if found.num_left:
        asked = found.num_answered + found.num_left
        yield Text(f"Stopped before all rows were answered again: {found.num_answered:,} of {asked:,} were compared.")


def _rows(found: Verified) -> Table:
    table = Table(title=Text("Rows that differ"))
    for name in ("row", "where", "written", "answered again", "margin"):
        table.add_column(name, justify="right" if name == "margin" else "left", overflow="fold")
    for row in found.differing:
        for cells in _lines(row):
            table.add_row(*map(Text, cells))
    return table


def _lines(row: RowVerdict) -> Iterator[tuple[str, str, str, str, str]]:
    name = row.custom_id if row.custom_id.isprintable() else repr(row.custom_id)
    if row.parting is not None:
        part = row.parting
        written, here = ("no such token" if text is None else repr(text) for text in (part.written, part.here))
        margin = "not known" if part.margin is None else f"{'at least ' * part.is_at_least}{part.margin:.3g}"
        yield name, f"choice {part.choice}, token {part.token}", written, here, margin
        return
    for difference in row.compared.differences[:_MAX_VALUES]:
        gap = "" if not row.compared.gap else f"{row.compared.gap:.3g}"
        yield name, difference.where.removeprefix("response."), quoted(difference.written), quoted(difference.here), gap
        name = ""
    if (more := len(row.compared.differences) - _MAX_VALUES) > 0:
        yield "", f"and {more:,} more values", "", "", ""


def _conclusion(found: Verified, options: Options) -> str:
    same = f" --sample-seed {options.seed} chooses the same rows." if found.num_answered < found.num_lines else ""
    if found.is_right and found.num_left and not found.num_answered:
        return "Nothing wrong was found in what was read, and no row was answered again."
    if found.is_right:
        kept = "to the bit" if found.promise is not None and found.promise.bits else "within rounding"
        sentence = f"The output is what this model gives, {kept}, as far as it was answered again"
        return f"{sentence}{_share(found)}.{same}"
    wrong = []
    if count := found.findings.counts.total():
        wrong.append(f"{count:,} {'finding' if count == 1 else 'findings'} of what was read")
    if count := found.counts[DIFFERENT]:
        wrong.append(f"{count:,} of {found.num_answered:,} rows that were answered again differ")
    return f"The output is not what its report says: {', and '.join(wrong)}.{same}"


def _share(found: Verified) -> str:
    """The largest share of differing rows after a sample without one: 95 % sure, by (1 - share) ** n = 0.05."""
    if found.num_left or not 0 < found.num_answered < found.num_lines:  # rows are not stopped by chance
        return ""
    share = 1 - 0.05 ** (1 / found.num_answered)
    return f"; if more than {share:.1%} of all rows were wrong, one of them would have been found 19 times in 20"


def as_json(found: Verified, model: str, options: Options) -> dict[str, Any]:
    """All that was found, for programs."""
    return {
        "output": found.output,
        "input": found.input,
        "model": model,
        "is_right": found.is_right,
        "lines": found.num_lines,
        "answered_again": found.num_answered,
        "not_answered_again": found.num_left,
        "sample_seed": options.seed,
        "verdicts": {name: found.counts[name] for name in VERDICTS},
        "promise": found.promise and dataclasses.asdict(found.promise),
        "findings": [dataclasses.asdict(finding) for finding in found.findings.kept],
        "num_findings": dict(found.findings.counts),
        "differing": [
            {
                "custom_id": row.custom_id,
                "verdict": row.verdict,
                "gap": row.compared.gap,
                "differences": [
                    {"where": each.where, "written": each.written, "here": each.here}
                    for each in row.compared.differences[:_MAX_VALUES]
                ],
                "parting": row.parting and dataclasses.asdict(row.parting),
            }
            for row in found.differing
        ],
    }
