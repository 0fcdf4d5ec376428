"""Named cases of paged attention: tests, tuning and benchmarks run the same ones."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_pool import KV_DTYPES, KVPool, pool_shape
from pallas_kernels.kv_write.cases import make_pool
from pallas_kernels.kv_write.oracle import encode
from pallas_kernels.on_device import on_device
from pallas_kernels.ragged_batch import RaggedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """rows: (start, count) of each; the rest of a bucket of num_tokens tokens and num_rows rows is padding.

    spans: (row, first position, position behind the last) of tokens that see each other, as those of an image do.

    max_context: tokens that block tables have room for, where that is more than the longest row has.

    v_head_dim: of V where it has another size than K.

    tiny: small enough to be run with arrays everywhere, in TPU interpret mode too; the others are sizes that models
    have, which are compiled for targets from shapes. invariant: only "xla" has such tiles. rope_dim: of a latent, what
    K has beside the head_dim values that are V; None is K and V of each head.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    num_tokens: int
    num_rows: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    v_head_dim: int | None = None
    rope_dim: int | None = None
    block_size: int = 16
    decode_only: bool = False
    invariant: bool = False
    window: int | None = None
    chunked: bool = False
    soft_cap: float | None = None
    has_sinks: bool = False
    causal: bool = True
    spans: tuple[tuple[int, int, int], ...] = ()
    max_context: int = 1
    scale: float | None = None
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    tiny: bool = False

    @property
    def softmax_scale(self) -> float:
        """scale, by default 1 / sqrt of what a key has."""
        return self.key_dim**-0.5 if self.scale is None else self.scale

    @property
    def key_dim(self) -> int:
        return self.head_dim + (self.rope_dim or 0)

    @property
    def value_dim(self) -> int:
        """Values of attention's result."""
        return self.v_head_dim or self.head_dim

    @property
    def kept(self) -> dict[str, Any]:
        """Sizes of a token's vectors in the pool, as `pool_shape` and `refusals` take them."""
        return {
            "head_dim": self.head_dim,
            "v_head_dim": self.rope_dim or self.value_dim,
            "is_latent": self.rope_dim is not None,
        }

    @property
    def shape_class(self) -> str:
        """All that a kernel is specialised to but for the sizes of a step."""
        features = {
            "chunks" if self.chunked else "window": self.window,
            "cap": self.soft_cap,
            "sinks": self.has_sinks,
            "encoder": not self.causal,
            "spans": self.spans,
        }
        kind = "decode" if self.decode_only else "mixed"
        width = self.head_dim if self.rope_dim is None else f"{self.head_dim}+{self.rope_dim}"
        width = width if self.v_head_dim is None else f"{self.head_dim}/{self.v_head_dim}"
        sizes = f"N={self.num_heads} K={self.num_kv_heads} H={width} C={self.block_size}"
        return " ".join([kind, sizes, *(name for name, has in features.items() if has)])

    @property
    def step(self) -> dict[str, Any]:
        """The case's arguments of make_schedule."""
        return {
            "num_tokens": self.num_tokens,
            "block_size": self.block_size,
            "window": self.window,
            "causal": self.causal,
            **({"chunked": True} if self.chunked else {}),
        }

    @property
    def attention(self) -> dict[str, Any]:
        """The case's arguments of paged_attention beside arrays."""
        return {"scale": self.softmax_scale, "soft_cap": self.soft_cap}

    @property
    def seen_ends(self) -> np.ndarray | None:
        """[num_tokens] int32 of RaggedBatch; None without spans."""
        if not self.spans:
            return None
        ends, offsets = np.zeros(self.num_tokens, np.int32), np.cumsum([0, *(count for _, count in self.rows)])
        for row, first, end in self.spans:
            start, count = self.rows[row]
            assert start < end <= start + count, "a span ends in the row's chunk"
            ends[offsets[row] + max(first - start, 0) : offsets[row] + end - start] = end
        return ends

    def oldest(self, position: int) -> int:
        """The first position that the query at this one sees."""
        if self.window is None:
            return 0
        return position - position % self.window if self.chunked else max(0, position - self.window + 1)

    @property
    def max_blocks(self) -> int:
        """Width of the block tables, at least that of the longest row."""
        longest = max(start + count for start, count in self.rows)
        return -(-max(longest, self.max_context) // self.block_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of paged_attention: arrays, or their shapes."""

    q: Any  # [T, N, H], of a latent [T, N, H + rope_dim]
    k: Any  # [T, K, H]
    v: Any  # [T, K, V], of a latent [T, 1, rope_dim]
    pool: KVPool  # with what came before the step
    batch: RaggedBatch
    sinks: Any  # [N] or None


class _Dtypes(TypedDict):
    dtype: str
    kv_dtype: str


class _Heads(TypedDict, total=False):
    num_heads: int
    num_kv_heads: int
    head_dim: int


_DECODE = ((5, 1), (130, 1), (63, 1), (64, 1))
_MIXED = ((40, 1), (0, 1), (129, 1), (0, 21), (33, 5))
_LONG = ((40, 1), (0, 1), (129, 1), (0, 70), (33, 5), (16, 48))
_tiny_decode = functools.partial(Case, rows=_DECODE, num_tokens=4, num_rows=4, decode_only=True, tiny=True)
_tiny_mixed = functools.partial(Case, rows=_MIXED, num_tokens=32, num_rows=8, tiny=True)
_F32: _Dtypes = {"dtype": "float32", "kv_dtype": "float32"}
TINY_CASES = (
    _tiny_decode(name="decode_gqa"),
    _tiny_decode(name="decode_one_token", rows=((0, 1),), num_tokens=1, num_rows=1, **_F32),
    _tiny_decode(name="decode_mqa_padding", num_kv_heads=1, block_size=32, num_tokens=8, num_rows=8),
    _tiny_decode(name="decode_mha_h64", num_kv_heads=4, head_dim=64, **_F32),
    _tiny_decode(name="decode_h96_window_sinks", head_dim=96, window=20, has_sinks=True),
    _tiny_decode(name="decode_h192_soft_cap", head_dim=192, block_size=64, soft_cap=2.0),
    _tiny_decode(name="decode_h256_scale", head_dim=256, block_size=128, scale=0.2),
    _tiny_decode(name="decode_h80_int8", kv_dtype="int8", head_dim=80, block_size=32),
    _tiny_decode(name="decode_h160", num_heads=16, num_kv_heads=4, head_dim=160),
    _tiny_decode(name="decode_big_blocks", rows=((5, 1), (300, 1)), num_tokens=2, num_rows=2, block_size=256),
    _tiny_decode(name="decode_int8", kv_dtype="int8", num_kv_heads=4),
    _tiny_decode(name="decode_fp8_e4m3_window", kv_dtype="fp8_e4m3", block_size=32, window=64),
    _tiny_mixed(name="mixed_gqa"),
    _tiny_mixed(name="mixed_mqa_f32", num_kv_heads=1, block_size=32, **_F32),
    _tiny_mixed(name="mixed_mha_h64", num_kv_heads=4, head_dim=64, num_tokens=29, num_rows=5, **_F32),
    _tiny_mixed(name="mixed_h96_window_sinks", head_dim=96, window=20, has_sinks=True),
    _tiny_mixed(name="mixed_h192_soft_cap", head_dim=192, block_size=64, soft_cap=2.0, **_F32),
    _tiny_mixed(name="mixed_h256_scale", head_dim=256, block_size=128, scale=0.2),
    _tiny_mixed(name="mixed_h80", head_dim=80, num_kv_heads=4),
    _tiny_mixed(name="mixed_h112_fp8_e4m3", kv_dtype="fp8_e4m3", head_dim=112, num_heads=8, num_kv_heads=4),
    _tiny_mixed(name="mixed_h160_int8", kv_dtype="int8", head_dim=160, num_kv_heads=4, window=20),
    _tiny_mixed(name="mixed_h240_soft_cap", head_dim=240, soft_cap=2.0, **_F32),
    _tiny_mixed(name="mixed_big_blocks", rows=((0, 21), (33, 5)), block_size=256),  # no row of one query
    _tiny_mixed(name="mixed_int8_h64_window", kv_dtype="int8", head_dim=64, window=20),
    _tiny_mixed(name="mixed_int8", kv_dtype="int8", dtype="float32"),
    _tiny_mixed(name="mixed_fp8_e4m3", kv_dtype="fp8_e4m3", num_heads=16),
    _tiny_mixed(name="mixed_fp8_e5m2", kv_dtype="fp8_e5m2", block_size=32),
    _tiny_mixed(name="prefill_long", rows=_LONG, num_tokens=128, num_rows=8, **_F32),
    _tiny_mixed(name="encoder", rows=((0, 1), (0, 70), (0, 48)), num_tokens=128, causal=False, head_dim=64, **_F32),
    _tiny_mixed(name="encoder_chunks", causal=False),
)
# Rows of a bucket for long contexts: some pass the first line of their table, none is long, so that they can be run.
_PASSING = ((5, 1), (2200, 1), (0, 1), (130, 1))
_tiny_wide = functools.partial(Case, rows=_PASSING, num_tokens=256, num_rows=256, tiny=True, **_F32)
WIDE_CASES = (
    _tiny_wide(name="decode_wide_40k", decode_only=True, max_context=40_960),
    _tiny_wide(name="decode_wide_128k_window", decode_only=True, max_context=131_072, window=300),
    _tiny_wide(name="mixed_wide_128k", rows=((2200, 1), (2030, 20), (40, 1), (4090, 9)), max_context=131_072),
)
# Rows with images: whole, behind their first tokens, several in a row, longer than the window, and none.
_SPANS = ((0, 5, 30), (1, 40, 77), (3, 10, 30), (3, 31, 70))
_IMAGED = ((0, 33), (64, 13), (129, 1), (0, 72), (33, 5))
_tiny_spans = functools.partial(Case, rows=_IMAGED, spans=_SPANS, num_tokens=128, num_rows=8, tiny=True)
SPAN_CASES = (
    _tiny_spans(name="spans_f32", **_F32),
    _tiny_spans(name="spans_window_h256", head_dim=256, window=20),
    _tiny_spans(name="spans_window_mqa_f32", num_kv_heads=1, window=33, **_F32),
)
# Stretches that end before, in and behind a row's chunk, shorter and longer than a tile.
CHUNKED_CASES = (
    _tiny_decode(name="decode_chunked", window=48, chunked=True),
    _tiny_mixed(name="mixed_chunked_f32", rows=_LONG, num_tokens=160, window=20, chunked=True, **_F32),
    _tiny_mixed(name="mixed_chunked_int8", kv_dtype="int8", head_dim=64, window=64, chunked=True),
)
# Heads wider than 256, and with values narrower than keys.
_narrow: Any = {"head_dim": 192, "v_head_dim": 128}
WIDE_HEAD_CASES = (
    _tiny_decode(name="decode_h512", num_heads=8, head_dim=512),
    _tiny_decode(name="decode_h512_fp8_window", kv_dtype="fp8_e4m3", head_dim=512, block_size=32, window=64),
    _tiny_mixed(name="mixed_h512_f32", rows=_LONG, num_tokens=128, head_dim=512, **_F32),
    _tiny_mixed(name="mixed_h512_int8_window", kv_dtype="int8", head_dim=512, window=33, soft_cap=2.0),
    _tiny_decode(name="decode_narrow_values", **_narrow),
    _tiny_mixed(name="mixed_narrow_values_window_sinks", window=20, has_sinks=True, **_narrow),
    _tiny_mixed(name="mixed_narrow_values_int8", kv_dtype="int8", num_kv_heads=1, block_size=64, **_narrow),
    _tiny_mixed(name="mixed_narrow_values_f32", rows=_LONG, num_tokens=128, head_dim=96, v_head_dim=64, **_F32),
)
_invariant = functools.partial(
    Case, rows=_LONG, num_tokens=128, num_rows=64, invariant=True, tiny=True, head_dim=16, **_F32
)
INVARIANT_CASES = (
    _invariant(name="invariant"),
    _invariant(name="invariant_window", window=20),
    _invariant(name="invariant_chunked", window=20, chunked=True),
)
_TINY_LATENT: Any = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 128, "rope_dim": 16}
_latent_decode = functools.partial(_tiny_decode, **_TINY_LATENT)
_latent_mixed = functools.partial(_tiny_mixed, **_TINY_LATENT)
_ENDS = ((127, 1), (0, 1), (128, 1), (300, 1))  # of a query tile, and within one
_VERIFIED = ((126, 4), (5, 1), (0, 2), (40, 8), (125, 3))  # the last one ends the step within a query tile
# "mosaic_gpu" has those of rows of one query.
LATENT_CASES = (
    _latent_decode(name="decode_latent", num_tokens=5, num_rows=6),
    _latent_decode(name="decode_latent_f32_soft_cap", rows=_ENDS, num_tokens=8, num_rows=8, soft_cap=20.0, **_F32),
    _latent_decode(name="decode_latent_fp8", block_size=32, kv_dtype="fp8_e4m3"),
    _latent_mixed(name="mixed_latent", num_tokens=40, num_rows=6),
    _latent_mixed(name="verify_latent_f32_soft_cap", rows=_VERIFIED, num_tokens=18, num_rows=5, soft_cap=20.0, **_F32),
)
_decode = functools.partial(Case, rows=((2047, 1),) * 64, num_tokens=64, num_rows=64, decode_only=True)
_prefill = functools.partial(Case, rows=((3584, 512),), num_tokens=512, num_rows=1)
# Each row's token and three drafts.
_verify = functools.partial(Case, rows=((2044, 4),) * 64, num_tokens=256, num_rows=64)
_mixed = functools.partial(Case, rows=(*((2047, 1),) * 60, (1024, 452)), num_tokens=512, num_rows=64)
_LLAMA_8B: _Heads = {"num_heads": 32, "num_kv_heads": 8}
_QWEN3_SMALL: _Heads = {"num_heads": 16, "num_kv_heads": 8}  # 0.6B
_QWEN3_MOE_TP4: _Heads = {"num_heads": 8, "num_kv_heads": 1}  # 30B-A3B, on each of four devices
_GEMMA: _Heads = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256}
_LATENT: Any = {"num_kv_heads": 1, "head_dim": 512, "rope_dim": 64}
_GEMMA4: _Heads = {"num_heads": 32, "num_kv_heads": 4, "head_dim": 512}  # 31B's layers without a window
_MIMO: Any = {"num_heads": 64, "head_dim": 192, "v_head_dim": 128}
_LLAMA4: _Heads = {"num_heads": 40, "num_kv_heads": 8}
_OSS: _Heads = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64}


def _long(name: str, context: int, *, chunk: int = 1, **how: Any) -> Case:
    """256 rows of so many tokens, the last one with a chunk of its prompt."""
    rows = (*((context - 1, 1),) * 255, (context - chunk, chunk))
    return Case(name=name, rows=rows, num_tokens=255 + chunk, num_rows=256, decode_only=chunk == 1, **how)


# Their block tables are more than scalar memory. They are compiled, not counted: a layer has 100,000 steps.
LONG_CASES = tuple(
    case
    for name, context in (("40k", 40_960), ("128k", 131_072))
    for case in (
        _long(f"llama_8b_decode_{name}", context, **_LLAMA_8B),
        _long(f"qwen3_30b_tp4_decode_{name}", context, **_QWEN3_MOE_TP4),
        _long(f"deepseek_v3_decode_{name}", context, num_heads=128, **_LATENT),
        _long(f"llama_8b_mixed_{name}", context, chunk=257, **_LLAMA_8B),
    )
)

REAL_CASES = (
    *(_decode(name=f"llama_8b_decode_c{C}", block_size=C, **_LLAMA_8B) for C in (16, 128)),
    *(_decode(name=f"qwen3_0.6b_decode_c{C}", block_size=C, **_QWEN3_SMALL) for C in (16, 128)),
    *(_decode(name=f"qwen3_30b_tp4_decode_c{C}", block_size=C, **_QWEN3_MOE_TP4) for C in (16, 64, 128)),
    _decode(name="llama_8b_decode_int8", block_size=32, kv_dtype="int8", **_LLAMA_8B),
    _decode(name="llama_8b_decode_fp8", block_size=32, kv_dtype="fp8_e4m3", **_LLAMA_8B),
    _decode(name="gemma_decode", block_size=16, window=1024, soft_cap=50.0, **_GEMMA),
    _decode(name="oss_decode", block_size=16, window=128, has_sinks=True, **_OSS),
    _decode(name="mha_h96_decode", num_heads=32, num_kv_heads=32, head_dim=96),
    _decode(name="deepseek_v3_decode", num_heads=128, block_size=64, **_LATENT),
    _decode(name="deepseek_v3_decode_c16", num_heads=128, **_LATENT),
    _decode(name="deepseek_v3_tp8_decode", num_heads=16, block_size=64, **_LATENT),
    _prefill(name="deepseek_v3_prefill", num_heads=128, block_size=64, **_LATENT),
    _prefill(name="deepseek_v3_tp8_prefill", num_heads=16, block_size=64, **_LATENT),
    _verify(name="deepseek_v3_verify", num_heads=128, block_size=64, **_LATENT),
    _decode(name="h192_decode", num_heads=16, num_kv_heads=4, head_dim=192, block_size=32),
    *(_prefill(name=f"llama_8b_prefill_c{C}", block_size=C, **_LLAMA_8B) for C in (16, 128)),
    _prefill(name="qwen3_30b_tp4_prefill", block_size=64, **_QWEN3_MOE_TP4),
    _prefill(name="oss_prefill", block_size=16, window=128, has_sinks=True, **_OSS),
    _prefill(name="gemma_prefill", block_size=16, window=1024, soft_cap=50.0, **_GEMMA),
    _mixed(name="llama_8b_mixed", **_LLAMA_8B),
    _mixed(name="llama_8b_mixed_int8", block_size=32, kv_dtype="int8", **_LLAMA_8B),
    _mixed(name="qwen3_30b_tp4_mixed", block_size=64, **_QWEN3_MOE_TP4),
    # Rows in their second chunk of 8,192 tokens: 1,024 of it, and 4,096.
    _decode(name="llama4_decode", rows=((9215, 1),) * 64, window=8192, chunked=True, **_LLAMA4),
    _prefill(name="llama4_prefill", rows=((11776, 512),), window=8192, chunked=True, **_LLAMA4),
    _decode(name="gemma4_decode", **_GEMMA4),
    _prefill(name="gemma4_prefill", **_GEMMA4),
    _decode(name="mimo_v2_decode", num_kv_heads=4, **_MIMO),
    _decode(name="mimo_v2_decode_window", num_kv_heads=8, window=128, has_sinks=True, **_MIMO),
    _prefill(name="mimo_v2_prefill", num_kv_heads=4, **_MIMO),
    _prefill(name="gemma3_prefill_image", window=1024, spans=((0, 3700, 3956),), **_GEMMA),
    Case(
        name="bert_encoder",
        rows=((0, 512),) * 4,
        num_tokens=2048,
        num_rows=4,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        causal=False,
    ),
)

CASES = TINY_CASES + CHUNKED_CASES + WIDE_HEAD_CASES + SPAN_CASES + INVARIANT_CASES + LATENT_CASES + REAL_CASES

_POOL_BYTES = 2**30  # XLA puts a pool that fits there into VMEM, and a kernel's schedule is then another


def make_arguments(case: Case, seed: int = 0, implementation: str = "xla") -> Arguments:
    """Random queries, keys and values; everything in the pool that is not a row's earlier context is NaN.

    The null block first of all, and the places of the step's own tokens. In an int8 pool it is the scales.
    """
    rng = np.random.default_rng(seed)
    R, C, K, H = case.num_rows, case.block_size, case.num_kv_heads, case.head_dim
    starts = np.array([start for start, _ in case.rows], np.int32)
    widths = np.array([-(-(start + count) // C) for start, count in case.rows])
    tables = np.zeros((R, case.max_blocks), np.int32)
    ids = 2 + rng.permutation(widths.sum())  # block 1 belongs to nobody
    vectors = (2 * K, H) if case.rope_dim is None else (K, case.key_dim)
    context = np.full((widths.sum() + 2, C, *vectors), np.nan, np.float32)
    for r, end in enumerate(np.cumsum(widths)):
        tables[r, : widths[r]] = ids[end - widths[r] : end]
        for position in range(case.oldest(int(starts[r])), starts[r]):
            context[tables[r, position // C], position % C] = rng.standard_normal(vectors)
        tables[r, : case.oldest(int(starts[r])) // C] = 0  # blocks behind the window are released
    sinks = on_device(rng.standard_normal(case.num_heads), np.float32) if case.has_sinks else None
    q = on_device(rng.standard_normal((case.num_tokens, case.num_heads, case.key_dim)), case.dtype)
    if case.rope_dim is None:
        k, v = (on_device(x, case.dtype) for x in rng.standard_normal((2, case.num_tokens, K, H)))
        v = v[..., : case.value_dim]
        context[..., 1::2, case.value_dim :] *= 0  # which leaves NaN
        pool = make_pool(context, KV_DTYPES[case.kv_dtype], implementation, case.value_dim)
    else:
        new = rng.standard_normal((case.num_tokens, K, case.key_dim))
        k, v = (on_device(x, case.dtype) for x in np.split(new, [H], axis=-1))
        pool = _latents(case, context, implementation)
    return Arguments(q=q, k=k, v=v, pool=pool, batch=make_batch(case, tables), sinks=sinks)


def make_batch(case: Case, tables: np.ndarray) -> RaggedBatch:
    """The case's rows with these block tables, [R, M] int32."""
    starts, counts = np.zeros((2, case.num_rows), np.int32)
    for r, (start, count) in enumerate(case.rows):
        starts[r], counts[r] = start, count
    return RaggedBatch(
        block_tables=on_device(tables, np.int32),
        starts=on_device(starts, np.int32),
        counts=on_device(counts, np.int32),
        query_offsets=on_device(np.cumsum(counts) - counts, np.int32),
        seen_ends=None if case.seen_ends is None else on_device(case.seen_ends, np.int32),
    )


def make_shapes(case: Case, implementation: str = "mosaic_tpu") -> Arguments:
    """The case's arguments as ShapeDtypeStructs, with a pool of 1 GiB or more."""
    T, R, K, H, C = case.num_tokens, case.num_rows, case.num_kv_heads, case.head_dim, case.block_size
    dtype = KV_DTYPES[case.kv_dtype]
    pool = pool_shape(
        num_blocks=-(-_POOL_BYTES // (C * K * (H + case.kept["v_head_dim"]) * dtype.itemsize)),
        block_size=C,
        num_kv_heads=K,
        **case.kept,
        dtype=dtype,
        implementation=implementation,
    )
    ints: Any = jax.ShapeDtypeStruct((R,), jnp.int32)
    tables: Any = jax.ShapeDtypeStruct((R, case.max_blocks), jnp.int32)
    ends: Any = jax.ShapeDtypeStruct((T,), jnp.int32) if case.spans else None
    return Arguments(
        q=jax.ShapeDtypeStruct((T, case.num_heads, case.key_dim), case.dtype),
        k=jax.ShapeDtypeStruct((T, K, H), case.dtype),
        v=jax.ShapeDtypeStruct((T, K, case.kept["v_head_dim"]), case.dtype),
        pool=pool,
        batch=RaggedBatch(block_tables=tables, starts=ints, counts=ints, query_offsets=ints, seen_ends=ends),
        sinks=jax.ShapeDtypeStruct((case.num_heads,), jnp.float32) if case.has_sinks else None,
    )


def _latents(case: Case, context: np.ndarray, implementation: str) -> KVPool:
    """The pool of latents, [P, C, 1, H + rope_dim] float32."""
    P, C = context.shape[:2]
    dtype = KV_DTYPES[case.kv_dtype]
    form = pool_shape(
        num_blocks=P, block_size=C, num_kv_heads=1, **case.kept, dtype=dtype, implementation=implementation
    )
    unowned = np.isnan(context[..., 0, 0])
    context = np.nan_to_num(context) if dtype == np.int8 else context  # it has no NaN: scales do
    parts = [encode(part, dtype) for part in np.split(context, [case.head_dim], axis=-1)]
    values = jax.device_put(np.concatenate([values for values, _ in parts], axis=-1).view(form.values.dtype))
    if form.scales is None:
        return dataclasses.replace(form, values=values)
    scales = np.stack([np.where(unowned, np.nan, s[..., 0]) for _, s in parts if s is not None], axis=1)
    return dataclasses.replace(form, values=values, scales=on_device(scales, np.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a case, whatever the kernel."""

    kv_tokens: int  # that a row or, in prefill, a row's chunk must read
    flops: int  # of visible query-key pairs, but for those that spans add
    kv_bytes: int  # of these tokens in the pool, as the kernels keep them

    @classmethod
    def of(cls, case: Case, implementation: str = "mosaic_tpu") -> Work:
        """Counted from the rows."""
        pool = make_shapes(case, implementation).pool
        lanes = pool.values.shape[3]
        on_tpu = -(-lanes // 128) * 128 if implementation == "mosaic_tpu" else lanes  # a TPU's tiles have 128
        values = pool.values.size // lanes * on_tpu * pool.values.dtype.itemsize
        per_token = (values + (0 if pool.scales is None else pool.scales.size * 4)) // pool.values.shape[0]
        tokens = pairs = 0
        for start, count in case.rows:
            last = start + count
            tokens += last - case.oldest(start)
            pairs += sum((p + 1 if case.causal else last) - case.oldest(p) for p in range(start, last))
        return cls(
            kv_tokens=tokens,
            flops=2 * pairs * case.num_heads * (case.key_dim + case.value_dim),
            kv_bytes=tokens * per_token // case.block_size,
        )
