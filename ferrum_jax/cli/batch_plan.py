"""`ferrum-jax batch --plan`: what a job would do, from its input and the model's description alone."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from typing import TYPE_CHECKING

from ferrum_jax.cli.flags import row_defaults
from ferrum_jax.cli.model import named_adapters
from ferrum_jax.cli.model_names import model_names
from ferrum_jax.config import EngineConfig

if TYPE_CHECKING:
    from ferrum_jax.batch.deadline.end_terms import EndTerms
    from ferrum_jax.batch.deadline.forecaster import Outlook, WorkerReport
    from ferrum_jax.batch.job_plan import Plan
    from ferrum_jax.runtime.layout import Layout


def show_plan(args: argparse.Namespace, config: EngineConfig, terms: EndTerms, known: WorkerReport | None) -> int:
    """Prints the plan, and whether it fits the terms; 1 if rows are bad already, else 0. known: of another job.

    Reads no weight, compiles and writes nothing.
    """
    from ferrum_jax.batch.earlier.answers import earlier_answers
    from ferrum_jax.batch.input.files import reading_rows
    from ferrum_jax.batch.input.rows import Rows
    from ferrum_jax.batch.job_plan import make_plan, measured_outlook
    from ferrum_jax.batch.journal.job_folder import JobFolder
    from ferrum_jax.batch.journal.job_identity import begun_with, started_of
    from ferrum_jax.batch.reach import as_logged, reach_of
    from ferrum_jax.engine.startup.open import Opening
    from ferrum_jax.io.files.store import open_local, open_store
    from ferrum_jax.planning.offline.replay import expected_padding

    journal = open_store(f"{args.output}.journal")
    commit = begun_with(journal, args.model, args.revision)
    order = Opening.of_checkpoint(args.model, config, revision=commit or args.revision, tokenizer=args.tokenizer)
    if order.source.reads_whole:
        raise ValueError(
            f"{args.model} is an encoder, and has none of the pools that would be planned; leave --plan out"
        )
    with open_local(args.input) as raw, reading_rows(raw, args.input) as file:
        record = JobFolder(args.output, open_store).record()
        names = *model_names(args.model, args.served_model_name), *([] if record is None else record["names"])
        adapters = tuple(named_adapters(args))
        how = {"defaults": row_defaults(args), "adapters": adapters, "in_turn": terms.has_end}
        rows = Rows(file, config.seed, names, **how)
        texts, most = order.texts(), order.max_model_len
        rows.generation = texts.generation
        ids = texts.token_ids(order.longest_text(texts, most))
        token_ids, foresee = functools.partial(ids, now=started_of(record)), functools.cache(ids.foreseen)
        layout = order.on_paper(reach_of(rows, token_ids, most, foresee))
        num_to_run, num_parts = len(rows.order), len(rows.parts())
        with earlier_answers(args.reuse) as earlier:
            rows.order = rows.order if earlier is None else earlier.left(rows, token_ids, layout.max_model_len)
        size = layout.ledger.block_size
        plan = make_plan(rows, journal, token_ids, foresee, block_size=size, max_model_len=layout.max_model_len)
        plan = dataclasses.replace(plan, num_parts=num_parts, num_reused=num_to_run - len(rows.order))
        padding = expected_padding(as_logged(rows, token_ids, layout.max_model_len, foresee), layout)
        paced = measured_outlook(rows, journal, terms, time.time(), known)
    _print(args, plan, layout, padding, paced, terms)
    return 1 if plan.num_bad or plan.num_refused else 0


def _print(
    args: argparse.Namespace,
    plan: Plan,
    layout: Layout,
    padding: float,
    paced: tuple[Outlook, str] | None,
    terms: EndTerms,
) -> None:
    from ferrum_jax.batch.job_plan import bounded_rows, outlook_rows, plan_table
    from ferrum_jax.core.progress import plain_console
    from ferrum_jax.planning.meshes.forecast import least_time_s

    ledger = layout.ledger
    engine = {
        "executables": "\n".join(str(bucket) for bucket in layout.ladder.buckets),
        "weights": f"{ledger.weights_bytes / 2**20:,.1f} MiB a device",
        "KV pool": f"{ledger.kv_bytes / 2**20:,.1f} MiB a device, {ledger.kv_tokens:,} tokens",
        "rows at once": f"{layout.num_rows:,}",
        "padding of token slots": f"{padding:.1%}",
    }
    computed = plan.prompt_tokens - plan.saved_tokens
    counts = {"tokens_in": computed, "tokens_out": plan.most_output_tokens, "num_clips": plan.num_windows}
    least_s = least_time_s(layout, layout.target, **counts)
    now = time.time()
    expected = bounded_rows(least_s, terms, now) if paced is None else outlook_rows(*paced, terms, now)
    plain_console().print(plan_table(plan, engine, expected, f"{args.input} with {args.model}"))
