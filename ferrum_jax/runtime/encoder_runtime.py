"""Encoders on the device: whole texts end to end, pooled to one vector each. No pool, no plan, no cache.

A bucket is (S the longest text, R texts, T tokens of all); all are listed by `encoder_buckets` and compiled before the
first step. A text's S follows from its own length alone, so in invariant mode neither the texts beside it nor
their number change a bit of its vector. On a mesh each data shard has texts of its own, and the devices of a shard
some heads each.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ferrum_jax.config import MANY_ROWS, EngineConfig
from ferrum_jax.inputs.sizes.invariance import COMPILER_OPTIONS
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.io.ints import round_up
from ferrum_jax.models.families import registry
from ferrum_jax.models.families.encoder_spec import EncoderSpec
from ferrum_jax.models.layers.text_rows import QUERY_TILE, TextRows
from ferrum_jax.models.sharding import describe, on_mesh, partition, partitions, shard_model
from ferrum_jax.models.sharding.shards import shards_of
from ferrum_jax.models.sharding.undivided import encoder_refusals
from ferrum_jax.runtime.compile.compile import Program, make_all
from ferrum_jax.runtime.compile.deferred import Prepared
from ferrum_jax.runtime.compile.executable_store import ExecutableCache
from ferrum_jax.runtime.layout import ModelLayout
from ferrum_jax.runtime.pools.budget import Ledger
from ferrum_jax.runtime.settled import resolve_dtype, shared_refusals

POOLINGS = ("mean", "cls", "last")
SHORTEST = 16  # tokens of the shortest bucket's texts
MIN_TOKENS = 128
_INVARIANT_TEXTS = 2  # XLA:CPU takes other dots for the attention of one
_TOKENS_ON_CPU = 512  # of a step: a token of a larger one takes as long, and the last step of a length is emptier
# What an encoder reads of EngineConfig; it has no KV, no sampling and no requests that run on. Drafts and the defaults
# of sampling change no vector: jobs and `verify` name them whatever the model is.
_USED = (
    *("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("invariant", "mesh", "compilation_cache_dir", "ready", "speculative_config", "generation_config"),
)


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class EncoderBucket:
    """One compiled shape: of a data shard."""

    length: int  # S
    num_tokens: int  # T
    num_texts: int  # R

    def __str__(self) -> str:
        return f"encoder T={self.num_tokens} R={self.num_texts} S={self.length}"

    @property
    def num_words(self) -> int:
        """int32 words of its batch: how to pool, each text's length and where its second part begins, the token ids."""
        return 1 + 2 * self.num_texts + self.num_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderLayout(ModelLayout):
    """All that follows from spec, config and devices, before any weight is read."""

    spec: EncoderSpec
    buckets: tuple[EncoderBucket, ...]
    invariant: bool


def lay_out_encoder(
    spec: EncoderSpec, config: EngineConfig, mesh: Mesh, max_seq_length: int | None = None
) -> EncoderLayout:
    """The layout of an encoder. max_seq_length: the checkpoint's own limit, which config.max_model_len may raise.

    Raises ValueError with every reason why it cannot run so.
    """
    platform = mesh.devices.flat[0].platform
    shape = MeshShape(**mesh.shape) if config.mesh is None else config.mesh_shape
    dtype = resolve_dtype(config.dtype, platform, spec.dtype)
    most = spec.max_position_embeddings
    max_model_len = config.max_model_len or min(max_seq_length or most, most)
    reasons = [
        f"{field.name} is {getattr(config, field.name)!r}, which an encoder does not use; leave it out"
        for field in dataclasses.fields(config)
        if field.name not in _USED and getattr(config, field.name) != field.default
    ]
    reasons += shared_refusals(
        invariant=config.invariant,
        platform=platform,
        dtype=dtype,
        max_model_len=max_model_len,
        most_positions=most,
    )
    reasons += encoder_refusals(spec.num_attention_heads, spec.intermediate_size, shape)
    if reasons:
        raise ValueError("; ".join(reasons))
    graph, parameters = registry.unbind(registry.abstract_encoder(spec, dtype))
    model, rows = shard_model(lambda _: spec, parameters, mesh, shape), config.rows_or(MANY_ROWS)
    tokens = min(config.max_num_batched_tokens, _TOKENS_ON_CPU) if platform == "cpu" else config.max_num_batched_tokens
    return EncoderLayout(
        spec=spec,
        dtype=dtype,
        max_model_len=max_model_len,
        graph=graph,
        mesh=mesh,
        model=model,
        ledger=Ledger.of_weights(model.weights_bytes),
        buckets=encoder_buckets(max_model_len, rows, tokens, invariant=config.invariant),
        invariant=config.invariant,
        max_num_seqs=rows,
    )


def encoder_buckets(
    max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int, *, invariant: bool = False
) -> tuple[EncoderBucket, ...]:
    """Lengths are powers of two up to the limit; of each there is a bucket for many texts and one for few.

    A bucket has room for texts of two thirds of its length: those that are longer fill its tokens first.
    """
    lengths = [SHORTEST]
    while lengths[-1] < max_model_len:
        lengths.append(2 * lengths[-1])
    lengths[-1] = min(lengths[-1], round_up(max_model_len, SHORTEST if max_model_len <= QUERY_TILE else QUERY_TILE))

    def texts(tokens: int, length: int) -> int:
        return max(3 * tokens // (2 * length), _INVARIANT_TEXTS if invariant else 1)

    buckets = set()
    for length in lengths:
        few = max(MIN_TOKENS, length)
        num_few = texts(few, length)
        num_many = max(num_few, min(texts(max_num_batched_tokens, length), max_num_seqs))
        many = max(few, min(max_num_batched_tokens, num_many * length))
        buckets.add(EncoderBucket(length=length, num_tokens=few, num_texts=num_few))
        buckets.add(EncoderBucket(length=length, num_tokens=many, num_texts=num_many if many > few else num_few))
    return tuple(sorted(buckets))


def make_step(layout: EncoderLayout, bucket: EncoderBucket) -> Callable[[tuple[jax.Array, ...], jax.Array], jax.Array]:
    """(weights, batch [1 + 2R + T] int32) -> vectors [R, D] float32, or logits [R, labels], of each data shard.

    batch: the pooling's index in POOLINGS, the length of each text, where its second part begins (its length where it
    is no pair), the token ids of all, end to end.
    """
    names, shards = tuple(layout.targets), shards_of(layout.mesh)

    def step(weights: tuple[jax.Array, ...], batch: jax.Array) -> jax.Array:
        model = registry.bind(layout.graph, dict(zip(names, weights, strict=True)))
        lengths, seconds = jnp.split(batch[1 : 1 + 2 * bucket.num_texts], 2)
        rows = TextRows(lengths, length=bucket.length, num_tokens=bucket.num_tokens, seconds=seconds)
        hidden = model(batch[1 + 2 * bucket.num_texts :], rows, shards)
        states = pool(rows.spread(hidden).astype(jnp.float32), lengths, batch[0])
        return model.scorer(states.astype(hidden.dtype)).astype(jnp.float32) if layout.spec.labels else states

    return step


def pool(hidden: jax.Array, lengths: jax.Array, pooling: jax.Array) -> jax.Array:  # [R, S, D], [R], [] -> [R, D]
    """One vector for each row: the mean over its real tokens, its first token's or its last one's.

    A matmul whose order does not depend on R, as a sum over S would; of two equal rows, for one row has another form.
    """
    R, S, _ = hidden.shape
    count = jnp.maximum(lengths, 1)[:, None]
    place = jnp.arange(S)[None, :]
    mean = jnp.where(place < count, 1.0 / count.astype(jnp.float32), 0.0)
    one = (place == jnp.where(pooling == 1, 0, count - 1)).astype(jnp.float32)
    weights = jnp.broadcast_to(jnp.where(pooling == 0, mean, one)[:, None], (R, 2, S))
    return jnp.einsum("RTS,RSD->RTD", weights, hidden, precision=jax.lax.Precision.HIGHEST)[:, 0]


def encoder_programs(layout: EncoderLayout) -> dict[EncoderBucket, Program]:
    """The step of every bucket, smallest first."""
    weights, mesh = tuple(layout.targets.values()), layout.mesh
    shapes = f"{dict(mesh.shape)} {layout.spec.digest_text()} {describe(layout.targets)} {layout.invariant}"

    def trace(bucket: EncoderBucket) -> jax.stages.Traced:
        step = make_step(layout, bucket)
        if mesh.size > 1:
            placed = (partitions(weights), partition("words"))
            step = jax.shard_map(step, mesh=mesh, in_specs=placed, out_specs=partition("rows", None), check_vma=False)
        jitted = jax.jit(step, compiler_options=COMPILER_OPTIONS if layout.invariant else None)
        return jitted.trace(weights, on_mesh(mesh, (bucket.num_words,), jnp.int32, "words"))

    return {
        bucket: Program(what=str(bucket), shapes=shapes, mesh=mesh, trace=functools.partial(trace, bucket))
        for bucket in layout.buckets
    }


def compile_encoder(
    layout: EncoderLayout,
    *,
    executable_cache: ExecutableCache | None,
    on_done: Callable[[int, int], None] = lambda *_: None,
    abandoned: threading.Event | None = None,
) -> Prepared[EncoderBucket]:
    """The executable of every bucket; see `make_all`."""
    programs = encoder_programs(layout)
    largest_first = {bucket: programs[bucket] for bucket in reversed(programs)}
    made = make_all(largest_first, programs, executable_cache=executable_cache, on_done=on_done, abandoned=abandoned)
    return Prepared({bucket: made[bucket] for bucket in programs})
