"""The compiled halves of a step of a published model on a mesh of TPUs that are not here, and what they contain.

By hand: python -m tests.aot.described step_program '{"model": "Llama-3-8B", ...}', with the fields of `Case`.
"""

import os

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

import dataclasses
import math
import time
from typing import Any

import jax
from jax.experimental import topologies

from checkpoints.stored_weight import weight_of_leaf
from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.families.registry import spec_of
from ferrum_jax.models.sharding import local_bytes, make_mesh
from ferrum_jax.runtime.buckets import Bucket, RowBucket
from ferrum_jax.runtime.handed_back import results_of
from ferrum_jax.runtime.layout import Layout, lay_out
from ferrum_jax.runtime.programs import Part, programs_of
from ferrum_jax.runtime.sample import SCORE_TILE
from pallas_kernels.target import Target
from scripts.hlo_collectives import KINDS, count_collectives, unexpected_collectives
from scripts.published import PUBLISHED
from scripts.tpu_steps import FP8_BLOCKS, shortened
from tests.aot.program_text import dense_weights, large_constants, ops_of, wide_weights
from tests.sharding.meant import meant_collectives

KV_SHARE = 0.8  # of what the weights leave, as an engine would take it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """layers: None is the model's own depth. topology: a name of libtpu's. buckets: T and whether it is decode.

    weights: a form that dense weights are quantised to, or "fp8-blocks", as they are published. products: who
    multiplies weights in a form.
    """

    model: str
    topology: str
    mesh: str
    layers: int | None = None
    implementation: str = "mosaic_tpu"
    buckets: tuple[tuple[int, bool], ...] = ((64, True), (512, False))
    kv_dtype: str = "auto"
    weights: str = "auto"
    products: str = "xla"


def lay_out_case(case: Case) -> Layout:
    """64 rows of 4,096 tokens on the case's devices, with the memory that its weights leave."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=case.topology).devices
    mesh = make_mesh(MeshShape.parse(case.mesh), devices)
    blocks = {"quantization_config": FP8_BLOCKS} if case.weights == "fp8-blocks" else {}
    spec = spec_of(PUBLISHED[case.model][0] | blocks)
    if case.layers is not None:
        spec = shortened(spec, case.layers)
    config = EngineConfig(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=4096,
        kv_memory_bytes=1 << 30,
        dtype="bfloat16",
        implementation=case.implementation,
        kv_dtype=case.kv_dtype,
        weights="auto" if blocks else case.weights,
        product_implementation=case.products,
    )
    free = Target.of_device(devices[0]).memory_bytes - lay_out(spec, config, mesh).ledger.weights_bytes
    return lay_out(spec, dataclasses.replace(config, kv_memory_bytes=max(int(free * KV_SHARE), 1)), mesh)


def formed_shapes(layout: Layout) -> set[tuple[int, ...]]:
    """Shapes on one device of what the weights in a form stand for; of one expert too."""
    forms, found = dict(layout.options.spec.forms), set()
    for name, target in layout.targets.items():
        weight, leaf = weight_of_leaf(name) or (name, "")
        if leaf == "codes":
            shape = target.sharding.shard_shape(target.shape)
            shape = (*shape[:-1], shape[-1] * (2 if forms[weight].kind in ("int4", "mxfp4") else 1))
            found |= {shape, shape[-2:]}
    return found


def describe(layout: Layout, part: Part, *, least_weight: int = 1 << 20) -> dict[str, Any]:
    """What the program of a part of a step contains on one device; ops are named where they should not be there.

    least_weight: elements of the weights that must be neither copied nor widened.
    """
    started = time.process_time()
    executable = programs_of(layout)[part].compile()
    compile_s = time.process_time() - started  # of all threads, whatever else the machine does
    text, memory = executable.as_text(), executable.memory_analysis()
    ops = ops_of(text)
    num_tokens, num_rows = _sizes(part)
    pools = {math.prod(p.sharding.shard_shape(p.shape)) for p in jax.tree.leaves(layout.pools.caches)}
    matrices = [w for w in layout.targets.values() if len(w.shape) > 1]  # norms and biases are computed in float32
    large = {w.sharding.shard_shape(w.shape) for w in matrices if w.size >= least_weight}
    activations = (num_tokens, layout.mesh.shape["dp"] * num_rows)  # of one shard, and gathered
    weights = {shape for shape in large if shape[0] not in activations}
    of_logits = {layout.options.spec.vocab_size, num_tokens} if least_weight < 1 << 20 else set()
    moves = ("copy", "transpose")
    found = {
        "pool_copies": [
            str(op) for op in ops if op.size in pools and (op.kind in (*moves, "convert") or op.kind.startswith(KINDS))
        ],
        "weight_copies": [str(op) for op in ops if op.shape in weights and op.kind in moves],
        # tiny ones look like activations
        "wide_weights": wide_weights(text, {shape for shape in large if not of_logits & set(shape)}),
        "constants": large_constants(ops),
        "dense_weights": dense_weights(text, formed_shapes(layout)),
    }
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return {
        "bucket": str(part),
        "compile_s": compile_s,
        "collectives": dict(count_collectives(text)[0]),
        "unexpected_collectives": unexpected_collectives(text, meant_collectives(layout, part)),
        "aliased_bytes": memory.alias_size_in_bytes,
        "pool_bytes": _donated_bytes(layout, part),
        "layer_pool_bytes": local_bytes(jax.tree.leaves(layout.pools.caches)[0]),
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": peak - memory.alias_size_in_bytes,
        "memory_bytes": Target.of_device(layout.mesh.devices.flat[0]).memory_bytes,
        "weights_bytes": layout.ledger.weights_bytes,
        "refused_products": layout.refused_products,
        **found,
    }


def _sizes(part: Part) -> tuple[int, int]:
    """Tokens and rows of a part."""
    if isinstance(part, Bucket):
        return part.num_tokens, part.num_rows
    rows = part.num_rows if isinstance(part, RowBucket) else SCORE_TILE
    return rows, rows


def _donated_bytes(layout: Layout, part: Part) -> int:
    """Bytes on one device of what a part writes in place: pools, and the arrays of an earlier step's results."""
    pools = layout.pools
    if isinstance(part, str):
        return local_bytes(pools.masks) if part == "write_masks" else 0
    results = sum(map(local_bytes, results_of(part, pools, layout.options, layout.mesh)))
    if isinstance(part, Bucket):
        return results + layout.ledger.kv_bytes + layout.ledger.states_bytes + local_bytes(pools.hidden)
    return results + sum(map(local_bytes, (pools.slots, pools.prompts)))


def main(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The description of each bucket of a case, of what samples all rows, of the write of masks, and of prompt scores.

    Scores are beside mixed buckets only.
    """
    case = Case(**fields | {"buckets": tuple(map(tuple, fields["buckets"]))})
    layout = lay_out_case(case)
    wanted = [b for b in layout.ladder.buckets if (b.num_tokens, b.decode_only) in case.buckets]
    assert len(wanted) == len(case.buckets), f"{case.buckets} are not all in {layout.ladder.buckets}"
    score = ["score"] if any(not b.decode_only for b in wanted) else []
    return [describe(layout, part) for part in (*wanted, layout.ladder.row_buckets[-1], "write_masks", *score)]
