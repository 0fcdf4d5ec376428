"""Cases of paged attention for Hopper's kernels: some alone, and those of pallas_kernels/paged_attention/cases.py."""

import functools
from typing import Any

from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.support import refusals
from pallas_kernels.target import Target

TARGET = Target.named("gpu:h200")
_decode = functools.partial(Case, rows=((2047, 1),) * 64, num_tokens=64, num_rows=64, decode_only=True)
_mixed = functools.partial(Case, rows=(*((2047, 1),) * 60, (1024, 452)), num_tokens=512, num_rows=64)
_LLAMA_8B: Any = {"num_heads": 32, "num_kv_heads": 8}
_GEMMA: Any = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256}
_GEMMA4: Any = {"num_heads": 32, "num_kv_heads": 4, "head_dim": 512}
_MIMO: Any = {"num_heads": 64, "head_dim": 192, "v_head_dim": 128}
_LLAMA4: Any = {"num_heads": 40, "num_kv_heads": 8}
_OSS: Any = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64}

HOPPER_CASES = (
    *(_decode(name=f"llama_8b_decode_{dtype}_c16", kv_dtype=dtype, **_LLAMA_8B) for dtype in ("int8", "fp8_e4m3")),
    _mixed(name="llama_8b_mixed_int8_c16", kv_dtype="int8", **_LLAMA_8B),
    _mixed(name="llama_8b_mixed_fp8_e4m3", block_size=32, kv_dtype="fp8_e4m3", **_LLAMA_8B),
    _mixed(name="llama_8b_mixed_fp8_e5m2_c256", block_size=256, kv_dtype="fp8_e5m2", **_LLAMA_8B),
    _mixed(name="phi3_mixed", num_heads=32, num_kv_heads=32, head_dim=96, window=2047),
    _mixed(name="phi3_mixed_int8", num_heads=32, num_kv_heads=32, head_dim=96, window=2047, kv_dtype="int8"),
    _mixed(name="gemma_mixed_int8", window=1024, soft_cap=50.0, kv_dtype="int8", **_GEMMA),
    _mixed(name="oss_mixed_int8", window=128, has_sinks=True, kv_dtype="int8", **_OSS),
    _mixed(name="gemma4_mixed", **_GEMMA4),
    _mixed(name="gemma4_mixed_int8", kv_dtype="int8", **_GEMMA4),
    _mixed(name="gemma4_mixed_fp8_c64", block_size=64, kv_dtype="fp8_e4m3", **_GEMMA4),
    _mixed(name="gemma4_mixed_image", spans=((60, 1100, 1356),), **_GEMMA4),
    _mixed(name="mimo_v2_mixed", num_kv_heads=4, **_MIMO),
    _mixed(name="mimo_v2_mixed_window", num_kv_heads=8, window=128, has_sinks=True, **_MIMO),
    _mixed(name="mimo_v2_mixed_int8", num_kv_heads=4, kv_dtype="int8", **_MIMO),
    _mixed(name="llama4_mixed", window=8192, chunked=True, **_LLAMA4),
    _mixed(name="gemma3_mixed_image", window=1024, spans=((60, 1100, 1356),), **_GEMMA),
    _mixed(name="gemma3_mixed_image_no_window", spans=((60, 1100, 1356),), **_GEMMA),
)


def gpu_cases() -> list[Case]:
    """The cases of paged attention in sizes that models have, as far as "mosaic_gpu" has them."""

    def has(case: Case) -> bool:
        how = {"block_size": case.block_size, "kv_dtype": case.kv_dtype}
        several_of_latents = case.rope_dim is not None and not case.decode_only  # which are XLA's
        return not several_of_latents and not refusals("mosaic_gpu", target=TARGET, **case.kept, **how)

    return [case for case in CASES + HOPPER_CASES if not case.tiny and has(case)]
