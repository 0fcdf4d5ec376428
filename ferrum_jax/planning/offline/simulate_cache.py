"""`ferrum-jax cache simulate`: what pools of other sizes would have made of a request log, as a table and a picture."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferrum_jax.core.scheduler.request_log import Segment, read_request_log
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes
from ferrum_jax.io.paths import require_plot
from ferrum_jax.planning.offline.replay import Outcome, replay, reuse_distances

_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
# Columns that a table has only where one of its pools counted any.
_RARE = {"images_encoded": "encoded", "image_hits": "images found", "too_large": "too large"}


def simulate(request_log: Path, sizes: Sequence[int] | None, plot: Path | None, console: Console) -> None:
    """Replays the request log at each pool size and prints what came of it; draws `plot` if it is given.

    sizes: in blocks, without the null one; None takes the request log's own pool from a quarter of it to four times.
    Raises ValueError or OSError for a request log that cannot be read, and ValueError where matplotlib is missing.
    """
    if plot is not None:
        require_plot(plot)
    segments = read_request_log(request_log)
    recorded = segments[-1].sizes.num_blocks
    chosen = sorted(set(sizes or (max(int(recorded * scale), 1) for scale in _SCALES)))
    outcomes = []
    with console.status("replaying") as status:
        for size in chosen:
            status.update(f"replaying with {size:,} blocks")
            outcomes.append(replay(segments, size))
        status.update("measuring reuse distances")
        distances = reuse_distances(segments)
    console.print(outcome_table(outcomes, segments))
    console.print(distance_table(distances))
    if plot is not None:
        draw(plot, outcomes)
        console.print(Text(f"{plot} written"))


def outcome_table(outcomes: Sequence[Outcome], segments: Sequence[Segment]) -> Table:
    """One row for each pool size; the request log's own is marked."""
    sizes = segments[-1].sizes
    requests = sum(len(segment.requests) for segment in segments)
    columns = ["blocks", "memory", "hit rate", "evictions", "preempted", "resumed", "put off", "steps"]
    rare = [name for name in _RARE if any(getattr(outcome, name) for outcome in outcomes)]
    columns += [_RARE[name] for name in rare]
    table = _table(f"{requests:,} requests, blocks of {sizes.block_size} tokens", columns)
    for outcome in outcomes:
        mark = "*" if outcome.num_blocks == sizes.num_blocks else ""
        counts = (outcome.evictions, outcome.preemptions, outcome.resumed_tokens, outcome.refusals, outcome.steps)
        cells = [
            f"{mark}{outcome.num_blocks:,}",
            _bytes(_pool_bytes(sizes, outcome.num_blocks)),
            f"{outcome.hit_rate:.1%}",
            *(f"{count:,}" for count in (*counts, *(getattr(outcome, name) for name in rare))),
        ]
        table.add_row(*cells)
    if any(outcome.num_blocks == sizes.num_blocks for outcome in outcomes):
        table.caption = "* the pool that wrote the request log"
    return table


def _pool_bytes(sizes: EngineSizes, num_blocks: int) -> int:
    counts = sizes.with_pool(num_blocks).group_blocks
    return sum((count + 1) * size for count, size in zip(counts, sizes.block_bytes, strict=True))


def distance_table(distances: Counter[int | None]) -> Table:
    """How far apart uses of a block lie, in doubling ranges."""
    total = max(distances.total(), 1)
    columns = ("distance", "lookups", "share", "share so far")
    table = _table("Reuse distance: blocks used since", columns)
    so_far = 0
    for low, high, count in _ranges(distances):
        so_far += count
        table.add_row(f"{low:,} to {high:,}", f"{count:,}", f"{count / total:.1%}", f"{so_far / total:.1%}")
    table.add_row("first use", f"{distances[None]:,}", f"{distances[None] / total:.1%}", "")
    return table


def _ranges(distances: Counter[int | None]) -> list[tuple[int, int, int]]:
    """(lowest, highest, lookups) of 0 to 15, 16 to 31, 32 to 63, ... up to the largest distance."""
    found = sorted((distance, count) for distance, count in distances.items() if distance is not None)
    ranges, low, high = [], 0, 15
    while found and low <= found[-1][0]:
        ranges.append((low, high, sum(count for distance, count in found if low <= distance <= high)))
        low, high = high + 1, 2 * high + 1
    return ranges


def draw(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Hit rate over pool size as a picture; the format follows the file's ending."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.add_subplot(title="Hit rate over pool size", xlabel="blocks in the pool", ylabel="hit rate")
    axes.plot([outcome.num_blocks for outcome in outcomes], [outcome.hit_rate for outcome in outcomes], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1)
    axes.grid(visible=True)
    figure.savefig(path)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1024:,.1f} KiB"
