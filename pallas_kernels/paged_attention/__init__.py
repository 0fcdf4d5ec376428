"""Attention of ragged rows over KV blocks that lie anywhere in a pool.

A step's tokens are flat: rows of one query (decode) and of many (prefill) stand one after the other. Each
token's K and V are written to its row's blocks; then it attends to its row's context through the block table.
`make_schedule` lists the tiles that exist once per step; `paged_attention` runs them once per layer.
"""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.chosen_keys import Chosen, ChosenKeys, TileLimits
from pallas_kernels.kv_pool import KVPool, check_pool
from pallas_kernels.kv_write import kv_write
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention import schedule as xla_schedule
from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.gpu import schedule as gpu_schedule
from pallas_kernels.paged_attention.gpu.config import GpuConfig
from pallas_kernels.paged_attention.gpu.schedule import GpuSchedule
from pallas_kernels.paged_attention.schedule import AttentionConfig, Schedule
from pallas_kernels.paged_attention.tpu import schedule as tpu_schedule
from pallas_kernels.paged_attention.tpu.config import TpuConfig
from pallas_kernels.paged_attention.tpu.latent.config import LatentConfig
from pallas_kernels.paged_attention.tpu.latent.schedule import LatentSchedule, make_latent_schedule
from pallas_kernels.paged_attention.tpu.schedule import TpuSchedule
from pallas_kernels.ragged_batch import RaggedBatch, StepShape
from pallas_kernels.shapes import check_counts, check_positive, check_shapes


def make_schedule(
    batch: RaggedBatch,
    *,
    num_tokens: int,
    block_size: int,
    config: AttentionConfig | TpuConfig | LatentConfig | GpuConfig,
    window: int | None = None,
    chunked: bool = False,
    causal: bool = True,
    implementation: str = "xla",
) -> Schedule | TpuSchedule | LatentSchedule | GpuSchedule:
    """The work of a step of `num_tokens` flat tokens, for all layers of one window, as `implementation` needs it.

    config: AttentionConfig for "xla", GpuConfig for "mosaic_gpu", and for "mosaic_tpu" TpuConfig, or over latents
    LatentConfig. window: a token at position p attends to positions p - window + 1 .. p; None is all up to p.
    chunked: to those of p's own stretch instead, p - p % window .. p. causal: False for encoders, where each token of
    a row attends to all of the row's positions, 0 .. start + count - 1. Raises ValueError for a config of another
    implementation, for one that does not fit the step, for a window that is not causal or over latents, for tokens that
    see beyond themselves likewise, for a number below 1, and for an unknown implementation.
    """
    check_counts(num_tokens=num_tokens, block_size=block_size)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be 1 or more, or None, with which a token sees all before it")
    if window is not None and not causal:
        raise ValueError(f"window is {window} and causal is False; a window looks back from a causal query only")
    if chunked and window is None:
        raise ValueError("chunked is True and window None; it is for windows, whose size is that of a chunk")
    makers: dict[str, tuple[type, Callable[..., Any]]] = {
        "xla": (AttentionConfig, xla_schedule.make_schedule),
        "mosaic_tpu": (TpuConfig, tpu_schedule.make_schedule),
        "mosaic_gpu": (GpuConfig, gpu_schedule.make_schedule),
    }
    if isinstance(config, LatentConfig):
        makers["mosaic_tpu"] = (LatentConfig, make_latent_schedule)
    if implementation not in makers:
        raise ValueError(f"implementation is {implementation!r}; paged_attention has {sorted(makers)}")
    if batch.seen_ends is not None and (isinstance(config, LatentConfig) or not causal):
        raise ValueError(
            f"some tokens see beyond themselves (seen_ends), config is a {type(config).__name__} and causal {causal}; "
            "they may where the others are causal, and on TPUs not over latents"
        )
    kind, make = makers[implementation]
    if not isinstance(config, kind):
        raise ValueError(f"config is a {type(config).__name__}; {implementation!r} takes a {kind.__name__}")
    sizes = {"num_tokens": num_tokens, "block_size": block_size}
    return make(batch, StepShape(**sizes, window=window, chunked=chunked, causal=causal), config)


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: KVPool,
    schedule: Schedule | TpuSchedule | LatentSchedule | GpuSchedule,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    chosen: Chosen | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, KVPool]:  # [T, N, V], the dtype of q, zero for padding tokens; the pool with k and v
    """softmax(scale * q k^T + mask) v of every token over its row's context, accumulated in float32.

    q: [T, N, H]. k: [T, K, H], v: [T, K, V] of the same tokens; they are written to the pool first (in place where it
    is donated), and attention reads what the pool keeps of them. schedule: of `make_schedule`, which has the window,
    for the same implementation. soft_cap: logits become soft_cap * tanh(logits / soft_cap). sinks: [N], a logit
    per head that takes weight and has no value. chosen: the keys that each token attends to, of `choose_keys` for the
    same implementation; None is all that its window has. What no query may see is never read into a result: it may be
    NaN. Its ten parameters are arrays and the numbers of the formula, so that a call reads like it.
    Raises ValueError for shapes that do not fit, numbers that are not above 0 and an unknown implementation.
    """
    check_positive(scale=scale)
    check_positive(", or None for none", soft_cap=soft_cap)
    widths = {"Q": pool.key_dim, "H": pool.head_dim, "V": pool.v_head_dim}
    sizes = check_shapes(("T N Q", q), ("T K H", k), ("T K V", v), T=schedule.step.num_tokens, **widths)
    if sizes["N"] % sizes["K"]:
        raise ValueError(f"q has {sizes['N']} heads and k {sizes['K']}; N must be a multiple of K")
    if pool.block_size != schedule.step.block_size:
        raise ValueError(
            f"the schedule is for blocks of {schedule.step.block_size} tokens; the pool's have {pool.block_size}"
        )
    check_pool(pool, sizes["K"], implementation)
    logits = Logits(scale=scale, soft_cap=soft_cap, sinks=sinks)
    if isinstance(chosen, ChosenKeys) and chosen.places.shape[1] not in (1, sizes["K"]):
        raise ValueError(f"{chosen.places.shape[1]} heads have keys of their own; it must be 1 or each of {sizes['K']}")
    keys = _in_form(chosen, implementation, pool)
    if implementation == "xla":
        assert isinstance(schedule, Schedule), "the schedule was made for another implementation"
        pool = kv_write(pool, k, v, schedule.write_blocks, schedule.write_offsets)
        return xla.attention(q, pool, schedule, logits, keys), pool
    if implementation == "mosaic_tpu" and pool.is_latent:
        from pallas_kernels.paged_attention.tpu.latent.kernel import latent_attention  # as below

        assert isinstance(schedule, LatentSchedule), "the schedule was made for another implementation"
        return latent_attention(q, k, v, pool, schedule, logits, keys)
    if implementation == "mosaic_tpu":
        from pallas_kernels.paged_attention.tpu import mosaic_tpu as tpu  # as below

        assert isinstance(schedule, TpuSchedule), "the schedule was made for another implementation"
        return tpu.paged_attention(q, k, v, pool, schedule, logits)
    if implementation == "mosaic_gpu":
        from pallas_kernels.paged_attention.gpu import mosaic_gpu as gpu  # half a second no other platform should pay
        from pallas_kernels.paged_attention.gpu.latent.latent_decode import latent_attention as over_latents

        assert isinstance(schedule, GpuSchedule), "the schedule was made for another implementation"
        return (over_latents if pool.is_latent else gpu.paged_attention)(q, k, v, pool, schedule, logits)
    raise ValueError(f"implementation is {implementation!r}; paged_attention has 'xla', 'mosaic_tpu' and 'mosaic_gpu'")


def _in_form(chosen: Chosen | None, implementation: str, pool: KVPool) -> Any:
    """Gives the chosen keys back. Raises ValueError where they are not in the form that the implementation reads."""
    form = {"xla": ChosenKeys, "mosaic_tpu": TileLimits if pool.is_latent else None}.get(implementation)
    if chosen is not None and (form is None or not isinstance(chosen, form)):
        raise ValueError(
            f"chosen keys are {type(chosen).__name__}, and implementation is {implementation!r}; 'xla' reads "
            "ChosenKeys, and 'mosaic_tpu' TileLimits over latents"
        )
    return chosen
