"""The decode steps of published models whose time is estimated, each for a slice that is not here: tpu_steps.toml."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.families.registry import spec_of
from ferrum_jax.models.sharding import local_bytes, make_mesh
from ferrum_jax.models.spec.model_spec import ModelSpec
from ferrum_jax.runtime.buckets import Bucket
from ferrum_jax.runtime.compile.topology import target_devices
from ferrum_jax.runtime.layout import Layout, lay_out
from ferrum_jax.runtime.programs import StepPart
from pallas_kernels.target import Target
from scripts.published import PUBLISHED

FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_KV_SHARE = 0.8  # of what the weights leave
_MODEL_LEN = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A decode step. rows: of each data shard, which have `context` tokens. layers: two depths, both with all kinds of
    layers: what the second has more is what the model has more.

    published: tokens a second that somebody measured of the model on the slice, and who; in whatever workload.
    """

    name: str
    model: str
    target: str
    mesh: str = "tp=1"
    rows: int = 64
    context: int = 2048
    layers: tuple[int, int] = (2, 3)
    blocks: bool = False
    published: tuple[int, str] | None = None

    @property
    def config(self) -> dict[str, Any]:
        return PUBLISHED[self.model][0] | ({"quantization_config": FP8_BLOCKS} if self.blocks else {})

    @property
    def num_layers(self) -> int:
        return spec_of(self.config).num_hidden_layers

    @property
    def tokens(self) -> int:
        """That a step draws, one for each row of all shards."""
        return self.rows * MeshShape.parse(self.mesh).dp


def _read(fields: dict[str, Any]) -> Step:
    given: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    return Step(**given)


STEPS = tuple(map(_read, tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["step"]))


def shortened(spec: ModelSpec, layers: int) -> ModelSpec:
    """The same model with its first layers."""
    moe = tuple(layer for layer in spec.moe_layers if layer < layers)
    experts = dataclasses.replace(spec.experts, layers=moe) if spec.experts and moe else None
    forms = tuple((name, form) for name, form in spec.forms if int(name.split(".")[1]) < layers)
    return dataclasses.replace(spec, num_hidden_layers=layers, experts=experts, cache_groups=(), forms=forms)


def laid_out(step: Step, layers: int) -> Layout:
    """The step's engine with so many layers, and the memory that their weights leave."""
    devices = target_devices(step.target)
    mesh = make_mesh(MeshShape.parse(step.mesh), devices)
    spec = shortened(spec_of(step.config), layers)
    config = EngineConfig(
        max_num_seqs=step.rows,
        max_num_batched_tokens=max(512, step.rows),
        max_model_len=_MODEL_LEN,
        kv_memory_bytes=1 << 30,
        dtype="bfloat16",
        implementation="mosaic_tpu",
        product_implementation="mosaic_tpu",
    )
    free = Target.of_device(devices[0]).memory_bytes - lay_out(spec, config, mesh).ledger.weights_bytes
    return lay_out(spec, dataclasses.replace(config, kv_memory_bytes=int(free * _KV_SHARE)), mesh)


def parts_of(layout: Layout, step: Step) -> tuple[Bucket, StepPart]:
    """What a decode step of all rows runs: its forward and what samples."""
    (forward,) = (
        part for part in layout.ladder.buckets if part.decode_only and part.num_tokens == part.num_rows == step.rows
    )
    assert isinstance(forward, Bucket)
    return forward, layout.ladder.row_buckets[-1]


def needed_bytes(step: Step) -> int:
    """What must cross HBM of a device in a step: weights, without the embedding's other rows, and keys and values."""
    layout = laid_out(step, step.num_layers)
    ledger, targets = layout.ledger, layout.targets
    unread = local_bytes(targets["embed.weight"]) if "head.weight" in targets else 0
    of_token = sum(group.block_bytes for group in ledger.groups) / ledger.block_size
    return round(ledger.weights_bytes - unread + of_token * step.context * step.rows)
