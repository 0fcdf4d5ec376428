"""The check at an engine's start: the attention that its steps would run, against "xla" on the same device.

It runs before weights are read, in a child process where it can, for a kernel may crash or hang. It takes the largest
decode and mixed bucket's own tiles, one device's heads and its form of the pool, with random K and V in few short rows.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.startup.faults import open_devices, spoilt
from ferrum_jax.inputs.sizes.tiles import tiles_text
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.planning.meshes.on_paper import Subject
from ferrum_jax.planning.meshes.settle import choose_mesh
from ferrum_jax.runtime.buckets import Bucket
from ferrum_jax.runtime.compile.verdicts import Verdict, VerdictKey, VerdictStore, entry_of, together
from ferrum_jax.runtime.layout import Layout, lay_out
from ferrum_jax.runtime.placing.fit import probe_room
from ferrum_jax.runtime.step_options import StepOptions, attention_config, implementation_of
from pallas_kernels.fast_compile import FAST_COMPILE
from pallas_kernels.kv_pool import KV_DTYPES, KVPool, pool_shape
from pallas_kernels.paged_attention import LatentConfig, TpuConfig, run_case
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.target import Target
from pallas_kernels.tolerance import difference, tolerance_of

_MAX_CONTEXT, _MAX_CHUNK = 1024, 200  # tokens: the check is to be over in seconds
_MAX_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """For tests, which have no chip: the kernel of this target is interpreted on the CPU. fault: of FAULTS."""

    target: str = "tpu:v5e"
    fault: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOrder:
    """One check's order. implementation: the kernel.

    config: of the layout, which in a rehearsal is that of "xla". num_chips: that this machine shows, from which a mesh
    that config leaves open follows.
    """

    spec: ModelSpec
    config: EngineConfig
    implementation: str
    key: VerdictKey
    num_chips: int = 0
    rehearsal: Rehearsal | None = None


def check_attention(order: AttentionOrder, send: Callable[[Any], None]) -> None:
    """Sends {"verdict": .. or None}, or a reason why nothing was checked: {"closed": ..} where the device cannot be
    opened, {"refused": ..} where the engine cannot run here anyway."""
    fault = None if order.rehearsal is None else order.rehearsal.fault
    try:
        devices = open_devices(fault)
    except Exception as error:  # whatever a plugin raises
        send({"closed": str(error)})
        return
    try:
        layout = probe_layout(order, devices)
    except ValueError as error:
        send({"refused": str(error)})
        return
    send("begun")
    verdict = verdict_of(layout, order)
    send({"verdict": None if verdict is None else dataclasses.asdict(verdict)})


def probe_layout(order: AttentionOrder, devices: Sequence[Any]) -> Layout:
    """The layout whose attention is checked, with few blocks. Raises ValueError where it cannot run here."""
    subject, devices = Subject(spec=order.spec, config=order.config), order.config.among(devices)
    config = subject.with_mesh(choose_mesh(subject, devices).mesh).config
    return lay_out(order.spec, config, make_mesh(config.mesh_shape, devices), room=probe_room(config))


def verdict_of(layout: Layout, order: AttentionOrder) -> Verdict | None:
    """One verdict of all that the layout's steps ask of attention: kept ones, and new ones for the rest."""
    store = VerdictStore(order.config.compilation_cache_dir, order.key)
    fault = order.rehearsal and order.rehearsal.fault
    found = []
    for case, bucket in cases_of(layout):
        options = _options(layout, order.implementation, order.rehearsal)
        if implementation_of(bucket, options, _pool(case, order.implementation)) != order.implementation:
            continue  # XLA computes it
        entry = entry_of("paged_attention", f"{case.dtype}/{case.kv_dtype}", case.shape_class)
        verdict = store.find(entry) if order.rehearsal is None else None
        if verdict is None:
            tiles = next((v.tiles for v in found if v.tiles), None)  # of decode, whose buckets come first
            if tiles is not None and options.tiles is None:
                options = dataclasses.replace(options, tiles=tiles_text(tiles))
            verdict = _compare(case, bucket, options, fault)
            store.keep({entry: verdict})
        found.append(verdict)
    return together(found)


def cases_of(layout: Layout) -> Iterator[tuple[Case, Bucket]]:
    """A case for each kind of bucket and each cache group that the model has, with one device's heads."""
    local, options = layout.options.local, layout.options
    vision = local.vision if local.vision is not None and local.vision.sees_both_ways else None
    kinds = dict.fromkeys(
        (group.window, group.chunked, local.attention_of(group.layers[0])) for group in local.kv_groups
    )
    for bucket in layout.ladder.largest:
        rows = _rows(bucket, options.block_size)
        for window, chunked, own in kinds:
            yield (
                Case(
                    name=str(bucket),
                    rows=rows,
                    num_tokens=bucket.num_tokens,
                    num_rows=bucket.num_rows,
                    num_heads=own.num_attention_heads,
                    num_kv_heads=own.kept.num_kv_heads,
                    head_dim=own.kept.head_dim,
                    v_head_dim=own.v_head_dim,
                    rope_dim=own.kept.v_head_dim if own.kept.is_latent else None,
                    block_size=options.block_size,
                    decode_only=bucket.decode_only,
                    window=window,
                    chunked=chunked,
                    spans=_spans(rows) if vision is not None and vision.sees_whole(window) else (),
                    soft_cap=own.attn_logit_softcapping,
                    has_sinks=own.sinks,
                    scale=own.scale,
                    dtype=layout.dtype.name,
                    kv_dtype=layout.kv_dtype,
                    tiny=True,
                ),
                bucket,
            )


def _rows(bucket: Bucket, block_size: int) -> tuple[tuple[int, int], ...]:
    """Decoding rows of contexts from none to many blocks; or two of them, a chunk that begins and one that goes on."""
    most = min(bucket.table_width * block_size, _MAX_CONTEXT) - 1
    if bucket.decode_only:
        starts = np.unique(np.linspace(0, most, min(bucket.num_rows, _MAX_ROWS)).astype(int))
        return tuple((int(start), 1) for start in starts)
    singles = ((most, 1), (most // 3, 1))[: max(0, min(bucket.num_rows, bucket.num_tokens) - 2)]
    left = bucket.num_tokens - len(singles)
    first = max(1, min(left // 2, _MAX_CHUNK, most))
    second = min(left - first, _MAX_CHUNK, most - most // 4)
    chunks = ((0, first), (most // 4, second))
    return (*singles, *chunks[: 2 if second and bucket.num_rows > 1 else 1])


def _spans(rows: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """The second half of each chunk, as an image."""
    return tuple((r, start + count // 2, start + count) for r, (start, count) in enumerate(rows) if count > 1)


def _options(layout: Layout, implementation: str, rehearsal: Rehearsal | None) -> StepOptions:
    target = layout.options.target if rehearsal is None else Target.named(rehearsal.target)
    return dataclasses.replace(layout.options, implementation=implementation, target=target)


def _compare(case: Case, bucket: Bucket, options: StepOptions, fault: str | None) -> Verdict:
    """The kernel's verdict by this case. Raises what the compiler or the runtime does."""
    out = {
        name: _attend(case, bucket, dataclasses.replace(options, implementation=name), fault if name != "xla" else None)
        for name in ("xla", options.implementation)
    }
    num_real = sum(count for _, count in case.rows)
    found, expected = (out[name][:num_real] for name in (options.implementation, "xla"))
    tolerance = tolerance_of("bfloat16" if "bfloat16" in (case.dtype, case.kv_dtype) else case.dtype, _platform())
    problem = difference(found, expected, tolerance, ("token", "head", "lane")).problem
    return Verdict(
        implementation=options.implementation,
        device_kind=jax.devices()[0].device_kind,
        problem=None
        if problem is None
        else f"of a {'decode' if case.decode_only else 'mixed'} step it gives {problem}",
    )


def _attend(case: Case, bucket: Bucket, options: StepOptions, fault: str | None) -> np.ndarray:
    """The case's result by one implementation, with the tiles of the bucket."""
    implementation = options.implementation
    arguments = run_case.make_inputs(case, implementation)
    config: Any = attention_config(bucket, options, _pool(case, implementation), case.num_heads)
    interpret: Any = False
    if options.target.platform != _platform() and implementation == "mosaic_tpu":
        from jax.experimental.pallas import tpu as pltpu

        assert isinstance(config, TpuConfig | LatentConfig)
        interpret = pltpu.InterpretParams(uninitialized_memory="nan")
        config = run_case.smallest_tiles(config, case.block_size)
    wide = bucket.table_width - arguments.batch.block_tables.shape[1]
    tables = jnp.pad(arguments.batch.block_tables, ((0, 0), (0, wide)))
    batch = dataclasses.replace(arguments.batch, block_tables=tables)
    attend = run_case.make_attend(
        case,
        dataclasses.replace(arguments, batch=batch),
        config,
        implementation,
        interpret=interpret,
        compiler_options=FAST_COMPILE if _platform() == "cpu" else None,
    )
    return np.asarray(spoilt(fault, attend)()).astype(np.float64)


def _pool(case: Case, implementation: str) -> KVPool:
    """The shapes of a pool of one block."""
    return pool_shape(
        num_blocks=1,
        block_size=case.block_size,
        num_kv_heads=case.num_kv_heads,
        **case.kept,
        dtype=KV_DTYPES[case.kv_dtype],
        implementation=implementation,
    )


def _platform() -> str:
    return jax.default_backend()
