"""The cases that each implementation of paged attention can run, known before anything is compiled."""

from pallas_kernels.kv_pool import KV_DTYPES, TPU_HEAD_DIMS
from pallas_kernels.paged_attention.gpu import config as gpu_config
from pallas_kernels.target import Target

IMPLEMENTATIONS = ("xla", "mosaic_tpu", "mosaic_gpu")
TPU_BLOCK_SIZES = (16, 32, 64, 128, 256)
LATENT_LANES = (
    128  # the TPU's kernels want a multiple of these for a latent's values, and for those of an indexer's key
)


def serving(
    implementation: str,
    *,
    is_latent: bool,
    decode_only: bool,
    chooses: bool = False,
    index_dim: int = 0,
    sinks: bool = False,
    itemsize: int = 2,
) -> str:
    """The implementation for a bucket.

    chooses: rows may have more keys than an indexer chooses. index_dim: values of the indexer's keys. XLA computes
    steps that choose keys on GPUs, and on TPUs those that mix prompts into decoding too, or have no latents, or whose
    indexer's keys do not fill lanes. Over latents it computes mixed steps on GPUs, and on TPUs heads that have sinks.
    itemsize: bytes of a kept value. Mixed steps over latents of 8 bits are XLA's: it writes their tokens, and would
    copy the pool into another layout for a kernel, there and back.
    """
    if implementation == "mosaic_gpu":
        return "xla" if is_latent and (chooses or not decode_only) else implementation
    if implementation != "mosaic_tpu":
        return implementation
    chosen_by_xla = chooses and (not is_latent or not decode_only or index_dim % LATENT_LANES > 0)
    written_by_xla = not decode_only and itemsize == 1
    return "xla" if chosen_by_xla or (is_latent and (sinks or written_by_xla)) else implementation


def default_implementation(target: Target) -> str:
    """The implementation that a target's engine takes where none is named."""
    return "mosaic_tpu" if target.runs_tpu_kernels else "xla"


def refusals(
    implementation: str,
    *,
    target: Target,
    head_dim: int,
    v_head_dim: int | None = None,
    is_latent: bool = False,
    block_size: int | None,
    kv_dtype: str,
) -> list[str]:
    """Every reason why the implementation cannot run so.

    v_head_dim: None is head_dim. block_size: None is the target's own choice.
    """
    if implementation == "xla":
        return []
    if implementation == "mosaic_gpu":
        return _gpu_refusals(target, (head_dim, v_head_dim or head_dim), is_latent, block_size, kv_dtype)
    if implementation != "mosaic_tpu":
        return [f"implementation is {implementation!r}; it must be one of {IMPLEMENTATIONS}"]
    reasons = []
    if target.platform != "tpu":
        reasons.append(f"implementation is 'mosaic_tpu' on {target.generation}, which is no TPU; take 'xla'")
    elif not target.runs_tpu_kernels:
        reasons.append(f"implementation is 'mosaic_tpu'; for {target.generation} no kernel was made: take 'xla'")
    if is_latent and head_dim % LATENT_LANES:
        reasons.append(
            f"kv_lora_rank is {head_dim}; 'mosaic_tpu' has multiples of {LATENT_LANES}; take implementation 'xla'"
        )
    elif not is_latent and not has_tpu_heads(head_dim, v_head_dim or head_dim):
        of_values = "" if v_head_dim in (None, head_dim) else f" and that of V {v_head_dim}"
        reasons.append(
            f"head_dim is {head_dim}{of_values}; 'mosaic_tpu' has {TPU_HEAD_DIMS}, for V one that is no larger; take "
            "implementation 'xla'"
        )
    if block_size is not None and block_size not in TPU_BLOCK_SIZES:
        reasons.append(f"block_size is {block_size}; 'mosaic_tpu' has {TPU_BLOCK_SIZES}")
    if is_latent and kv_dtype == "int8":
        reasons.append("kv_dtype is 'int8'; 'mosaic_tpu' has latents in floats alone; take implementation 'xla'")
    if is_latent and block_size == TPU_BLOCK_SIZES[0] and KV_DTYPES[kv_dtype].itemsize == 1:
        reasons.append(f"block_size is {block_size}; latents of 8 bits have blocks of 32 or more in 'mosaic_tpu'")
    if KV_DTYPES[kv_dtype].name.startswith("float8") and target.runs_tpu_kernels and not target.has_fp8:
        reasons.append(f"kv_dtype is {kv_dtype!r}; {target.generation} has no float8 in 'mosaic_tpu'; take 'int8'")
    return reasons


def has_tpu_heads(head_dim: int, v_head_dim: int) -> bool:
    """Whether "mosaic_tpu" has keys and values of these sizes."""
    return head_dim in TPU_HEAD_DIMS and v_head_dim in TPU_HEAD_DIMS and v_head_dim <= head_dim


def has_gpu_heads(head_dim: int, v_head_dim: int) -> bool:
    """Whether "mosaic_gpu" has keys and values of these sizes."""
    sizes = gpu_config.HEAD_DIMS
    return head_dim in sizes and v_head_dim in sizes and v_head_dim <= head_dim


def _gpu_refusals(
    target: Target, dims: tuple[int, int], is_latent: bool, block_size: int | None, kv_dtype: str
) -> list[str]:
    """dims: head_dim and v_head_dim, as a pool has them."""
    reasons, (H, V) = [], dims
    if target.num_cores is None:
        reasons.append(f"implementation is 'mosaic_gpu' on {target.generation}, which is no Hopper GPU; take 'xla'")
    if is_latent:
        sizes, ropes = gpu_config.LATENT_DIMS, gpu_config.LATENT_ROPE_DIMS
        if H not in sizes or V not in ropes:
            reasons.append(
                f"kv_lora_rank is {H} and qk_rope_head_dim {V}; 'mosaic_gpu' has {sizes} and {ropes}; "
                "take implementation 'xla'"
            )
        if kv_dtype not in ("bfloat16", "float32"):
            reasons.append(
                f"kv_dtype is {kv_dtype!r}; 'mosaic_gpu' has latents in 'bfloat16'; take implementation 'xla'"
            )
    elif not has_gpu_heads(H, V):
        of_values = "" if H == V else f" and that of V {V}"
        reasons.append(
            f"head_dim is {H}{of_values}; 'mosaic_gpu' has {gpu_config.HEAD_DIMS}, for V one that is no "
            "larger; take implementation 'xla'"
        )
    if block_size is not None and block_size not in gpu_config.BLOCK_SIZES:
        reasons.append(f"block_size is {block_size}; 'mosaic_gpu' has {gpu_config.BLOCK_SIZES}")
    if kv_dtype == "float32":
        reasons.append("kv_dtype is 'float32'; 'mosaic_gpu' has 'bfloat16', 'int8' and float8; take dtype 'bfloat16'")
    return reasons
