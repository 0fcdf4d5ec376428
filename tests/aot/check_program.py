"""The programs of `ferrum-jax check` compiled for a device that is not here: its rates, and a start's attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints import open_checkpoint
from ferrum_jax.cli.compile import without_device
from ferrum_jax.cli.device_check.rates import DTYPES, make_copy, products
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.startup.check_attention import cases_of
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.runtime.compile.topology import target_devices
from ferrum_jax.runtime.layout import lay_out
from ferrum_jax.runtime.placing.fit import PROBE_BLOCKS
from ferrum_jax.runtime.step_options import attention_config
from pallas_kernels.paged_attention import make_schedule, paged_attention
from pallas_kernels.paged_attention.cases import make_shapes
from tests.aot.described import or_error
from tests.support import ROOT

_SIDE = 8192


def compiled(device: Any, run: Any, *shapes: Any) -> dict[str, str]:
    """Compiles for one device: there is nothing to say of what compiles. Raises what the compiler does."""
    mesh = Mesh(np.array([device]), ("x",))
    here = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), shapes)
    platform = "cuda" if device.platform == "gpu" else device.platform
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(run).trace(*placed).lower(lowering_platforms=(platform,)).compile()
    return {}


def programs(devices: Any) -> dict[str, Any]:
    """What compiles each program, by its name."""
    device = devices[0]
    found: dict[str, Any] = {
        "copy": lambda: compiled(device, make_copy(8)[0], jax.ShapeDtypeStruct((2**28,), "float32"))
    }
    for name, dtype in DTYPES.items():
        side = jax.ShapeDtypeStruct((_SIDE, _SIDE), dtype)
        found[f"matmul in {name}"] = lambda dtype=dtype, side=side: compiled(device, products(dtype), side, side)
    kernel = "mosaic_gpu" if device.platform == "gpu" else "mosaic_tpu"
    config = EngineConfig(implementation=kernel, num_blocks=PROBE_BLOCKS, max_num_seqs=8, max_num_batched_tokens=128)
    spec: Any = ModelSource.of_checkpoint(open_checkpoint(str(ROOT / "checkpoints/demo"))).spec
    layout = lay_out(spec, config, make_mesh(MeshShape(), devices))
    for case, bucket in cases_of(layout):
        shapes = make_shapes(dataclasses.replace(case, tiny=False), kernel)
        tables: Any = jax.ShapeDtypeStruct((case.num_rows, bucket.table_width), jnp.int32)
        batch = dataclasses.replace(shapes.batch, block_tables=tables)
        tiles = attention_config(bucket, layout.options, shapes.pool, case.num_heads)

        def layer(q: Any, k: Any, v: Any, pool: Any, batch: Any, case: Any = case, tiles: Any = tiles) -> Any:
            schedule = make_schedule(batch, **case.step, config=tiles, implementation=kernel)
            return paged_attention(q, k, v, pool, schedule, **case.attention, implementation=kernel)

        arguments = (shapes.q, shapes.k, shapes.v, shapes.pool, batch)
        found[f"attention, {case.name}"] = lambda layer=layer, a=arguments: compiled(device, layer, *a)
    return found


def main(target: str) -> dict[str, dict[str, str]]:
    """The error of each program that does not compile, nothing of the others."""
    without_device(target)
    return {name: or_error(compile) for name, compile in programs(target_devices(target)).items()}
