"""Every bucket of a tiny model or encoder, compiled for a device that is not here, and what its programs contain."""

from tests.aot import step_program  # isort: skip  # before jax: it sets what libtpu reads

import dataclasses
import itertools
import time
from typing import Any

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.io.files.json_files import read_json
from ferrum_jax.models.families.registry import encoder_spec_of, spec_of
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.models.spec import AttentionSpec, GatedDeltaSpec, KimiDeltaSpec, Mamba2Spec, ModelSpec
from ferrum_jax.runtime.compile.topology import target_devices
from ferrum_jax.runtime.encoder_runtime import encoder_programs, lay_out_encoder
from ferrum_jax.runtime.layout import lay_out
from tests.aot.described import or_error
from tests.aot.program_text import large_constants, ops_of, wide_weights
from tests.support import GOLDENS

_ENCODER_WIDTH = 64  # XLA finds no tiles for a GPU's product of width 48 (jax 0.10.2)
ENCODERS = "encoders/"
_LEAST_WEIGHT = 1 << 10  # elements of a matrix
_HEAD_DIM = 128  # one that the TPU's kernels have, and whose recurrent states fill tiles


def describe_family(target: str, golden: str) -> list[dict[str, Any]]:
    """What each bucket of the folder's model, with wider heads, contains in bfloat16; eight rows of 256 tokens."""
    spec = _with_wider_heads(spec_of(read_json(GOLDENS / golden / "config.json")))
    config = EngineConfig(
        dtype="bfloat16", max_num_seqs=8, max_num_batched_tokens=128, max_model_len=256, num_blocks=4096, block_size=16
    )
    layout = lay_out(spec, config, make_mesh(MeshShape(), target_devices(target)))
    parts = (*layout.ladder.buckets, *layout.ladder.row_buckets)
    return [step_program.describe(layout, bucket, least_weight=_LEAST_WEIGHT) for bucket in parts]


def describe_encoder(target: str, golden: str) -> list[dict[str, Any]]:
    """What each bucket of the folder's encoder contains in bfloat16; at most eight texts or 512 tokens."""
    of_golden = encoder_spec_of(read_json(GOLDENS / golden / "config.json"))
    spec = dataclasses.replace(of_golden, hidden_size=_ENCODER_WIDTH)
    config = EngineConfig(dtype="bfloat16", max_num_seqs=8, max_num_batched_tokens=512)
    layout = lay_out_encoder(spec, config, make_mesh(MeshShape(), target_devices(target)))
    weights = {w.shape for w in layout.model.targets.values() if len(w.shape) > 1 and w.size >= _LEAST_WEIGHT}
    found = []
    for bucket, part in encoder_programs(layout).items():
        started = time.process_time()
        text = part.compile().as_text()
        ops = ops_of(text)
        found.append(
            {
                "bucket": str(bucket),
                "compile_s": time.process_time() - started,
                "num_ops": len(ops),
                "wide_weights": wide_weights(text, weights),
                "constants": large_constants(ops),
            }
        )
    return found


def _widened(attention: AttentionSpec) -> AttentionSpec:
    rope = attention.rope
    if rope is not None and rope.long_factor:
        count = rope.rotary_dim(_HEAD_DIM) // 2
        short, long = (
            tuple(itertools.islice(itertools.cycle(f), count)) for f in (rope.short_factor, rope.long_factor)
        )
        rope = dataclasses.replace(rope, short_factor=short, long_factor=long)
    latent = attention.latent and dataclasses.replace(attention.latent, kv_lora_rank=_HEAD_DIM)
    indexer = attention.indexer and dataclasses.replace(attention.indexer, head_dim=_HEAD_DIM)
    return dataclasses.replace(attention, head_dim=_HEAD_DIM, rope=rope, latent=latent, indexer=indexer)


def _with_wider_heads(spec: ModelSpec) -> ModelSpec:
    wide = spec.with_attention(_widened)
    recurrence = spec.recurrence
    if isinstance(recurrence, GatedDeltaSpec):
        recurrence = dataclasses.replace(recurrence, key_head_dim=_HEAD_DIM, value_head_dim=_HEAD_DIM)
    if isinstance(recurrence, KimiDeltaSpec):
        recurrence = dataclasses.replace(recurrence, head_dim=_HEAD_DIM)
    if isinstance(recurrence, Mamba2Spec):
        recurrence = dataclasses.replace(recurrence, head_dim=_HEAD_DIM // 2, state_dim=_HEAD_DIM)
    return dataclasses.replace(wide, recurrence=recurrence)


def main(target: str, golden: str) -> dict[str, Any]:
    """What each bucket of a golden's programs contains, or the error of a family that does not compile."""
    describe = describe_encoder if golden.startswith(ENCODERS) else describe_family
    return or_error(lambda: {"buckets": describe(target, golden)})
