"""What adapters add to a decode step on a TPU that is not here: the compiler's own counts, with and without them.

    python -m scripts.adapter_static [--generation v6e] [--rows 256] [--rank 16] [--adapters 8]

Needs libtpu. A forward of Llama-3-8B is compiled at two depths; the difference is that of its layers, so embedding
and head are in neither. Cycles are what the TPU's compiler expects of each operation, bytes what XLA counts.
Both are of forwards whose rows use all slots: one rank tile of 128 columns, whoever of its adapters is named.
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

from jax.experimental import topologies

from ferrum_jax.config import EngineConfig
from ferrum_jax.models.registry import spec_of
from ferrum_jax.runtime.layout import lay_out
from ferrum_jax.runtime.programs import programs_of
from ferrum_jax.sharding import make_mesh
from ferrum_jax.sizes.mesh_shape import MeshShape

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "eos_token_id": 128001,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "v7x": "TPU7x:2x2x1"}
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def counts(layers: int, adapted: bool, arguments: argparse.Namespace) -> tuple[float, float]:
    """(cycles, bytes) of a decode forward of so many layers."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=_TOPOLOGIES[arguments.generation]).devices
    config = EngineConfig(
        dtype="bfloat16",
        max_num_seqs=arguments.rows,
        num_blocks=512,
        max_model_len=1024,
        max_adapters=arguments.adapters,
        max_adapter_rank=arguments.rank,
        implementation="mosaic_tpu",
    )
    mesh = make_mesh(MeshShape(), devices)
    layout = lay_out(spec_of(_CONFIG | {"num_hidden_layers": layers}), config, mesh)
    bucket = next(
        b for b in layout.ladder.buckets if b.decode_only and b.num_tokens == arguments.rows and b.adapted == adapted
    )
    compiled = programs_of(layout)[bucket].compile()
    cost: Any = compiled.cost_analysis()
    cycles = sum(map(int, _CYCLES.findall(compiled.as_text())))
    return cycles, cost["bytes accessed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generation", choices=sorted(_TOPOLOGIES), default="v6e")
    for name, value in (("rows", 256), ("rank", 16), ("adapters", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    found = {}
    for adapted in (False, True):
        few, many = counts(1, adapted, arguments), counts(3, adapted, arguments)
        found[adapted] = [(b - a) / 2 for a, b in zip(few, many, strict=True)]
        cycles, num_bytes = found[adapted]
        print(f"{'adapted' if adapted else 'plain'}: {cycles:,.0f} cycles, {num_bytes:,.0f} bytes a layer")
    print("ratio: cycles {:.3f}, bytes {:.3f}".format(*(b / a for a, b in zip(found[False], found[True], strict=True))))


if __name__ == "__main__":
    main()
