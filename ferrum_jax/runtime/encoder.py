"""Encoders on the device: whole texts in rows of one length, pooled to one vector each. No pool, no plan, no cache.

A bucket is (R rows, S tokens a row); all are listed by `encoder_buckets` and compiled before the first step. A
text's bucket length follows from its own length alone, and every bucket has at least FEWEST_TOKENS, so neither the
texts beside it nor the number of rows change a bit of its vector on the CPU in float32.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ferrum_jax.config import EngineConfig
from ferrum_jax.ints import ceil_div, round_up
from ferrum_jax.models import registry
from ferrum_jax.models.bert import QUERY_TILE, BertSpec
from ferrum_jax.runtime.store import ExecutableSource

POOLINGS = ("mean", "cls", "last")
SHORTEST = 16  # tokens of the smallest bucket's rows
# XLA:CPU sums a norm's rows in another order below 4,096 elements (jax 0.10.2 and 0.12: 64 rows of 48 differ from 128,
# 64 rows of 64 do not), so 128 tokens suffice from a width of 32 on.
FEWEST_TOKENS = 128
# What an encoder reads of EngineConfig; it has no KV, no sampling and no requests that run on.
_USED = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "invariant", "compilation_cache_dir")


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class EncoderBucket:
    """One compiled shape."""

    length: int  # S
    num_rows: int  # R


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderLayout:
    """All that follows from spec, config and device, before any weight is read."""

    spec: BertSpec
    dtype: jnp.dtype
    max_model_len: int
    graph: nnx.GraphDef
    targets: dict[str, jax.ShapeDtypeStruct]  # in the order of the executables' argument
    buckets: tuple[EncoderBucket, ...]


def lay_out_encoder(
    spec: BertSpec, config: EngineConfig, platform: str, max_seq_length: int | None = None
) -> EncoderLayout:
    """The layout of an encoder. max_seq_length: the checkpoint's own limit, which config.max_model_len may raise.

    Raises ValueError with every reason why it cannot run so.
    """
    auto_dtype = "float32" if platform == "cpu" else spec.dtype
    dtype = jnp.dtype(auto_dtype if config.dtype == "auto" else config.dtype)
    most = spec.max_position_embeddings
    max_model_len = config.max_model_len or min(max_seq_length or most, most)
    reasons = [
        f"{field.name} is {getattr(config, field.name)!r}, which an encoder does not use; leave it out"
        for field in dataclasses.fields(config)
        if field.name not in _USED and getattr(config, field.name) != field.default
    ]
    if max_model_len > most:
        reasons.append(f"max_model_len is {max_model_len}, more than the model's positions, {most}")
    if config.invariant and not (platform == "cpu" and dtype == jnp.float32):
        reasons.append(f"invariant=True holds on the CPU in float32 only; this is {platform} in {dtype.name}")
    if reasons:
        raise ValueError("; ".join(reasons))
    graph, targets = registry.unbind(registry.abstract_encoder(spec, dtype))
    buckets = encoder_buckets(max_model_len, config.max_num_seqs, config.max_num_batched_tokens)
    return EncoderLayout(
        spec=spec, dtype=dtype, max_model_len=max_model_len, graph=graph, targets=targets, buckets=buckets
    )


def encoder_buckets(max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> tuple[EncoderBucket, ...]:
    """Lengths are powers of two up to the limit; of each there is a bucket for many texts and one for few."""
    lengths = [SHORTEST]
    while lengths[-1] < max_model_len:
        lengths.append(2 * lengths[-1])
    lengths[-1] = min(lengths[-1], round_up(max_model_len, SHORTEST if max_model_len <= QUERY_TILE else QUERY_TILE))
    buckets = set()
    for length in lengths:
        few = ceil_div(FEWEST_TOKENS, length)
        many = max(few, min(max_num_seqs, max_num_batched_tokens // length))
        buckets |= {EncoderBucket(length=length, num_rows=few), EncoderBucket(length=length, num_rows=many)}
    return tuple(sorted(buckets))


def make_step(layout: EncoderLayout) -> Callable[[tuple[jax.Array, ...], jax.Array], jax.Array]:
    """(weights, batch [1 + R, 1 + S] int32) -> vectors [R, D] float32.

    batch: row 0 begins with the pooling's index in POOLINGS; each other row is a text's length and its token ids.
    """
    names = tuple(layout.targets)

    def step(weights: tuple[jax.Array, ...], batch: jax.Array) -> jax.Array:
        model = registry.bind(layout.graph, dict(zip(names, weights, strict=True)))
        lengths = batch[1:, 0]
        hidden = model(batch[1:, 1:], lengths).astype(jnp.float32)  # [R, S, D]
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


def compile_encoder(
    layout: EncoderLayout, *, store: ExecutableSource | None, on_done: Callable[[int, int], None]
) -> dict[EncoderBucket, Callable[..., jax.Array]]:
    """The executable of every bucket, from the store or compiled from shapes, in a thread pool."""
    step = jax.jit(make_step(layout))
    weights = tuple(layout.targets.values())

    def get(bucket: EncoderBucket) -> Callable[..., jax.Array]:
        batch = jax.ShapeDtypeStruct((1 + bucket.num_rows, 1 + bucket.length), jnp.int32)

        def compile() -> Callable[..., jax.Array]:
            return step.lower(weights, batch).compile()

        if store is None:
            return compile()
        return store.get(f"encoder {bucket} {layout.spec.digest_text()} {layout.targets}", compile)

    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        jobs = {bucket: threads.submit(get, bucket) for bucket in reversed(layout.buckets)}
        for done, job in enumerate(concurrent.futures.as_completed(jobs.values()), 1):
            job.result()
            on_done(done, len(jobs))
    return {bucket: jobs[bucket].result() for bucket in layout.buckets}


class EncoderRunner:
    """Runs texts through an encoder on one device; one step is in flight while the next is packed."""

    def __init__(
        self, weights: tuple[jax.Array, ...], executables: Mapping[EncoderBucket, Callable[..., jax.Array]]
    ) -> None:
        self._weights = weights
        self.executables = executables
        self.num_steps = 0
        self.num_tokens = 0
        self.num_padded_tokens = 0

    @property
    def num_executables(self) -> int:
        return len(self.executables)

    def run(self, texts: Sequence[Sequence[int]], pooling: str) -> Iterator[tuple[Sequence[int], np.ndarray]]:
        """(which of the texts, their vectors [n, D] float32) of each step; a text comes once, in no order.

        texts: token ids, at least one and at most max_model_len of each.
        """
        in_flight: deque[tuple[Sequence[int], jax.Array]] = deque()
        for bucket, members in self._steps([len(text) for text in texts]):
            batch = np.zeros((1 + bucket.num_rows, 1 + bucket.length), np.int32)
            batch[0, 0] = POOLINGS.index(pooling)
            for row, member in enumerate(members, 1):
                batch[row, 0] = len(texts[member])
                batch[row, 1 : 1 + len(texts[member])] = texts[member]
            vectors = self.executables[bucket](self._weights, batch)
            vectors.copy_to_host_async()
            in_flight.append((members, vectors))
            self.num_steps += 1
            self.num_tokens += int(batch[1:, 0].sum())
            self.num_padded_tokens += bucket.num_rows * bucket.length
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
                bucket = many if 4 * len(members) > many.num_rows else few
                yield bucket, members[: bucket.num_rows]
                members = members[bucket.num_rows :]


def _fetch(members: Sequence[int], vectors: jax.Array) -> tuple[Sequence[int], np.ndarray]:
    return members, np.asarray(vectors)[: len(members)]
