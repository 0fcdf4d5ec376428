"""Launches of a layer of Llama-3-8B's decode step, 64 rows, on an H200 that is not here. As a program it keeps them."""

import dataclasses
import pathlib
from collections import Counter

from scripts import gpu_static, kept_counts, step_ops  # isort: skip  # before jax: it sets what the compilers read

from ferrum_jax.models.families.registry import spec_of
from scripts.published import PUBLISHED
from scripts.xla_cycles import computations
from tests.pallas_kernels.test_paged_attention_gpu_aot import whole_steps

FILE = pathlib.Path(__file__).with_suffix(".json")
TOOLS = {"jax": gpu_static.jax.__version__}
NO_WORK = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}


def launches_of_a_layer() -> Counter[str]:
    """Nodes that a CUDA graph has for a layer, by kind and result: what one layer more adds."""
    return _launches(3) - _launches(2)


def _launches(num_layers: int) -> Counter[str]:
    spec = dataclasses.replace(spec_of(PUBLISHED["Llama-3-8B"][0]), num_hidden_layers=num_layers, cache_groups=())
    _, steps = whole_steps(spec, 1, implementation="mosaic_gpu")
    bodies, entry = computations(next(steps).executable.as_text())
    return Counter(step_ops.label_of(op) for op in map(step_ops.parse, bodies[entry]) if op and op.kind not in NO_WORK)


if __name__ == "__main__":
    kept_counts.write(FILE, TOOLS, {"llama_8b_decode_64": {"layer": launches_of_a_layer()}})
