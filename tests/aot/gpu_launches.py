"""Launches of a layer of Llama-3-8B's decode step, 64 rows in bfloat16, compiled for an H200 that is not here.

By hand: python -m tests.aot.gpu_launches, which keeps them in gpu_launches.json.
"""

import functools
import pathlib
from collections import Counter

from scripts import gpu_static  # isort: skip  # before jax: it sets what the compilers read

import jax

from ferrum_jax.config import EngineConfig
from ferrum_jax.models.families.registry import spec_of
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.runtime.layout import lay_out
from ferrum_jax.runtime.step import trace_forward
from scripts import kept_counts, step_ops
from scripts.published import config_of
from scripts.xla_cycles import computations

FILE = pathlib.Path(__file__).with_suffix(".json")
STEP = "llama_8b_decode_64"
NO_WORK = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}


def launches_of_a_layer() -> dict[str, int]:
    """Nodes that a CUDA graph has for a layer, by kind and result: what one layer more adds."""
    return dict(sorted((_launches(3) - _launches(2)).items()))


def _launches(num_layers: int) -> Counter[str]:
    sizes = {"max_num_seqs": 64, "max_model_len": 4096, "num_blocks": 1024}
    config = EngineConfig(**sizes, mesh="tp=1", implementation="mosaic_gpu")
    spec = spec_of(config_of("Llama-3-8B") | {"num_hidden_layers": num_layers})
    layout = lay_out(spec, config, make_mesh(config.mesh_shape, gpu_static.h200s()))
    decode = [bucket for bucket in layout.ladder.buckets if bucket.decode_only][-1]
    given = (layout.graph, layout.targets, layout.pools, decode, layout.options, layout.mesh)
    compiled = gpu_static.compile_traced(functools.partial(trace_forward, *given))
    bodies, entry = computations(compiled.executable.as_text())
    ops = [op for line in bodies[entry] if (op := step_ops.parse(line)) is not None]
    return Counter(step_ops.label_of(op) for op in ops if op.kind not in NO_WORK)


def main() -> None:
    kept_counts.write(FILE, {"jax": jax.__version__}, {STEP: {"layer": launches_of_a_layer()}})


if __name__ == "__main__":
    main()
