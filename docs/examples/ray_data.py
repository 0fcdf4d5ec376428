"""Answers rows as a step of a Ray Data pipeline, with an engine in each actor, and goes on after a kill.

    pip install -e '.[ray]'
    python docs/examples/ray_data.py --model DIR --input in.jsonl --output answers

The output is a folder of Parquet files with the columns custom_id and answer, a line of `ferrum-jax batch`. Ray Data
notes in `answers.checkpoint` which custom_ids are written; the same command answers those that are missing.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import ray
from ray.data.checkpoint import CheckpointConfig
from ray.data.datasource import FileBasedDatasource
from rich.console import Console

from ferrum_jax import LLM, EngineConfig
from ferrum_jax.batch.job import EXIT_OK, EXIT_ROWS_FAILED, run_batch


class Requests(FileBasedDatasource):
    """The lines of files, as they are, each with its custom_id."""

    def _read_stream(self, f: Any, path: str) -> Iterator[pyarrow.Table]:
        text = io.TextIOWrapper(f, "utf-8", newline="\n")
        while read := list(itertools.islice(text, 10_000)):
            lines = [line.rstrip("\r\n") for line in read if line.strip()]
            yield pyarrow.table({"custom_id": [custom_id(line) for line in lines], "line": lines})


def custom_id(line: str) -> str:
    """The line's custom_id; for a line without one, a name that it has in every run."""
    try:
        return str(json.loads(line)["custom_id"])
    except (ValueError, KeyError, TypeError):
        return f"line {hashlib.sha256(line.encode()).hexdigest()[:16]}"


class Engine:
    """An LLM in an actor. Each call is a small job: a row that crashes the engine is an error line and no crash."""

    def __init__(self, model: str, config: EngineConfig | None) -> None:
        self._llm, self._name = LLM(model, config), model.rstrip("/").rpartition("/")[-1]

    def __call__(self, rows: pyarrow.Table) -> pyarrow.Table:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
            source.write_text("".join(f"{line}\n" for line in rows["line"].to_pylist()))
            quiet = Console(file=io.StringIO())
            code = run_batch(lambda start: self._llm, source, target, model=self._name, console=quiet)
            if code not in (EXIT_OK, EXIT_ROWS_FAILED):
                raise RuntimeError(
                    f"the rows ended with exit code {code}"
                )  # the pipeline ends; the same command goes on
            return pyarrow.table({"custom_id": rows["custom_id"], "answer": target.read_text().splitlines()})


def main(
    model: str,
    source: str,
    target: str,
    config: EngineConfig | None = None,
    num_actors: int = 2,
    rows_at_once: int = 256,
    **actor_options: Any,
) -> None:
    """rows_at_once: of an actor, and of a file that is written: what a kill costs at most, for each actor.

    actor_options: what each actor needs, such as num_gpus=1 or resources={"TPU": 4}.
    """
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        "custom_id", f"{target}.checkpoint", delete_checkpoint_on_success=False
    )
    rows = ray.data.read_datasource(Requests(source))
    answered = rows.repartition(target_num_rows_per_block=rows_at_once).map_batches(
        Engine,
        fn_constructor_args=(model, config),
        batch_size=rows_at_once,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=num_actors),
        **actor_options,
    )
    answered.write_parquet(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--input", required=True, metavar="FILE")
    parser.add_argument("--output", required=True, metavar="FOLDER")
    parser.add_argument("--num-actors", type=int, default=2, metavar="N")
    given = parser.parse_args()
    main(given.model, given.input, given.output, num_actors=given.num_actors)
