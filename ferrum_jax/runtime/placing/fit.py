"""Fit: the layout of an engine whose KV pool takes what everything else leaves of a device.

What a step needs beside weights and pools is asked of the compiler, by compiling the largest buckets once over a pool
of few blocks: XLA's temporaries do not depend on how many there are. So a device that is not here is fitted as one
that is, and no share of the memory is guessed.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.models.sharding import make_mesh, takes_all_hosts
from ferrum_jax.models.sharding.undivided import refusals
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.runtime.compile.executable_store import ExecutableCache
from ferrum_jax.runtime.distributed.processes import own_device, smallest
from ferrum_jax.runtime.layout import Layout, lay_out
from ferrum_jax.runtime.pools.budget import RESERVED_BYTES
from ferrum_jax.runtime.programs import Part, programs_of
from ferrum_jax.runtime.sample import SCORE_TILE
from ferrum_jax.runtime.settled import Room
from ferrum_jax.runtime.step_options import attention_config
from pallas_kernels.paged_attention import LatentConfig, TpuConfig
from pallas_kernels.target import Target

PROBE_BLOCKS = 16
_MIN_ROWS = 8  # that are chosen here
_GIB = 2**30
# Qwen3-0.6B on v6e: a decode step of 256 rows needs 6.2 arrays of logits, a mixed one of 2,048 tokens 2.8 of 64 rows.
_LOGIT_ARRAYS, _MIN_LOGIT_ROWS, _ACTIVATION_ARRAYS = 7, 64, 2
_GRAIN_BYTES = 256 << 20  # free memory differs a little at each start, and every pool size wants executables of its own


def fit(
    spec: ModelSpec,
    config: EngineConfig,
    mesh: Mesh,
    reach: Reach | None = None,
    room: Room | None = None,
    *,
    temporaries_of: Callable[[Layout], int],
) -> Layout:
    """The layout of an engine: with the blocks or bytes that the config or `room` names, else as many as fit.

    temporaries_of: what a step of a layout needs at most, as `temporaries_bytes` asks the compiler. reach: as in
    `lay_out`; it does not change how many blocks there are, so that jobs share executables. Raises ValueError with
    every reason why the engine cannot run on the mesh, TooSmall where that is its memory. Rows that the config leaves
    open are halved first.
    """
    tried, first = room or Room.of(config), None
    leaves_rows = tried.max_num_seqs is None
    if own_device(mesh).platform == "cpu" or tried.num_blocks is not None or tried.kv_memory_bytes is not None:
        return lay_out(spec, config, mesh, reach, tried)
    while True:
        try:
            return _fill(spec, config, mesh, reach, tried, temporaries_of)
        except TooSmall as small:
            first = first or small
            if not leaves_rows or small.is_hopeless:
                raise first from None
            rows = small.num_rows // 2
            why = f"{rows} rows run at once: {first.num_rows} leave no memory for keys and values"
            tried = Room(max_num_seqs=rows, why=why)


def _fill(
    spec: ModelSpec,
    config: EngineConfig,
    mesh: Mesh,
    reach: Reach | None,
    room: Room,
    temporaries_of: Callable[[Layout], int],
) -> Layout:
    """The layout with a pool of all that is left of a device. Raises TooSmall."""
    device = own_device(mesh)
    probe = lay_out(spec, config, mesh, room=dataclasses.replace(room, num_blocks=PROBE_BLOCKS))
    memory = smallest(available_bytes(device))
    kv_bytes_left(probe, memory, 0)  # whose weights alone do not fit is told so before minutes of compiling
    temporaries = temporaries_of(probe)
    left = kv_bytes_left(probe, memory, temporaries)
    left = left // _GRAIN_BYTES * _GRAIN_BYTES or left
    layout = lay_out(spec, config, mesh, reach, dataclasses.replace(room, kv_memory_bytes=left))
    return with_temporaries(layout, temporaries)


def probe_room(config: EngineConfig) -> Room:
    """Room for a layout that is only looked at."""
    return Room(max_num_seqs=config.max_num_seqs, num_blocks=PROBE_BLOCKS)


class TooSmall(ValueError):
    """A device's memory does not hold weights, a step and a KV block. what: without advice. num_rows: of a shard."""

    def __init__(self, what: str, missing_bytes: int, weights_bytes: int, memory_bytes: int, num_rows: int) -> None:
        advice = "take more devices along tp, or lower max_num_batched_tokens or max_num_seqs"
        super().__init__(f"{what}; {advice}")
        self.what, self.missing_bytes = what, missing_bytes
        self.weights_bytes, self.memory_bytes, self.num_rows = weights_bytes, memory_bytes, num_rows

    @property
    def is_hopeless(self) -> bool:
        """Whether fewer rows would not do: the weights alone are too many, or the rows as few as is worth it."""
        return self.weights_bytes >= self.memory_bytes or self.num_rows < 2 * _MIN_ROWS


def kv_bytes_left(layout: Layout, memory: int, temporaries: int) -> int:
    """Bytes for the KV pool of a device of so much memory, beside everything else of a layout.

    Raises TooSmall saying by how much it is, if not even one block fits beside the null block.
    """
    ledger = layout.ledger
    left = memory - (ledger.used_bytes - ledger.kv_bytes - ledger.temporaries_bytes) - temporaries
    short = 2 * ledger.block_bytes - left
    if short > 0:
        raise TooSmall(
            f"{short / _GIB:.2f} GiB too small: {memory / _GIB:.2f} GiB for weights of "
            f"{ledger.weights_bytes / _GIB:.2f}, a step of {temporaries / _GIB:.2f}, slots and a KV block",
            short,
            ledger.weights_bytes,
            memory,
            layout.max_num_seqs,
        )
    return left


def changes_that_fit(spec: ModelSpec, config: EngineConfig, devices: Sequence[Any], small: TooSmall) -> list[str]:
    """Settings with which the memory does, each at the value nearest to its own, on the target's devices if possible.

    A step's needs come from shapes. [] if neither a mesh nor a smaller step will do.
    """
    rows = config.rows_on(devices[0].platform)

    def fits(**changes: Any) -> bool:
        changed = dataclasses.replace(config, **changes)
        try:
            fit(spec, changed, make_mesh(changed.mesh_shape, devices), temporaries_of=expected_temporaries)
        except ValueError:
            return False
        return takes_all_hosts(changed.mesh_shape, devices)

    shape, found = config.mesh_shape, []
    wider = (MeshShape(dp=min(shape.dp, len(devices) // tp), tp=tp) for tp in range(shape.tp + 1, len(devices) + 1))
    if nearest := next((mesh for mesh in wider if fits(mesh=str(mesh))), None):
        found.append(f"mesh {nearest}")
    limits = {
        "max_num_seqs": range(1, rows),
        "max_num_batched_tokens": range(rows, config.max_num_batched_tokens),
    }
    for name, values in limits.items():
        if values and fits(**{name: values[0]}):
            count = bisect.bisect_left(values, True, key=lambda value, name=name: not fits(**{name: value}))
            found.append(f"{name}={values[count - 1]}")
    return found or larger_slices(spec, shape, small.weights_bytes, small.missing_bytes)


def larger_slices(spec: ModelSpec, shape: MeshShape, weights_bytes: int, missing_bytes: int) -> list[str]:
    """The least mesh, of more devices than the target has, whose share of the weights leaves enough.

    weights_bytes: on a device of a mesh of this shape, which is too small by missing_bytes.
    """
    for factor in (2, 4, 8, 16, 32, 64):
        mesh = MeshShape(dp=shape.dp, tp=shape.tp * factor)
        saved = weights_bytes - weights_bytes // factor
        if saved >= missing_bytes and not refusals(spec, mesh):
            return [f"mesh {mesh} of a target with {mesh.size} devices"]
    return []


def with_temporaries(layout: Layout, temporaries: int) -> Layout:
    return dataclasses.replace(layout, ledger=dataclasses.replace(layout.ledger, temporaries_bytes=temporaries))


def temporaries_bytes(layout: Layout, executable_cache: ExecutableCache | None) -> int:
    """The most bytes of a step on a device beside its arguments, by the compiler's own analysis of the largest.

    A tile of prompt scores is one of them where it has more logits than all rows have.
    """
    programs = programs_of(layout)
    parts: list[Part] = [*layout.ladder.largest_parts]
    rows = ceil_div(layout.ladder.row_buckets[-1].num_rows, layout.options.shards.size)
    parts += ["score"] if rows < SCORE_TILE else []
    parts += [] if layout.images is None else [*layout.images.largest_parts]
    return max(temporaries_in(programs[part].get(executable_cache).result()) for part in parts)


def expected_temporaries(layout: Layout) -> int:
    """The most bytes that a step should need on a device beside its arguments, by shapes alone.

    That is the logits of all rows of a decode step, several times over, and activations of a layer. It is for who
    compiles the largest steps anyway, and looks then whether they need more.
    """
    spec, tp = layout.options.spec, layout.options.shards.size
    rows = max([bucket.num_rows for bucket in layout.ladder.buckets if bucket.decode_only], default=0)
    logits = 4 * spec.vocab_size * max(ceil_div(rows, tp), _MIN_LOGIT_ROWS)
    own = layout.options.local.attention
    heads = own.num_attention_heads + 2 * spec.attention.num_key_value_heads
    mlp = max(each.intermediate_size for each in (spec.mlp, *(own for _, own in spec.other_mlp)))
    inputs = 0 if spec.layer_inputs is None else spec.num_hidden_layers * spec.layer_inputs.size
    widths = spec.hidden_size + heads * own.head_dim + max(mlp, inputs)
    return _LOGIT_ARRAYS * logits + _ACTIVATION_ARRAYS * 4 * widths * layout.ladder.buckets[-1].num_tokens


def temporaries_in(executable: Any) -> int:
    """An executable's bytes on a device beside its arguments, by the compiler's own analysis."""
    memory = executable.memory_analysis()
    return memory.temp_size_in_bytes + max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)


def available_bytes(device: Any) -> int:
    """A device's bytes for weights, pools and steps: the free ones if it is here, else all but a reserve."""
    try:
        stats = device.memory_stats()
    except jax.errors.JaxRuntimeError:  # it is known by description only
        return Target.of_device(device).memory_bytes - RESERVED_BYTES
    if not stats:
        raise ValueError(f"{device} does not say how much memory it has; set kv_memory_bytes")
    return stats["bytes_limit"] - stats["bytes_in_use"] - RESERVED_BYTES


def missing_bytes(layout: Layout, device: Any) -> int:
    """By how much an accelerator that holds the weights is too full for pools and the largest steps; 0 or less fits."""
    stats = device.memory_stats() if device.platform != "cpu" else None  # the CPU's pool takes a share of what is free
    if not stats:
        return 0
    return layout.ledger.used_bytes - layout.ledger.weights_bytes - (stats["bytes_limit"] - stats["bytes_in_use"])


def refuse_overfull(layout: Layout) -> None:
    """Raises ValueError where a pool whose size was named is more than its device has beside everything else."""
    ledger, target = layout.ledger, layout.options.target
    if target.platform == "cpu":
        return
    memory = target.memory_bytes - RESERVED_BYTES
    left = memory - (ledger.used_bytes - ledger.kv_bytes)
    if ledger.kv_bytes > left:
        raise ValueError(
            f"a KV pool of {ledger.num_blocks:,} blocks takes {ledger.kv_bytes / _GIB:.2f} GiB, and beside weights of "
            f"{ledger.weights_bytes / _GIB:.2f}, a step of {ledger.temporaries_bytes / _GIB:.2f} and slots "
            f"{max(left, 0) / _GIB:.2f} of {memory / _GIB:.2f} are left; set kv_memory_bytes to at most "
            f"{max(left, 0)}, or leave out what names its size"
        )


def scalar_bytes(layout: Layout) -> tuple[int, int] | None:
    """(taken, there) of a TPU's scalar memory, of the largest bucket; None where attention needs none."""
    bucket, options = layout.ladder.buckets[-1], layout.options
    taken = 0
    for layer in (group.layers[0] for group in options.spec.kv_groups):
        pool = jax.tree.map(_on_one_device, layout.pools.kv[layer])
        config = attention_config(bucket, options, pool, options.local.attention_of(layer).num_attention_heads)
        if not isinstance(config, TpuConfig | LatentConfig):
            return None
        taken = max(taken, config.scalar_bytes(bucket.num_tokens, bucket.num_rows, bucket.table_width))
    assert options.target.smem_bytes is not None, "a TPU target has it"
    return taken, options.target.smem_bytes


def _on_one_device(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    assert array.sharding is not None
    return jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)
