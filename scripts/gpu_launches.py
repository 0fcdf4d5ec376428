"""The launches whose ceilings are counted, and the work of each: a kernel more is an entry more.

Every case of paged attention in sizes that models have, two that were measured on an H200, products with weights in a
form, and two of jax's own kernels to hold the ruler against. Dense products have the shape of Llama-3-8B's gate,
experts' those of Qwen3-30B-A3B's gates with as many pairs each. Float8 by float8 with one scale is XLA's own product
and not here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

from scripts import gpu_static  # isort: skip  # before jax: it sets what the compilers read

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention_mgpu, hopper_matmul_mgpu

from checkpoints.stored_weight import WeightForm
from pallas_kernels.grouped_matmul.mosaic_gpu import choose_rows, grouped_product
from pallas_kernels.grouped_matmul.tiles_of_experts import tiles_of_experts
from pallas_kernels.kv_pool import KV_DTYPES
from pallas_kernels.paged_attention.cases import Case, Work
from pallas_kernels.paged_attention.gpu.ceilings import MULTIPROCESSORS
from pallas_kernels.paged_attention.gpu.config import LANES, Divided, Form
from pallas_kernels.quantized_matmul import QuantizedWeight, quantized_matmul
from pallas_kernels.quantized_matmul.gpu.config import ProductTiles
from pallas_kernels.quantized_matmul.mosaic_gpu import form_of
from scripts.gpu_static import Compiled
from scripts.hopper_cases import gpu_cases

MEASURED_CASES = (
    Case(
        name="llama_8b_decode_4k",
        rows=((4095, 1),) * 64,
        num_tokens=64,
        num_rows=64,
        num_heads=32,
        num_kv_heads=8,
        decode_only=True,
    ),
    Case(name="llama_8b_prefill_4k", rows=((0, 4096),), num_tokens=4096, num_rows=1, num_heads=32, num_kv_heads=8),
)

_MEASURED_US = {"llama_8b_decode_4k": 294, "llama_8b_prefill_4k": 489.6}
FORMS = {
    "int4": WeightForm(kind="int4", group=128, scale_dtype="bfloat16"),
    "awq": WeightForm(kind="int4", group=128, scale_dtype="float16", has_zeros=True),
    "mxfp4": WeightForm(kind="mxfp4", group=32, scale_dtype="uint8"),
    "int8": WeightForm(kind="int8"),
    "fp8": WeightForm(kind="fp8_e4m3"),
    "fp8_blocks": WeightForm(kind="fp8_e4m3", group=128),
}
_SHAPE = (14336, 4096)
_EXPERTS, _EXPERTS_PER_TOKEN, _EXPERT_SHAPE = 128, 8, (768, 2048)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The work of one kernel that multiplies, over the whole chip.

    consumers: warpgroups that multiply, beside one that fetches. operations: multiplications and additions. lanes: of a
    token, that hold a head; the kernel fills them up to the rows of its products, or to the columns where tokens are
    rows. None: operations count what is filled up too. fetched_bytes: that come into shared memory, None where that is
    not known. hbm_bytes: that must come from or go to HBM at least once.
    """

    name: str
    consumers: int
    operations: float
    lanes: int | None = None
    fetched_bytes: float | None
    hbm_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """parts: the kernels that multiply; where two have as many consumers, in the order in which they are compiled.

    has_roles: arms of the main loop are each one consumer's, so that over all of them each runs once a stage.
    measured_us: on an H200, with all that XLA does around the kernels.
    """

    name: str
    compile: Callable[[], Compiled]
    parts: tuple[Part, ...]
    has_roles: bool = False
    measured_us: float | None = None


def launches() -> list[Launch]:
    """All of them."""
    attention = map(_attention, [*gpu_cases(), *MEASURED_CASES])
    return [*attention, *_product_launches(), _jax_attention(), _jax_matmul()]


def _attention(case: Case) -> Launch:
    """Paged attention: decoding rows, and where there may be others, those."""
    config = gpu_static.config_of(case)
    parts = [_decode(case, config.decode)]
    if config.prefill is not None:
        parts.append(_prefill(case, config.prefill))
    return Launch(
        name=case.name,
        compile=functools.partial(gpu_static.compile_case, case),
        parts=tuple(parts),
        has_roles=KV_DTYPES[case.kv_dtype].itemsize == 1,  # converting K and V
        measured_us=_MEASURED_US.get(case.name),
    )


def _decode(case: Case, form: Form) -> Part:
    """Every token of a KV head is multiplied by the queries of its heads."""
    work = _work(case, tuple(row for row in case.rows if row[1] == 1))
    group = case.num_heads // case.num_kv_heads
    return Part(
        name="decode",
        consumers=form.consumers,
        operations=work.flops * _multiplied(case, form) / (case.key_dim + case.value_dim),
        lanes=group,
        fetched_bytes=work.kv_bytes,
        hbm_bytes=work.kv_bytes,
    )


def _prefill(case: Case, form: Form) -> Part:
    """Each tile of queries fetches the tokens that its queries see; HBM gives K and V once and the queries."""
    rows = tuple(row for row in case.rows if row[1] > 1)
    work = _work(case, rows)
    width = case.key_dim + case.value_dim
    tokens = work.flops / (2 * case.num_heads * width) * case.num_kv_heads / form.tile_q  # of all tiles and KV heads
    per_token = work.kv_bytes / max(1, work.kv_tokens) / case.num_kv_heads
    queries = sum(count for _, count in rows) * case.num_heads * width * 2
    return Part(
        name="prefill",
        consumers=form.consumers,
        operations=2 * tokens * form.lane_groups * LANES * _multiplied(case, form),
        fetched_bytes=tokens * per_token,
        hbm_bytes=work.kv_bytes + queries,
    )


def _multiplied(case: Case, form: Form) -> int:
    """Lanes of a token that each query is multiplied with; where consumers divide V, each has the scores for itself."""
    return case.value_dim + case.key_dim * (form.consumers if form.divided is Divided.VALUES else 1)


def _work(case: Case, rows: tuple[tuple[int, int], ...]) -> Work:
    """The work of these rows of the case."""
    if not rows:
        return Work(kv_tokens=0, flops=0, kv_bytes=0)
    return Work.of(dataclasses.replace(case, rows=rows), "mosaic_gpu")


def _jax_attention() -> Launch:
    """jax's own attention: 32 heads, 4,096 tokens, and every token sees all the others."""
    S, N, H, tile_q = 4096, 32, 128, 128
    config = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2)
    operand = jax.ShapeDtypeStruct((1, S, N, H), jnp.float16)

    def compiled() -> Compiled:
        with mock.patch.object(attention_mgpu, "cuda_versions"):  # it asks a CUDA that is not here for its version
            return gpu_static.compile_for_h200(lambda *a: attention_mgpu.attention(*a, config), *[operand] * 3)

    each = S * N * H * 2
    part = Part(
        name="attention",
        consumers=2,
        operations=4 * N * S * S * H,
        fetched_bytes=2 * each * S / tile_q,
        hbm_bytes=4 * each,
    )
    return Launch(name="jax_attention_4k", compile=compiled, parts=(part,))


def _jax_matmul() -> Launch:
    """jax's own product of matrices of 8,192 by 8,192, in tiles of 128 by 256, half of one for each consumer."""
    size = 8192
    config = hopper_matmul_mgpu.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
    operand = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)

    def compiled() -> Compiled:
        with mock.patch.object(hopper_matmul_mgpu, "get_num_sms", lambda: MULTIPROCESSORS):
            return gpu_static.compile_for_h200(
                lambda a, b: hopper_matmul_mgpu.matmul(a, b, None, config), *[operand] * 2
            )

    each = size * size * 2
    part = Part(
        name="matmul",
        consumers=2,
        operations=2 * size**3,
        fetched_bytes=each * (size / 256 + size / 128),
        hbm_bytes=3 * each,
    )
    return Launch(name="jax_matmul_8192", compile=compiled, parts=(part,))


def _product_launches() -> list[Launch]:
    """A decode step's and a prefill's of each form, and of experts in 4 bits."""
    dense = [_dense(name, num_tokens) for name in FORMS for num_tokens in (16, 512)]
    return [*dense, *(_grouped(name, num_tokens) for name in ("int4", "mxfp4") for num_tokens in (64, 2048))]


def _dense(name: str, num_tokens: int) -> Launch:
    weight = _weight(name, _SHAPE)
    tiles = ProductTiles.choose(num_tokens, _SHAPE[0], form_of(weight), gpu_static.TARGET)
    x = jax.ShapeDtypeStruct((num_tokens, _SHAPE[1]), jnp.bfloat16)
    return Launch(
        name=f"product_{name}_{num_tokens}",
        compile=functools.partial(gpu_static.compile_for_h200, quantized_matmul, x, weight),
        parts=(_part(weight, tiles, num_tokens=num_tokens, row_tiles=-(-num_tokens // tiles.tile_rows)),),
    )


def _grouped(name: str, num_tokens: int) -> Launch:
    """One of an expert MLP's three products."""
    stack, pairs = _weight(name, (_EXPERTS, *_EXPERT_SHAPE)), num_tokens * _EXPERTS_PER_TOKEN
    rows = choose_rows(pairs, _EXPERTS)
    tiles = ProductTiles.choose(
        pairs, _EXPERT_SHAPE[0], form_of(stack), gpu_static.TARGET, is_divided=False, tile_rows=rows
    )
    row_tiles = _EXPERTS * -(-pairs // _EXPERTS // rows)  # if all experts have as many pairs

    def run(x: jax.Array, expert_ids: jax.Array, stack: QuantizedWeight) -> jax.Array:
        places = tiles_of_experts(expert_ids, num_here=_EXPERTS, rows=rows)
        return grouped_product(x[places.tokens], stack, places)

    def compiled() -> Compiled:
        x = jax.ShapeDtypeStruct((num_tokens, _EXPERT_SHAPE[1]), jnp.bfloat16)
        ids = jax.ShapeDtypeStruct((num_tokens, _EXPERTS_PER_TOKEN), jnp.int32)
        return gpu_static.compile_for_h200(run, x, ids, stack)

    return Launch(
        name=f"product_of_experts_{name}_{num_tokens}",
        compile=compiled,
        parts=(_part(stack, tiles, num_tokens=pairs, row_tiles=row_tiles),),
    )


def _part(weight: QuantizedWeight, tiles: ProductTiles, *, num_tokens: int, row_tiles: int) -> Part:
    """Every tile fetches its codes and its tokens; HBM gives codes, scales, zero points and tokens once.

    row_tiles: of all experts. Places of a tile that no token has are multiplied too. Experts' sums stay float32.
    """
    outputs, inputs = weight.shape[-2:]
    row_bytes = weight.codes.shape[-1] * weight.codes.dtype.itemsize
    out_bytes = 4 if weight.ndim > 2 or tiles.is_divided else 2
    leaves = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))
    return Part(
        name="product",
        consumers=tiles.consumers,
        operations=2 * row_tiles * tiles.tile_rows * outputs * inputs,
        fetched_bytes=row_tiles * (outputs * row_bytes + outputs // tiles.tile_out * tiles.tile_rows * inputs * 2),
        hbm_bytes=leaves + num_tokens * (inputs * 2 + outputs * out_bytes),
    )


def _weight(name: str, shape: tuple[int, ...]) -> QuantizedWeight:
    """The shapes of a weight [.., O, I]."""
    form = FORMS[name]
    leaves: dict[str, Any] = {
        leaf: jax.ShapeDtypeStruct(size, jnp.dtype(dtype)) for leaf, (size, dtype) in form.leaves(shape).items()
    }
    return QuantizedWeight(kind=form.kind, kernels=gpu_static.TARGET, **leaves)
