"""Forecast: what an engine would hold and how long its steps would take, from shapes and a target's data sheet.

    decode step  = max(bytes read / bandwidth, operations / peak) + bytes sent / links
    prefill rate = data shards / (operations of a token / peak + bytes that it sends / links)

Bytes read are those of the weights once and of the keys and values of R rows. Bytes sent are those of the collectives
between devices, for which a step's layers wait; `collectives.py` counts them.
It is a bound that no engine of this kind passes, not a measurement: launches, the start of a collective and what
kernels do not overlap are not in it. A step of R rows reads the experts that are likely to be chosen,
E (1 - (1 - X/E)^R).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax

from ferrum_jax.models.sharding import local_bytes
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.planning.meshes.collectives import Sent, sent_by_step, sent_by_token
from ferrum_jax.runtime.layout import Layout
from pallas_kernels.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a request in and out; None takes what the model has room for: 1,024 and 256 where it can.

    Raises ValueError for a number below 1.
    """

    tokens_in: int | None = None
    tokens_out: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens_in", "tokens_out"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < 1:
                raise ValueError(f"{name} is {tokens}; it must be 1 or more")

    def within(self, max_model_len: int) -> tuple[int, int]:
        """Both as numbers. Only what was left open is made to fit."""
        out = min(256, max_model_len // 5) if self.tokens_out is None else self.tokens_out
        room = max(max_model_len - out, 1)
        return (min(1024, room) if self.tokens_in is None else self.tokens_in), out


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """The least seconds of a step, by what takes them. Reading and arithmetic go on together; collectives wait."""

    weights_s: float  # reading them
    contexts_s: float  # reading keys and values
    arithmetic_s: float
    collectives_s: float  # of the layers and the logits
    experts_s: float  # collectives that bring tokens to experts and back

    @property
    def memory_s(self) -> float:
        return self.weights_s + self.contexts_s

    @property
    def total_s(self) -> float:
        return max(self.memory_s, self.arithmetic_s) + self.collectives_s + self.experts_s

    @property
    def bound_by(self) -> str:
        """The longest part: "memory", "arithmetic" or "collectives"."""
        sent = self.collectives_s + self.experts_s
        found = {"memory": self.memory_s, "arithmetic": self.arithmetic_s, "collectives": sent}
        return max(found, key=lambda name: found[name])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """How many requests of `tokens_in` and `tokens_out` run at once, and the least time that their steps take.

    limited_by: what more of, or less of, would raise the output most: "rows" (max_num_seqs) or "pool" where reading the
    weights takes most of the time, which more rows would share; "contexts", "arithmetic", "prefill", "collectives", or
    "experts", whose collectives they are. prefill_share: of the time.
    """

    tokens_in: int
    tokens_out: int
    num_rows: int  # that the pool holds at their full length, up to max_num_seqs
    pool_rows: int  # that the pool holds, whatever max_num_seqs is
    decode: StepTime  # of that many rows, divided among data shards, half way through their output
    decode_step_s: float
    decode_bound_by: str  # "memory", "arithmetic" or "collectives"
    prefill_tokens_per_s: float
    prefill_share: float
    limited_by: str
    output_tokens_per_s: float  # of all rows, prefill and decode together

    unit = "output tokens/s"

    @property
    def rate(self) -> float:
        return self.output_tokens_per_s


def forecast(layout: Layout, target: Target, *, tokens_in: int, tokens_out: int) -> Forecast:
    """Raises ValueError where such a request is longer than max_model_len."""
    length = tokens_in + tokens_out
    refuse_length(tokens_in, tokens_out, layout.max_model_len)
    ledger, bound = layout.ledger, _Bound(layout=layout, target=target)
    blocks, shards = math.ceil(length / ledger.block_size), ledger.num_shards
    there = ledger.num_blocks // blocks
    rows = min(there, layout.num_rows // shards)
    decode = bound.decode_step(rows, context=tokens_in + tokens_out // 2)
    token_s = bound.token_s(context=tokens_in // 2) + bound.token_sent_s
    prefill_s, decode_s = rows * tokens_in * token_s, tokens_out * decode.total_s
    seconds = prefill_s + decode_s
    return Forecast(
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        num_rows=rows * shards,
        pool_rows=there * shards,
        decode=decode,
        decode_step_s=decode.total_s,
        decode_bound_by=decode.bound_by,
        prefill_tokens_per_s=shards / token_s if token_s else math.inf,
        prefill_share=prefill_s / seconds if seconds else 0.0,
        limited_by=_limit(decode, tokens_out, prefill_s, fills_rows=rows < there),
        output_tokens_per_s=rows * shards * tokens_out / seconds if seconds else (math.inf if rows else 0.0),
    )


def _limit(decode: StepTime, tokens_out: int, prefill_s: float, *, fills_rows: bool) -> str:
    """See `Forecast`. fills_rows: the pool holds more rows than run."""
    reads = decode.memory_s >= decode.arithmetic_s
    found = {
        "rows" if fills_rows else "pool": decode.weights_s * reads,
        "contexts": decode.contexts_s * reads,
        "arithmetic": decode.arithmetic_s * (not reads),
        "collectives": decode.collectives_s,
        "experts": decode.experts_s,
    }
    found = {name: tokens_out * seconds for name, seconds in found.items()} | {"prefill": prefill_s}
    return max(found, key=lambda name: found[name])


def least_time_s(layout: Layout, target: Target, *, tokens_in: int, tokens_out: int, num_clips: int = 0) -> float:
    """The least seconds of a job that computes `tokens_in` and generates `tokens_out` tokens, whatever its rows are.

    The bounds of `forecast` over contexts of no token, which leave out attention and the KV cache, with all rows in
    every decode step. num_clips: windows of sounds that layers attend to; each device encodes all of them.
    """
    bound, rows, shards = _Bound(layout=layout, target=target), layout.num_rows, layout.ledger.num_shards
    prefill_s = tokens_in * (bound.token_s(context=0) + bound.token_sent_s) / shards
    decode_s = tokens_out / rows * bound.decode_step(rows // shards, context=0).total_s
    return prefill_s + decode_s + num_clips * _clip_operations(layout) / target.flops_per_s


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

    @property
    def token_sent_s(self) -> float:
        """The collectives of one token of a prompt."""
        sent = sent_by_token(self.layout)
        return (sent.layers + sent.experts) / self.target.link_bytes_per_s

    def decode_step(self, rows: int, *, context: int) -> StepTime:
        """The time of a token of each of so many rows."""
        sent: Sent = sent_by_step(self.layout, rows)
        bandwidth, links = self.target.bandwidth_bytes_per_s, self.target.link_bytes_per_s
        return StepTime(
            weights_s=_weight_bytes(self.layout, rows) / bandwidth,
            contexts_s=rows * _context_bytes(self.layout, context) / bandwidth,
            arithmetic_s=rows * self.token_s(context=context),
            collectives_s=sent.layers / links,
            experts_s=sent.experts / links,
        )


def _context_bytes(layout: Layout, context: int) -> float:
    """Keys and values that a token of such a context reads on one device, and keys of indexers.

    Layers with a window read no more than it, those with an indexer no more than it chooses, of all its own keys; but
    over latents a TPU's kernel reads all and hides the others. Layers that attend to a clip read all of it.
    """
    ledger, spec = layout.ledger, layout.options.spec
    total = 0.0
    for group, blocks in zip(spec.kv_groups, ledger.groups, strict=True):
        seen, pools = min(context, group.window or context), [layout.pools.kv[layer] for layer in group.layers]
        top_k = min((own.top_k for own in map(spec.indexer_of, group.layers) if own), default=seen)
        hides = layout.options.implementation == "mosaic_tpu" and any(pool and pool.is_latent for pool in pools)
        if seen > top_k and not hides:
            index_keys = sum(local_bytes(pool.index_keys) for pool in pools if pool and pool.index_keys is not None)
            share = index_keys / sum(local_bytes(array) for array in jax.tree.leaves(pools))
            seen = seen * share + top_k * (1 - share)
        total += seen * blocks.block_bytes
    return total / ledger.block_size + (0 if layout.images is None else layout.images.read_bytes)


def _weight_bytes(layout: Layout, rows: int) -> float:
    """Bytes of the weights on one device that a step of `rows` rows in each data shard reads."""
    spec = layout.options.spec
    rows *= layout.options.expert_shards.size
    chosen = 1 - (1 - spec.experts.chosen_share) ** rows if spec.experts else 1.0
    return sum(local_bytes(weight) * share for weight, share in _whole_weights(layout, chosen))


def _active_weights(layout: Layout) -> float:
    """Weights on one device that a token is multiplied with, as many of each data shard as of its own."""
    spec = layout.options.spec
    share = spec.experts.chosen_share * layout.options.expert_shards.size if spec.experts else 1.0
    weights = _whole_weights(layout, share)
    return sum(local_bytes(weight) / weight.dtype.itemsize * share for weight, share in weights)


def _whole_weights(layout: Layout, of_experts: float) -> Iterator[tuple[Any, float]]:
    """Each weight that a step reads whole, not some of its rows, with the share that it reads of experts' ones."""
    for name, weight in layout.decoder_targets.items():
        is_table = name == "embed.weight" and not layout.options.spec.tie_word_embeddings
        if name != "layer_inputs.embed" and not is_table:
            yield weight, of_experts if ".experts." in name else 1.0


def _clip_operations(layout: Layout) -> float:
    """Operations of a clip's encoder on one device: two at each position for each weight of a product."""
    sound = layout.spec.sound
    if layout.images is None or sound is None:
        return 0.0
    weights = layout.images.weights.items()
    products = [w for name, w in weights if w.ndim > 1 and not name.endswith("positions.weight")]
    return 2.0 * sound.num_positions * sum(local_bytes(weight) / weight.dtype.itemsize for weight in products)


def _attention_operations(local: ModelSpec, context: int) -> float:
    """Operations of one token on one device, over `context` tokens. local: the spec with that device's heads."""
    total = 0.0
    for layer in local.attention_layers:
        own, indexer = local.attention_of(layer), local.indexer_of(layer)
        seen = min(context, local.window_of(layer) or context)
        if indexer is not None and seen > indexer.top_k:
            total += 0.0 if indexer.shared else 2.0 * seen * indexer.num_heads * indexer.head_dim
            seen = indexer.top_k
        total += 2.0 * seen * own.num_attention_heads * sum(own.dot_sizes)
    for layer in local.cross_layers:
        own, sound = local.attention_of(layer), local.sound
        assert sound is not None, "layers attend to a clip"
        total += 2.0 * sound.num_positions * own.num_attention_heads * sum(own.dot_sizes)
    return total
