"""One decode step of one model, divided among devices in four forms.

    single       the engine's step on one device
    pmap         `jax.pmap` of that step: whole replicas, each with a part of the rows (jax makes it of shard_map)
    jit          the whole model's step under `jit` with NamedSharding: XLA's partitioner divides it
    shard_map    the engine's step: each device's program, with the collectives that stand in the code

A step is the engine's two halves, forward and sample, here in one program.
Weights, cached keys and values, token ids and positions are the same in all forms, so the tokens drawn are too. A row
has `context` tokens; its step computes one more. Every block of the pool has the same random content.
"""

import dataclasses
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints.placement import place
from ferrum_jax.config import EngineConfig
from ferrum_jax.core.plan import ShardPlan
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.sharding import formats, make_mesh, on_mesh, partition, partitions
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.runtime import sampling
from ferrum_jax.runtime.buckets import Bucket
from ferrum_jax.runtime.inputs import forward_words, pack_forward, pack_sample, sample_words, unpack_forward
from ferrum_jax.runtime.layout import Layout, lay_out
from ferrum_jax.runtime.sample import make_sample
from ferrum_jax.runtime.step import make_forward
from ferrum_jax.runtime.step_options import compiler_options
from ferrum_jax.sampling_params import SamplingParams
from scripts.shapes import random_weight

FORMS = ("single", "pmap", "jit", "shard_map")
_DONATED = (1, 2, 3, 4)  # kv, slots, prompts, hidden of a step's arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The same for every form. rows: of all devices together. context: tokens that each has already."""

    spec: ModelSpec
    rows: int
    context: int
    dtype: str
    implementation: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A form, ready to be compiled. make(): arguments on the devices, weights first; read(results): [rows] tokens."""

    form: str
    mesh: MeshShape
    compile: Callable[[], Any]
    make: Callable[[], tuple[Any, ...]]
    read: Callable[[Any], np.ndarray]


def program(form: str, shape: MeshShape, work: Workload, devices: Sequence[Any]) -> Program:
    """Raises ValueError where the rows or the model cannot be divided so."""
    shards = {"single": 1, "pmap": shape.size}.get(form, shape.dp)
    if work.rows % shards:
        raise ValueError(f"{work.rows} rows cannot be divided among {shards} shards; choose another --rows")
    if form == "single" or form == "shard_map":
        return _engine_step(form, MeshShape() if form == "single" else shape, work, devices)
    return _pmap(shape, work, devices) if form == "pmap" else _jit(shape, work, devices)


def _layout(work: Workload, rows: int, shape: MeshShape, devices: Sequence[Any], implementation: str | None) -> Layout:
    config = EngineConfig(
        dtype=work.dtype,
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows, 16),
        max_model_len=work.context + 16,
        num_blocks=rows * (-(-(work.context + 1) // 16) + 1),
        block_size=16,
        max_cached_prompts=0,
        mesh=str(shape),
        implementation=implementation,
    )
    return lay_out(work.spec, config, make_mesh(shape, devices))


def _bucket(layout: Layout, rows: int) -> Bucket:
    width = next(bucket.table_width for bucket in layout.ladder.buckets)
    return Bucket(num_tokens=rows, num_rows=rows, table_width=width, decode_only=True)


def _engine_step(form: str, shape: MeshShape, work: Workload, devices: Sequence[Any]) -> Program:
    rows = work.rows // shape.dp
    layout = _layout(work, rows, shape, devices, work.implementation)
    bucket = _bucket(layout, rows)

    def compiled() -> Any:
        mesh, step = layout.mesh, _make_step(layout, bucket)
        arguments = (*_shapes(layout, bucket)[:-1], on_mesh(mesh, (_words(layout, bucket),), jnp.int32, "words"))
        if mesh.size > 1:
            specs = partitions(arguments)
            results = (*specs[1:5], partition("rows", None))
            step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
        placed = (formats(arguments[1]), None, None, None, None)
        options = compiler_options(layout.options)
        jitted = jax.jit(step, donate_argnums=_DONATED, out_shardings=placed, compiler_options=options)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jitted.trace(*arguments).lower(lowering_platforms=(_platform(devices),)).compile()

    def make() -> tuple[Any, ...]:
        pools = layout.pools
        kv = [_blocks(array) for array in pools.flat_caches()]
        slots = jax.device_put(_slots(work, rows, shape.dp, pools.slots.shape[1]), pools.slots.sharding)
        prompts, hidden = (
            jax.device_put(np.zeros(a.shape, a.dtype), a.sharding) for a in (pools.prompts, pools.hidden)
        )
        return (
            _weights(layout),
            tuple(kv),
            slots,
            prompts,
            hidden,
            _blobs(work, rows, shape.dp, layout, bucket),
        )

    return Program(form=form, mesh=shape, compile=compiled, make=make, read=_tokens)


def _pmap(shape: MeshShape, work: Workload, devices: Sequence[Any]) -> Program:
    """Replicas, one on each device; every argument has them as its first axis."""
    n, rows = shape.size, work.rows // shape.size
    layout = _layout(work, rows, MeshShape(), devices, work.implementation)
    bucket = _bucket(layout, rows)
    step = _make_step(layout, bucket)
    sharding = NamedSharding(Mesh(np.array(devices[:n]), ("replicas",)), PartitionSpec("replicas"))
    arguments = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((n, *a.shape), a.dtype, sharding=sharding), _shapes(layout, bucket)
    )

    def compiled() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it is here to be compared with
            mapped = jax.pmap(step, devices=list(devices[:n]), donate_argnums=_DONATED)
            return mapped.lower(*arguments).compile()

    def make() -> tuple[Any, ...]:
        weights, kv, slots, prompts, hidden, blob = arguments
        copies = tuple(
            place([_random(name, array.shape[1:])] * n, array)
            for name, array in zip(layout.targets, weights, strict=True)
        )
        ids = _slots(work, rows, n, slots.shape[2]).reshape(slots.shape)
        blobs = _blobs(work, rows, n, layout, bucket).reshape(blob.shape)
        zeros = (np.zeros(a.shape, a.dtype) for a in (prompts, hidden))
        return copies, tuple(map(_blocks, kv)), *(jax.device_put(a, sharding) for a in (ids, *zeros, blobs))

    return Program(form="pmap", mesh=shape, compile=compiled, make=make, read=_tokens)


def _jit(shape: MeshShape, work: Workload, devices: Sequence[Any]) -> Program:
    """The step of the whole model, once for each data shard by `vmap`; how its parts lie is all that is said."""
    rows = work.rows // shape.dp
    layout = _layout(work, rows, MeshShape(), devices, "xla")  # the partitioner sees into no kernel
    divided = _layout(work, rows, shape, devices, "xla")
    bucket, mesh = _bucket(layout, rows), divided.mesh
    step = _make_step(layout, bucket)
    by_shard = jax.vmap(step, in_axes=(None, 0, 0, 0, 0, 0))

    def placed(array: jax.ShapeDtypeStruct, *axes: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec("dp", *axes))
        return jax.ShapeDtypeStruct((shape.dp, *array.shape), array.dtype, sharding=sharding)

    weights, kv, *others = _shapes(layout, bucket)
    if any(a.shape != b.shape for a, b in zip(weights, divided.targets.values(), strict=True)):
        raise ValueError(f"{shape} repeats KV heads or pads the vocabulary, which the partitioner is not told")
    arguments = (
        tuple(divided.targets.values()),
        tuple(placed(pool, None, None, "tp") for pool in kv),
        *(placed(array) for array in others),
    )

    def compiled() -> Any:
        results = (*(jax.tree.map(lambda a: a.sharding, part) for part in arguments[1:5]), None)
        jitted = jax.jit(by_shard, donate_argnums=_DONATED, out_shardings=results)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jitted.trace(*arguments).lower(lowering_platforms=(_platform(devices),)).compile()

    def make() -> tuple[Any, ...]:
        _, pools, slots, prompts, hidden, blob = arguments
        ids = _slots(work, rows, shape.dp, slots.shape[2]).reshape(slots.shape)
        blobs = _blobs(work, rows, shape.dp, layout, bucket).reshape(blob.shape)
        zeros = ((np.zeros(a.shape, a.dtype), a) for a in (prompts, hidden))
        rest = ((ids, slots), *zeros, (blobs, blob))
        return _weights(divided), tuple(map(_blocks, pools)), *(jax.device_put(a, to.sharding) for a, to in rest)

    return Program(form="jit", mesh=shape, compile=compiled, make=make, read=_tokens)


# -- arrays ------------------------------------------------------------------------------------------------


def _make_step(layout: Layout, bucket: Bucket) -> Callable[..., Any]:
    """Both halves of a step: weights, kv, slots, prompts, hidden, packed inputs to kv, slots, prompts, hidden, rows."""
    forward = make_forward(layout.graph, tuple(layout.targets), bucket, layout.pools, layout.options)
    sample, head = make_sample(layout.head, bucket.num_rows, layout.options), layout.head
    words, num_groups = _forward_words(layout, bucket), len(layout.options.spec.kv_groups)

    def step(weights: Any, kv: Any, slots: Any, prompts: Any, hidden: Any, blob: Any) -> Any:
        kv, hidden = forward(weights, kv, slots, hidden, unpack_forward(blob[:words], bucket, num_groups))
        masks = jnp.full((1, layout.pools.masks.shape[1]), sampling.ALL, jnp.int32)  # no row has one of its own
        slots, prompts, rows, _ = sample(head.pick(weights), slots, prompts, masks, hidden, blob[words:])
        return kv, slots, prompts, hidden, rows

    return step


def _forward_words(layout: Layout, bucket: Bucket) -> int:
    return forward_words(bucket, len(layout.options.spec.kv_groups))


def _words(layout: Layout, bucket: Bucket) -> int:
    """Words of the packed inputs of both halves, for one data shard."""
    return _forward_words(layout, bucket) + sample_words(bucket.num_rows)


def _shapes(layout: Layout, bucket: Bucket) -> tuple[Any, ...]:
    """The shapes of a step's arguments, on one device."""
    pools = layout.pools
    blob = jax.ShapeDtypeStruct((_words(layout, bucket),), jnp.int32)
    return tuple(layout.targets.values()), pools.flat_caches(), pools.slots, pools.prompts, pools.hidden, blob


def _weights(layout: Layout) -> tuple[jax.Array, ...]:
    """Random ones, by their names alone. Raises ValueError where the mesh wants other shapes than the model has."""
    if layout.model.expansions:
        raise ValueError("this mesh repeats KV heads or pads the vocabulary; name one that divides both")
    return tuple(place([_random(name, target.shape)], target) for name, target in layout.targets.items())


def _random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Equal for equal names."""
    return random_weight(shape, np.random.default_rng(zlib.crc32(name.encode())))


def _blocks(pool: jax.ShapeDtypeStruct) -> jax.Array:
    """A pool in which all blocks are alike: [..., P, C, 2K, H]."""
    block = np.random.default_rng(1).standard_normal(pool.shape[-3:], np.float32)
    content = block.astype(jnp.bfloat16).view(np.uint16) if pool.dtype == np.uint16 else block.astype(pool.dtype)
    return place([np.broadcast_to(content, pool.shape)], pool)


def _tokens(results: Any) -> np.ndarray:
    """[rows]: what a step drew; waits for it."""
    return np.asarray(results[4])[..., 0].ravel()


def _slots(work: Workload, rows: int, shards: int, words: int) -> np.ndarray:
    """[shards * (rows + 1), words]: what each row wants, and its token ids; slot 0 of each shard is null."""
    ids = np.random.default_rng(2).integers(0, work.spec.vocab_size, (work.rows, work.context + 1))
    slots = np.zeros((shards, rows + 1, words), np.int32)
    for row, tokens in enumerate(ids):
        slots[row // rows, 1 + row % rows] = sampling.slot_record(
            SamplingParams(temperature=0.0),
            seed=0,
            choice=0,
            num_prompt_tokens=work.context + 1,
            stop_ids=(),
            token_ids=tokens.tolist(),
            max_model_len=words - sampling.RECORD_WORDS,
        )
    return slots.reshape(-1, words)


def _blobs(work: Workload, rows: int, shards: int, layout: Layout, bucket: Bucket) -> np.ndarray:
    """The packed input of all shards: every row computes its token at position `context`, in blocks of its own."""
    blocks = -(-(work.context + 1) // layout.options.block_size)
    tables = 1 + np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    zeros = np.zeros(rows, np.int32)
    plan = ShardPlan(
        slots=1 + np.arange(rows, dtype=np.int32),
        starts=np.full(rows, work.context, np.int32),
        counts=zeros + 1,
        samples=zeros + 1,
        block_tables=(tables,) * len(layout.options.spec.kv_groups),
        state_slots=zeros,
        source_slots=zeros,
        target_slots=zeros,
        masked=zeros > 0,
        adapter_ids=zeros,
        rope_shifts=zeros,
        clip_slots=zeros,
    )
    halves = np.concatenate([pack_forward((plan,), bucket), pack_sample((plan,), rows)])
    return np.tile(halves, shards)


def _platform(devices: Sequence[Any]) -> str:
    return "cuda" if devices[0].platform == "gpu" else devices[0].platform
