"""Forecast: what an engine would hold and how long its steps would take, from shapes and a target's data sheet.

    decode step  = max(bytes read / bandwidth, operations / peak)
    prefill rate = peak / operations of a token, times data shards

Bytes are those of the weights once and of the keys and values of R rows.
It is a bound that no engine passes, not a measurement: collectives, launches and what kernels do not overlap are not
in it. A step of R rows reads the experts that are likely to be chosen, E (1 - (1 - X/E)^R).
"""

from __future__ import annotations

import dataclasses
import math

from ferrum_jax.runtime.layout import Layout
from ferrum_jax.sharding import local_bytes
from ferrum_jax.spec import ModelSpec
from pallas_kernels.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """How many requests of `tokens_in` and `tokens_out` run at once, and the least time that their steps take."""

    tokens_in: int
    tokens_out: int
    num_rows: int  # that the pool holds at their full length, up to max_num_seqs
    decode_step_s: float  # of that many rows, divided among data shards, half way through their output
    decode_bound_by: str  # "memory" or "arithmetic"
    prefill_tokens_per_s: float

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens a second of all rows, prefill and decode together."""
        seconds = self.tokens_out * self.decode_step_s + self.num_rows * self.tokens_in / self.prefill_tokens_per_s
        return self.num_rows * self.tokens_out / seconds if self.num_rows else 0.0


def forecast(layout: Layout, target: Target, *, tokens_in: int, tokens_out: int) -> Forecast:
    """Raises ValueError where such a request is longer than max_model_len."""
    length = tokens_in + tokens_out
    refuse_length(tokens_in, tokens_out, layout.max_model_len)
    ledger, bound = layout.ledger, _Bound(layout=layout, target=target)
    blocks = math.ceil(length / ledger.block_size)
    rows = min(ledger.num_blocks // blocks, layout.num_rows // ledger.num_shards)
    memory_s, arithmetic_s = bound.decode_step_s(rows, context=tokens_in + tokens_out // 2)
    return Forecast(
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        num_rows=rows * ledger.num_shards,
        decode_step_s=max(memory_s, arithmetic_s),
        decode_bound_by="memory" if memory_s >= arithmetic_s else "arithmetic",
        prefill_tokens_per_s=ledger.num_shards / bound.token_s(context=tokens_in // 2),
    )


def least_time_s(layout: Layout, target: Target, *, tokens_in: int, tokens_out: int) -> float:
    """The least seconds of a job that computes `tokens_in` and generates `tokens_out` tokens, whatever its rows are.

    The bounds of `forecast` over contexts of no token, which leave out attention and the KV cache, with all rows in
    every decode step.
    """
    bound, rows, shards = _Bound(layout=layout, target=target), layout.num_rows, layout.ledger.num_shards
    prefill_s = tokens_in * bound.token_s(context=0) / shards
    return prefill_s + tokens_out / rows * max(bound.decode_step_s(rows // shards, context=0))


def refuse_length(tokens_in: int, tokens_out: int, max_model_len: int) -> None:
    """Raises ValueError where such a request is longer than max_model_len."""
    length = tokens_in + tokens_out
    if length > max_model_len:
        raise ValueError(
            f"{tokens_in} tokens in and {tokens_out} out are {length}, more than max_model_len, {max_model_len}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bound:
    """The least that steps take on a device of a data shard. context: tokens that a token attends to."""

    layout: Layout
    target: Target

    def token_s(self, *, context: int) -> float:
        """The arithmetic of one token: two operations for each weight that it meets, and its attention."""
        options = self.layout.options
        attention = _attention_operations(options.local, context)
        return (2 * _active_weights(self.layout) + attention) / self.target.flops_per_s

    def decode_step_s(self, rows: int, *, context: int) -> tuple[float, float]:
        """Reading weights and contexts, and the arithmetic, of a token of each of so many rows."""
        read = _weight_bytes(self.layout, rows) + rows * _context_bytes(self.layout, context)
        return read / self.target.bandwidth_bytes_per_s, rows * self.token_s(context=context)


def _context_bytes(layout: Layout, context: int) -> float:
    """Keys and values that a token of such a context reads on one device; of layers with a window, no more than it."""
    ledger, spec = layout.ledger, layout.options.spec
    groups = zip(spec.kv_groups, ledger.groups, strict=True)
    return (
        sum(min(context, group.window or context) * blocks.block_bytes for group, blocks in groups) / ledger.block_size
    )


def _weight_bytes(layout: Layout, rows: int) -> float:
    """Bytes of the weights on one device that a step of `rows` rows in each data shard reads."""
    spec = layout.options.spec
    rows *= layout.options.expert_shards.size
    chosen = 1 - (1 - spec.experts.chosen_share) ** rows if spec.experts else 1.0
    return sum(
        local_bytes(weight) * (chosen if ".experts." in name else 1.0)
        for name, weight in layout.decoder_targets.items()
        if not _only_looked_up(name, spec)
    )


def _active_weights(layout: Layout) -> float:
    """Weights on one device that a token is multiplied with, as many of each data shard as of its own."""
    spec = layout.options.spec
    share = spec.experts.chosen_share * layout.options.expert_shards.size if spec.experts else 1.0
    return sum(
        local_bytes(weight) / weight.dtype.itemsize * (share if ".experts." in name else 1.0)
        for name, weight in layout.decoder_targets.items()
        if not _only_looked_up(name, spec)
    )


def _only_looked_up(name: str, spec: ModelSpec) -> bool:
    """Whether a step reads some rows of a weight, and not all of it."""
    return name == "layer_inputs.embed" or (name == "embed.weight" and not spec.tie_word_embeddings)


def _attention_operations(local: ModelSpec, context: int) -> float:
    """Operations of one token on one device, over `context` tokens. local: the spec with that device's heads."""
    attending = ((local.attention_of(layer), local.window_of(layer)) for layer in local.attention_layers)
    return sum(
        2.0 * min(context, window or context) * own.num_attention_heads * sum(own.dot_sizes)
        for own, window in attending
    )
