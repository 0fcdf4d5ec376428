"""Encoders on the device: whole texts in rows of one length, pooled to one vector each. No pool, no plan, no cache.

A bucket is (R rows, S tokens a row); all are listed by `encoder_buckets` and compiled before the first step. A
text's bucket length follows from its own length alone, so in invariant mode neither the texts beside it nor the number
of rows change a bit of its vector. On a mesh each data shard has R rows of its own, and the devices of a shard some
heads each.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ferrum_jax.config import MANY_ROWS, EngineConfig
from ferrum_jax.executables.deferred import Prepared
from ferrum_jax.executables.executable_store import ExecutableCache
from ferrum_jax.ints import ceil_div, round_up
from ferrum_jax.models import registry
from ferrum_jax.models.bert import QUERY_TILE, BertSpec
from ferrum_jax.runtime.compile import Program, make_all
from ferrum_jax.runtime.invariance import COMPILER_OPTIONS
from ferrum_jax.runtime.layout import ModelLayout
from ferrum_jax.runtime.resolve import resolve_dtype, shared_refusals
from ferrum_jax.sharding import (
    describe,
    encoder_refusals,
    on_mesh,
    partition,
    partitions,
    shard_model,
    shards_of,
)

POOLINGS = ("mean", "cls", "last")
SHORTEST = 16  # tokens of the smallest bucket's rows
FEWEST_TOKENS = 128
_INVARIANT_ROWS = 2  # XLA:CPU takes other dots for the attention of one row
# What an encoder reads of EngineConfig; it has no KV, no sampling and no requests that run on.
_USED = (
    *("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("invariant", "mesh", "compilation_cache_dir", "ready"),
)


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class EncoderBucket:
    """One compiled shape: of a data shard."""

    length: int  # S
    num_rows: int  # R

    def __str__(self) -> str:
        return f"encoder R={self.num_rows} S={self.length}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderLayout(ModelLayout):
    """All that follows from spec, config and devices, before any weight is read."""

    spec: BertSpec
    buckets: tuple[EncoderBucket, ...]
    invariant: bool


def lay_out_encoder(
    spec: BertSpec, config: EngineConfig, mesh: Mesh, max_seq_length: int | None = None
) -> EncoderLayout:
    """The layout of an encoder. max_seq_length: the checkpoint's own limit, which config.max_model_len may raise.

    mesh: of config.mesh. Raises ValueError with every reason why it cannot run so.
    """
    platform, shape = mesh.devices.flat[0].platform, config.mesh_shape
    dtype = resolve_dtype(config, platform, spec.dtype)
    most = spec.max_position_embeddings
    max_model_len = config.max_model_len or min(max_seq_length or most, most)
    reasons = [
        f"{field.name} is {getattr(config, field.name)!r}, which an encoder does not use; leave it out"
        for field in dataclasses.fields(config)
        if field.name not in _USED and getattr(config, field.name) != field.default
    ]
    reasons += shared_refusals(config, platform, dtype, max_model_len, most)
    reasons += encoder_refusals(spec.num_attention_heads, spec.intermediate_size, shape)
    if reasons:
        raise ValueError("; ".join(reasons))
    graph, parameters = registry.unbind(registry.abstract_encoder(spec, dtype))
    buckets = encoder_buckets(
        max_model_len,
        config.with_rows(MANY_ROWS).num_rows,
        config.max_num_batched_tokens,
        invariant=config.invariant,
    )
    return EncoderLayout(
        spec=spec,
        dtype=dtype,
        max_model_len=max_model_len,
        graph=graph,
        mesh=mesh,
        model=shard_model(lambda _: spec, parameters, mesh, shape),
        buckets=buckets,
        invariant=config.invariant,
    )


def encoder_buckets(
    max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int, *, invariant: bool = False
) -> tuple[EncoderBucket, ...]:
    """Lengths are powers of two up to the limit; of each there is a bucket for many texts and one for few."""
    lengths = [SHORTEST]
    while lengths[-1] < max_model_len:
        lengths.append(2 * lengths[-1])
    lengths[-1] = min(lengths[-1], round_up(max_model_len, SHORTEST if max_model_len <= QUERY_TILE else QUERY_TILE))
    buckets = set()
    for length in lengths:
        few = max(ceil_div(FEWEST_TOKENS, length), _INVARIANT_ROWS if invariant else 1)
        many = max(few, min(max_num_seqs, max_num_batched_tokens // length))
        buckets |= {EncoderBucket(length=length, num_rows=few), EncoderBucket(length=length, num_rows=many)}
    return tuple(sorted(buckets))


def make_step(layout: EncoderLayout) -> Callable[[tuple[jax.Array, ...], jax.Array], jax.Array]:
    """(weights, batch [1 + R, 1 + S] int32) -> vectors [R, D] float32, of each data shard.

    batch: row 0 begins with the pooling's index in POOLINGS; each other row is a text's length and its token ids.
    """
    names, shards = tuple(layout.targets), shards_of(layout.mesh)

    def step(weights: tuple[jax.Array, ...], batch: jax.Array) -> jax.Array:
        model = registry.bind(layout.graph, dict(zip(names, weights, strict=True)))
        lengths = batch[1:, 0]
        hidden = model(batch[1:, 1:], lengths, shards).astype(jnp.float32)  # [R, S, D]
        return pool(hidden, lengths, batch[0, 0])

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
    step = make_step(layout)
    if mesh.size > 1:
        rows = partition("rows", None)
        step = jax.shard_map(step, mesh=mesh, in_specs=(partitions(weights), rows), out_specs=rows, check_vma=False)
    jitted = jax.jit(step, compiler_options=COMPILER_OPTIONS if layout.invariant else None)

    def trace(bucket: EncoderBucket) -> jax.stages.Traced:
        return jitted.trace(weights, on_mesh(mesh, (1 + bucket.num_rows, 1 + bucket.length), jnp.int32, "rows", None))

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


class EncoderRunner:
    """Runs texts through an encoder; one step is in flight while the next is packed."""

    def __init__(
        self,
        weights: tuple[jax.Array, ...],
        executables: Prepared[EncoderBucket],
        num_shards: int = 1,
    ) -> None:
        self.weights = weights
        self.executables = executables
        self._num_shards = num_shards
        self.num_steps = 0
        self.num_tokens = 0
        self.num_padded_tokens = 0

    @property
    def num_missing(self) -> int:
        """Executables that are still being compiled: all are made before the first text."""
        return 0

    @property
    def num_executables(self) -> int:
        return len(self.executables)

    @property
    def num_loaded(self) -> int:
        return self.executables.num_loaded

    def run(self, texts: Sequence[Sequence[int]], pooling: str) -> Iterator[tuple[Sequence[int], np.ndarray]]:
        """(which of the texts, their vectors [n, D] float32) of each step; a text comes once, in no order.

        texts: token ids, at least one and at most max_model_len of each.
        """
        in_flight: deque[tuple[Sequence[int], jax.Array]] = deque()
        for bucket, members in self._steps([len(text) for text in texts]):
            batch = np.zeros((self._num_shards, 1 + bucket.num_rows, 1 + bucket.length), np.int32)
            batch[:, 0, 0] = POOLINGS.index(pooling)
            for place, member in enumerate(members):
                row = batch[place // bucket.num_rows, 1 + place % bucket.num_rows]
                row[0] = len(texts[member])
                row[1 : 1 + len(texts[member])] = texts[member]
            vectors = self.executables[bucket](self.weights, batch.reshape(-1, 1 + bucket.length))
            vectors.copy_to_host_async()
            in_flight.append((members, vectors))
            self.num_steps += 1
            self.num_tokens += int(batch[:, 1:, 0].sum())
            self.num_padded_tokens += self._num_shards * bucket.num_rows * bucket.length
            if len(in_flight) > 1:
                yield _fetch(*in_flight.popleft())
        while in_flight:
            yield _fetch(*in_flight.popleft())

    def _steps(self, lengths: Sequence[int]) -> Iterator[tuple[EncoderBucket, Sequence[int]]]:
        """Texts by the bucket length that is theirs; many rows at once, or few at a time where that pads less."""
        by_length: dict[int, list[EncoderBucket]] = {}
        for bucket in self.executables:
            by_length.setdefault(bucket.length, []).append(bucket)
        shortest = 0
        for length, buckets in sorted(by_length.items()):
            members = [i for i, n in enumerate(lengths) if shortest < n <= length]
            shortest = length
            few, many = min(buckets), max(buckets)
            while members:
                bucket = many if 4 * len(members) > self._num_shards * many.num_rows else few
                count = self._num_shards * bucket.num_rows
                yield bucket, members[:count]
                members = members[count:]


def _fetch(members: Sequence[int], vectors: jax.Array) -> tuple[Sequence[int], np.ndarray]:
    return members, np.asarray(vectors)[: len(members)]
