"""`ferrum-jax batch --plan`: what a job would do, from its input and the model's description alone."""

from __future__ import annotations

import argparse
import functools

from ferrum_jax.commands.flags import row_defaults
from ferrum_jax.commands.model import named_adapters
from ferrum_jax.commands.model_names import model_names
from ferrum_jax.config import EngineConfig


def show_plan(args: argparse.Namespace, config: EngineConfig) -> int:
    """Prints the plan; 1 if rows are bad already, else 0. Reads no weight, compiles and writes nothing."""
    import jax

    from checkpoints import open_checkpoint
    from checkpoints.sentence import read_sentence_layout
    from ferrum_jax.batch.input.files import reading_rows
    from ferrum_jax.batch.input.rows import Rows
    from ferrum_jax.batch.job_plan import expected_time, make_plan, measured_rate, plan_table
    from ferrum_jax.batch.journal.job_folder import JobFolder
    from ferrum_jax.batch.journal.job_identity import begun_with, started_of
    from ferrum_jax.batch.reach import as_logged, reach_of
    from ferrum_jax.embeddings.embedder import Embedder, prompt_ids
    from ferrum_jax.files.store import open_local, open_store, split
    from ferrum_jax.meshes.choices import Subject
    from ferrum_jax.meshes.forecast import least_time_s
    from ferrum_jax.meshes.settle import settled
    from ferrum_jax.models import registry
    from ferrum_jax.offline.padding import expected_padding
    from ferrum_jax.progress import plain_console
    from ferrum_jax.runtime.layout import lay_out
    from ferrum_jax.sharding import make_mesh
    from ferrum_jax.text.chat import ChatTemplate
    from ferrum_jax.text.prompts import PromptEncoder
    from ferrum_jax.text.tokenizer import Tokenizer

    commit = begun_with(open_store(f"{args.output}.journal"), args.model, args.revision)
    checkpoint = open_checkpoint(args.model, commit or args.revision)
    if registry.is_encoder(checkpoint.config):
        raise ValueError(
            f"{args.model} is an encoder, and has none of the pools that would be planned; leave --plan out"
        )
    folder, name = split(args.output)
    with open_local(args.input) as raw, reading_rows(raw, args.input) as file:
        record = JobFolder(args.output, open_store).record()
        names = *model_names(args.model, args.served_model_name), *([] if record is None else record["names"])
        adapters = tuple(named_adapters(args))
        rows = Rows(file, config.seed, names, defaults=row_defaults(args), adapters=adapters)
        texts = args.tokenizer or checkpoint.path
        spec = registry.spec_of(checkpoint.config, lambda: checkpoint.has_head, checkpoint.stored_forms)
        config = settled(Subject(spec=spec, config=config), config.among(jax.devices()))
        mesh = make_mesh(config.mesh_shape, config.among(jax.devices()))
        most = config.max_model_len or spec.max_position_embeddings
        tokenizer, chat = Tokenizer.load(texts), ChatTemplate.load(texts)
        prompts = PromptEncoder(tokenizer=tokenizer, chat=chat, max_model_len=most)
        embedder = Embedder(
            read_sentence_layout(checkpoint.path),
            prompts.tokenizer,
            poolings=("last",),
            vocab_size=spec.vocab_size,
            max_tokens=most - 1,
        )
        token_ids = prompt_ids(prompts.token_ids, embedder)
        token_ids = functools.partial(token_ids, now=started_of(record))
        reach = reach_of(rows, token_ids, most)
        layout = lay_out(spec, config, mesh, reach)
        ledger = layout.ledger
        plan = make_plan(
            rows,
            open_store(f"{args.output}.journal"),
            token_ids,
            block_size=ledger.block_size,
            max_model_len=layout.max_model_len,
        )
        padding = expected_padding(as_logged(rows, token_ids, layout.max_model_len), layout, layout.settled(config))
    engine = {
        "executables": "\n".join(str(bucket) for bucket in layout.ladder.buckets),
        "weights": f"{ledger.weights_bytes / 2**20:,.1f} MiB a device",
        "KV pool": f"{ledger.kv_bytes / 2**20:,.1f} MiB a device, {ledger.kv_tokens:,} tokens",
        "rows at once": f"{layout.num_rows:,}",
        "padding of token slots": f"{padding:.1%}",
    }
    computed = plan.prompt_tokens - plan.saved_tokens
    least_s = least_time_s(layout, layout.options.target, tokens_in=computed, tokens_out=plan.most_output_tokens)
    expected = expected_time(plan, measured_rate(open_store(folder), name), least_s)
    plain_console().print(plan_table(plan, engine, expected, f"{args.input} with {args.model}"))
    return 1 if plan.num_bad or plan.num_refused else 0
