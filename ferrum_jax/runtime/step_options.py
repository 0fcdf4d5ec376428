"""StepOptions: what is fixed for all steps of an engine, and what follows: tiles of attention, compiler options."""

import dataclasses
import math

import jax.numpy as jnp

from ferrum_jax.inputs.sizes import invariance
from ferrum_jax.inputs.sizes.tiles import tiles_of
from ferrum_jax.models.sharding.shards import Shards
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.runtime.buckets import Bucket
from pallas_kernels.kv_pool import KVPool
from pallas_kernels.paged_attention import AttentionConfig, GpuConfig, LatentConfig, TpuConfig
from pallas_kernels.paged_attention.support import serving
from pallas_kernels.row_recurrence.tpu_support import refusals
from pallas_kernels.target import Target

# Options of a TPU's compiler. Layers have equal code: compiled and kept once, it takes a third less time and a seventh
# of the memory, for about six bundles more an operation, which call it (decision 0025). A dot within a dot, the MLP's
# up within its down, would compute the inner one several times over.
_TPU_OPTIONS = {"xla_tpu_enable_deduplicated_calls": "true", "xla_tpu_dot_dot_fusion": "false"}
# TPU7x keeps 16-bit arrays of a program in tiles of 16 rows and its arguments in tiles of 8. Weights that a loop reads,
# the experts' and the one of the logits, would be copied in each step. With tiles of 8 for both nothing is.
_TPU7X_OPTIONS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
# A GPU's decode step waits for its launches. Products of one input are one where this allows it: q, k and v are by
# default, gate and up, which are larger, are not. A Triton kernel reads weights where they are; cuBLAS, which XLA takes
# for many tokens, would want them copied side by side.
_GPU_DECODE_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": "65536"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of all steps of an engine.

    shards: devices that share the work of a step. expert_shards: data shards that have their experts together.
    local: the spec with the heads of one device. target: the kind of device.
    """

    spec: ModelSpec
    dtype: jnp.dtype
    target: Target
    local: ModelSpec
    shards: Shards
    expert_shards: Shards
    block_size: int
    implementation: str  # of attention
    invariant: bool
    tiles: str | None = None  # of attention, as EngineConfig.attention_tiles
    products: str = "xla"  # of products with quantised weights, of experts and of recurrences
    gives_experts: bool = False  # the forward gives those of its tokens
    gives_masks: bool = False  # sampling gives those of what it could draw

    @property
    def recurrence(self) -> str:
        """Who computes the states of recurrent layers: a TPU's kernel where products have theirs and it takes them."""
        state = None if self.spec.recurrence is None else self.spec.recurrence.state_shape
        return "mosaic_tpu" if self.products == "mosaic_tpu" and state and not refusals(state) else "xla"

    @property
    def recorded(self) -> str:
        """One text of what attention runs and what multiplies weights in a form, for the record of a job."""
        tiles = "" if self.tiles is None else f" {self.tiles}"
        products = "" if self.products == "xla" else f" products={self.products}"
        return f"{self.implementation}{tiles}{products}"


def expert_dtype(num_experts: int) -> jnp.dtype:
    """The smallest that holds their ids."""
    return jnp.dtype(jnp.uint8 if num_experts <= 256 else jnp.uint16)


def implementation_of(bucket: Bucket, options: StepOptions, pool: KVPool) -> str:
    """The implementation of attention in a bucket's steps over this pool."""
    return serving(
        options.implementation,
        is_latent=pool.is_latent,
        decode_only=bucket.decode_only,
        chooses=chooses_keys(bucket, options),
        sinks=options.spec.attention.sinks,
        itemsize=pool.dtype.itemsize,
        index_dim=0 if pool.index_keys is None else pool.index_keys.shape[3],
    )


def chooses_keys(bucket: Bucket, options: StepOptions) -> bool:
    """Whether a row of a bucket may have more keys than an indexer of the model chooses."""
    return bucket.table_width * options.block_size > min(options.spec.top_ks, default=math.inf)


def attention_config(
    bucket: Bucket, options: StepOptions, pool: KVPool, num_heads: int
) -> AttentionConfig | TpuConfig | LatentConfig | GpuConfig:
    """The tiles of a bucket's attention. pool: of a layer and one device, or its shapes. num_heads: its query heads.

    Raises ValueError where the bucket does not fit the implementation on the target.
    """
    implementation = implementation_of(bucket, options, pool)
    if implementation == "mosaic_tpu" and pool.is_latent:
        return LatentConfig.choose(
            num_rows=bucket.num_rows,
            max_blocks=bucket.table_width,
            num_heads=num_heads,
            dtype=options.dtype,
            pool=pool,
            target=options.target,
            mixed_tokens=None if bucket.decode_only else bucket.num_tokens,
        )
    if implementation == "mosaic_tpu":
        return TpuConfig.choose(
            num_tokens=bucket.num_tokens,
            num_rows=bucket.num_rows,
            max_blocks=bucket.table_width,
            num_heads=num_heads,
            dtype=options.dtype,
            pool=pool,
            decode_only=bucket.decode_only,
            target=options.target,
            tiles=tiles_of(options.tiles),
        )
    if implementation == "mosaic_gpu":
        return GpuConfig.choose(
            num_heads=num_heads,
            pool=pool,
            decode_only=bucket.decode_only,
            target=options.target,
            dtype=options.dtype,
        )
    return AttentionConfig.choose(
        num_tokens=bucket.num_tokens,
        block_size=options.block_size,
        decode_only=bucket.decode_only,
        invariant=options.invariant,
        gpu_heads=(num_heads, pool) if options.target.platform == "gpu" else None,
    )


def compiler_options(options: StepOptions, *, decodes: bool = False) -> dict[str, str] | None:
    """The compiler's options for a step on its target. decodes: no row has more than one token."""
    if options.invariant:
        return invariance.COMPILER_OPTIONS
    if options.target.platform == "gpu" and decodes:
        return _GPU_DECODE_OPTIONS
    if options.target.platform != "tpu":
        return None
    return _TPU_OPTIONS | (_TPU7X_OPTIONS if options.target.generation == "v7x" else {})
