"""`ferrum-jax batch --plan`: what a job would do, from its input and the model's description alone."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ferrum_jax.config import EngineConfig, MeshShape
from ferrum_jax.prompt import Content


def show_plan(args: argparse.Namespace, config: EngineConfig) -> int:
    """Prints the plan; 1 if rows are bad already, else 0. Reads no weight, compiles and writes nothing."""
    import jax
    from rich.console import Console

    from checkpoints import open_checkpoint
    from ferrum_jax.batch.files import reading_rows
    from ferrum_jax.batch.plan import expected_time, least_time_s, make_plan, measured_rate, plan_table
    from ferrum_jax.batch.rows import Rows
    from ferrum_jax.batch.store import open_local, open_store, split
    from ferrum_jax.models import registry
    from ferrum_jax.runtime.layout import lay_out
    from ferrum_jax.sharding import make_mesh
    from pallas_kernels.target import Target

    checkpoint = open_checkpoint(args.model)
    mesh = make_mesh(MeshShape.parse(config.mesh), jax.devices())
    layout = lay_out(registry.spec_of(checkpoint.config), config, mesh)
    ledger, target = layout.ledger, Target.of_device(mesh.devices.flat[0])
    folder, name = split(args.output)
    with open_local(args.input) as raw, reading_rows(raw, args.input) as file:
        plan = make_plan(
            Rows(file, config.seed),
            open_store(f"{args.output}.journal"),
            _Encoder(os.fspath(checkpoint.path), args.tokenizer),
            block_size=ledger.block_size,
            max_model_len=layout.max_model_len,
        )
    engine = {
        "executables": "\n".join(str(bucket) for bucket in layout.ladder.buckets),
        "weights": f"{ledger.weights_bytes / 2**20:,.1f} MiB a device",
        "KV pool": f"{ledger.kv_bytes / 2**20:,.1f} MiB, {ledger.kv_tokens:,} tokens",
        "rows at once": f"{config.max_num_seqs:,}",
    }
    least_s = least_time_s(
        plan,
        weights_bytes=ledger.weights_bytes,
        num_weights=ledger.weights_bytes // layout.dtype.itemsize,
        num_rows=config.max_num_seqs,
        flops_per_s=target.flops_per_s,
        bandwidth_bytes_per_s=target.bandwidth_bytes_per_s,
    )
    expected = expected_time(plan, measured_rate(open_store(folder), name), least_s)
    Console().print(plan_table(plan, engine, expected, f"{args.input} with {args.model}"))
    return 1 if plan.num_bad or plan.num_refused else 0


class _Encoder:
    """Token ids of a prompt, as `LLM` would make them."""

    def __init__(self, folder: str, tokenizer: str | None) -> None:
        from ferrum_jax.text.chat import ChatTemplate
        from ferrum_jax.text.tokenizer import Tokenizer

        self._folder = tokenizer or folder
        self._tokenizer = Tokenizer.load(self._folder)
        self._template = ChatTemplate.load(self._folder)

    def __call__(self, content: Content) -> Sequence[int]:
        from ferrum_jax.text.chat import require_chat_template
        from ferrum_jax.text.tokenizer import require_tokenizer

        if not isinstance(content, str) and content and isinstance(content[0], int):
            return content  # type: ignore[return-value]
        tokenizer = require_tokenizer(self._tokenizer, self._folder)
        if isinstance(content, str):
            return tokenizer.encode(content)
        text = require_chat_template(self._template, self._folder).render(content)  # type: ignore[arg-type]
        return tokenizer.encode(text, add_special_tokens=False)
