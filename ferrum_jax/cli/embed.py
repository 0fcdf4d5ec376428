"""`ferrum-jax embed`: the vectors of a file of texts, in the order of its lines.

A line is {"custom_id": name, "input": text or token ids}, where custom_id may be left out, or a text alone. Output
appears whole at the end, with `embedding` or `error` for each line. The names of both files tell their form, as in
`batch.files`; an output whose name ends in .npy is a float32 array [lines, D] with NaN for each line that failed. Exit
codes: 0 done, 1 some lines failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_jax.batch.input.files import ARRAY, VECTORS, check_name, is_array, reading_rows, writing_rows
from ferrum_jax.batch.input.lines import canonical, load_value, refuse_unreadable
from ferrum_jax.cli.model import add_model, chosen_config, open_llm
from ferrum_jax.cli.parsers import new_command
from ferrum_jax.io.files.whole_files import beside
from ferrum_jax.io.paths import require_folder_of

if TYPE_CHECKING:
    from ferrum_jax.core.outputs import EmbeddingOutput

EXIT_OK, EXIT_LINES_FAILED = 0, 1
_MAX_NAMED = 5  # failed lines named on the terminal
Entry = tuple[str | None, "EmbeddingOutput | ValueError"]  # (custom_id, the line's vector or its error)


def add(commands: Any) -> None:
    embed = new_command(
        commands,
        "embed",
        _run,
        "write the vector of each text of a file",
        "--model DIR --input FILE --output FILE",
        examples=(
            "--model sentence-transformers/all-MiniLM-L6-v2 --input texts.jsonl --output vectors.npy",
            "--model Qwen/Qwen3-Embedding-0.6B --input texts.jsonl --output vectors.jsonl --prompt-name query",
        ),
        common="prompt_name pooling normalize truncate",
    )
    embed.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help='lines of {"input": ...} or of texts; .jsonl, .csv, .parquet, also .gz and .zst',
    )
    embed.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="file of the same kinds, or .npy for a NumPy array"
    )
    embed.add_argument("--prompt-name", metavar="NAME", help="name of the checkpoint's prompt to put before each text")
    embed.add_argument(
        "--pooling",
        choices=("mean", "cls", "last"),
        help="how token states become a vector (default: as the checkpoint says)",
    )
    embed.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="vectors of length 1 (default: the checkpoint's)",
    )
    embed.add_argument("--truncate", action="store_true", help="cut texts that are too long")
    add_model(embed)


def _run(args: argparse.Namespace) -> int:
    check_name(args.output.name, allowed=[ARRAY])
    require_folder_of(args.output, "output")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(reading_rows(stack.enter_context(open(args.input, "rb")), args.input.name))
        num_lines = sum(1 for line in file if line.strip())
        if not num_lines:
            raise ValueError(f"{args.input} has no lines")
        file.seek(0)
        llm = open_llm(args, chosen_config(args), stack)
        from ferrum_jax.core.progress import progress_bar

        advance = stack.enter_context(progress_bar(num_lines, shown=None, what="texts"))
        how = {key: getattr(args, key) for key in ("prompt_name", "pooling", "normalize", "truncate")}
        entries = _entries(lambda requests: llm.embed_as_completed(requests, **how), file, advance)
        with beside(args.output, lasts=False) as written:
            name = args.output.name
            failed = (
                _write_array(written, entries, num_lines) if is_array(name) else _write_lines(written, entries, name)
            )
            os.replace(written, args.output)
    for message in failed[:_MAX_NAMED]:
        print(message, file=sys.stderr)
    if failed:
        print(f"{len(failed)} of {num_lines} lines failed", file=sys.stderr)
    return EXIT_LINES_FAILED if failed else EXIT_OK


def _entries(
    embed: Callable[[Iterable[tuple[int, Any]]], Generator[tuple[int, EmbeddingOutput | ValueError], None, None]],
    lines: Iterable[bytes],
    advance: Callable[[EmbeddingOutput | ValueError], None],
) -> Iterator[Entry]:
    """The entries of all lines that are not blank, in order; those that are ready early wait in memory."""
    ids: dict[int, str | None] = {}
    ready: dict[int, EmbeddingOutput | ValueError] = {}

    def requests() -> Iterator[tuple[int, Any]]:
        for index, line in enumerate(line for line in lines if line.strip()):
            ids[index], text = _parse(line)
            if isinstance(text, ValueError):
                ready[index] = text
            else:
                yield index, text

    following = 0
    with contextlib.closing(embed(requests())) as outputs:
        for index, output in outputs:
            ready[index] = output
            while following in ready:
                entry = ready.pop(following)
                advance(entry)
                yield ids.pop(following), entry
                following += 1
    for index in sorted(ready):  # bad lines at the end
        advance(ready[index])
        yield ids.pop(index), ready.pop(index)


def _parse(line: bytes) -> tuple[str | None, Any]:
    """(custom_id, text or token ids); in place of the latter a ValueError if something is wrong with the line."""
    custom_id = None
    try:
        found = load_value(line)
        canonical(found, None)  # refuses NaN and lone surrogates
        if isinstance(found, dict):
            custom_id = found.get("custom_id") if isinstance(found.get("custom_id"), str) else None
            refuse_unreadable(found)
    except ValueError as error:
        return custom_id, error
    if isinstance(found, str):
        return None, found
    if not isinstance(found, dict) or custom_id != found.get("custom_id"):
        return None, ValueError("the line must be a text, or an object whose custom_id is a string")
    if found.keys() - {"custom_id", "input"} or not isinstance(text := found.get("input"), str | list):
        return custom_id, ValueError("the line must have `input`, a text or a list of token ids, and nothing else")
    return custom_id, text


def _write_lines(path: str, entries: Iterable[Entry], name: str) -> list[str]:
    """Writes lines in the form of the output's name; returns the messages of those that failed."""
    failed = []
    with open(path, "wb") as target, writing_rows(target, name, VECTORS) as file:
        for number, (custom_id, entry) in enumerate(entries, start=1):
            line: dict[str, Any] = {"custom_id": custom_id}
            if isinstance(entry, ValueError):
                failed.append(f"line {number}: {entry}")
                line["error"] = {"code": "invalid_request", "message": str(entry)}
            else:
                line["embedding"] = [float(f"{value:.9g}") for value in entry.embedding.tolist()]
                line["num_tokens"] = len(entry.prompt_token_ids)
            file.write(json.dumps(line).encode() + b"\n")
    return failed


def _write_array(path: str, entries: Iterable[Entry], num_lines: int) -> list[str]:
    """Writes [num_lines, D] float32; returns the messages of the lines that failed, whose rows are NaN."""
    import numpy as np

    failed: list[str] = []
    array = None
    for index, (_, entry) in enumerate(entries):
        if isinstance(entry, ValueError):
            failed.append(f"line {index + 1}: {entry}")
            continue
        if array is None:
            shape = (num_lines, len(entry.embedding))
            array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
            array[:] = np.nan
        array[index] = entry.embedding
    if array is None:
        raise ValueError(f"no line has a vector: {failed[0]}")
    array.flush()
    return failed
