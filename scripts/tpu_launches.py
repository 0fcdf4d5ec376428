"""The launches of TPUs whose cycles are counted, and the work of each: a kernel more is an entry more.

Every case of paged attention in sizes that models have, products with weights in a form, experts that are codes, the
indexer, recurrences, and, to hold the ruler against, kernels of jax and a product of XLA.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from scripts import tpu_attention  # isort: skip  # before jax: it sets what libtpu reads

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.megablox import gmm

from checkpoints.stored_weight import WeightForm, made_form
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.grouped_matmul import ExpertStack, expert_mlp
from pallas_kernels.indexer import choose_keys
from pallas_kernels.paged_attention.cases import REAL_CASES, Case, Work
from pallas_kernels.quantized_matmul import QuantizedWeight, quantized_matmul
from pallas_kernels.row_recurrence import for_kernels
from pallas_kernels.state_rows import StateRows
from pallas_kernels.state_space import state_space
from pallas_kernels.target import Target
from scripts import tpu_indexer

GENERATIONS = ("v5e", "v6e", "v7x")
_OUTPUTS, _INPUTS = 14336, 4096  # of Llama-3-8B's gate
_POOL_SLOTS = 1024
_GROUP = 16  # rows that a recurrence takes at once
_TILE = 64  # tokens likewise
_BF16 = jnp.bfloat16
_FORMS: dict[str, WeightForm] = {
    **{name: form for name in ("int8", "int8-a16", "fp8-a16", "int4-g128") if (form := made_form(name)) is not None},
    "fp8-blocks": WeightForm(kind="fp8_e4m3", group=128),
    "mxfp4": WeightForm(kind="mxfp4", group=32, scale_dtype="uint8"),
}
_LONG_COMPILES = {("gemma_prefill", "v7x")}  # of more than ten minutes
_ON_V6E = ("gemma4_", "mimo_v2_", "gemma3_prefill_image")  # names begin so: they compile for minutes, so for one alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function with arrays and shapes. peak: the rate of the matrix unit that bounds it, "bf16", "int8" or "fp8".

    hbm_bytes: that must cross at least once. turns: of loops of XLA whose ends are data, in the order of its text.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    hbm_bytes: int
    flops: int
    donate: tuple[int, ...] = ()
    peak: str = "bf16"
    turns: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """counted_by: "kernels", whose bundles are counted; "operations", for those of XLA's operations too; "estimate",
    for what XLA's cost model says where there is no kernel."""

    name: str
    program: Callable[[str], Program]
    generations: tuple[str, ...] = GENERATIONS
    counted_by: str = "kernels"


def launches() -> list[Launch]:
    """All of them, in the order in which they are kept."""
    return [
        *map(_attention, REAL_CASES),
        *(_product(form, rows) for form in ("int8-a16", "int8", "fp8-a16", "int4-g128") for rows in (16, 64, 512)),
        *(_product(form, 128) for form in ("fp8-a16", "int4-g128")),
        _xla_product(),
        _experts("gpt_oss_120b", "mxfp4", num_experts=128, per_token=4, width=2880, hidden=2880),
        _experts("qwen3_30b", "int4-g128", num_experts=128, per_token=8, width=2048, hidden=768),
        _experts("deepseek_v3_ep8", "fp8-blocks", num_experts=32, per_token=8, width=7168, hidden=2048),
        _dense_experts("qwen3_30b", num_experts=128, per_token=8, width=2048, hidden=768),
        *(_indexer(context) for context in (4096, 32_768)),
        *(make(rows, count) for make in (_gated_delta, _kda, _mamba2) for rows, count in ((64, 1), (1, 512))),
        *(_jax_attention(name) for name in ("llama_8b_decode_c16", "llama_8b_prefill_c128")),
        _jax_experts(),
    ]


def _attention(case: Case) -> Launch:
    def program(generation: str) -> Program:
        fn, args = tpu_attention.launch(case, Target.named(f"tpu:{generation}"))
        work = Work.of(case)
        return Program(fn=fn, args=args, donate=(3,), hbm_bytes=work.kv_bytes, flops=work.flops)

    is_fp8 = case.kv_dtype.startswith("fp8")
    generations = tuple(
        g for g in GENERATIONS if (_target(g).has_fp8 or not is_fp8) and (case.name, g) not in _LONG_COMPILES
    )
    generations = ("v6e",) if case.name.startswith(_ON_V6E) else generations
    return Launch(name=case.name, program=program, generations=generations)


def _form_weight(form: WeightForm, shape: tuple[int, ...], target: Target) -> QuantizedWeight:
    """The shapes of a weight [.., O, I]."""
    leaves: dict[str, Any] = {
        leaf: jax.ShapeDtypeStruct(size, jnp.dtype(dtype)) for leaf, (size, dtype) in form.leaves(shape).items()
    }
    return QuantizedWeight(kind=form.kind, activations=form.activations, kernels=target, **leaves)


def _product(name: str, num_rows: int) -> Launch:
    """Rows of bfloat16 times a weight in a form; "int8" alone rounds the rows too."""
    form, shape = _FORMS[name], (_OUTPUTS, _INPUTS)

    def program(generation: str) -> Program:
        weight = _form_weight(form, shape, _target(generation))
        return Program(
            fn=quantized_matmul,
            args=[_shape(num_rows, _INPUTS), weight],
            hbm_bytes=_bytes(weight) + 2 * num_rows * (_INPUTS + _OUTPUTS),
            flops=2 * num_rows * _INPUTS * _OUTPUTS,
            peak="bf16" if form.activations is None else "int8",
        )

    has_product = form.activations is None  # TPU7x multiplies no int8
    generations = tuple(g for g in GENERATIONS if has_product or _target(g).int8_ops_per_s is not None)
    return Launch(name=f"product_{name.replace('-', '_')}_{num_rows}", program=program, generations=generations)


def _xla_product() -> Launch:
    """The same in bfloat16, which XLA computes and estimates: what forms are faster than, and a check of the ruler."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(_BF16)

    def program(generation: str) -> Program:
        args = [_shape(512, _INPUTS), _shape(_OUTPUTS, _INPUTS)]
        moved = _bytes(args) + 2 * 512 * _OUTPUTS
        return Program(fn=product, args=args, hbm_bytes=moved, flops=2 * 512 * _INPUTS * _OUTPUTS)

    return Launch(name="xla_product_bf16_512", program=program, counted_by="operations")


def _experts(model: str, form: str, *, num_experts: int, per_token: int, width: int, hidden: int) -> Launch:
    """64 rows that choose all experts evenly."""

    def program(generation: str) -> Program:
        out, into = ((num_experts, hidden, width), (num_experts, width, hidden))
        gate, up, down = (_form_weight(_FORMS[form], shape, _target(generation)) for shape in (out, out, into))
        stack = ExpertStack(gate=gate, up=up, down=down, first_expert=jnp.zeros((), jnp.int32))
        ids = (np.arange(64 * per_token, dtype=np.int32) % num_experts).reshape(64, per_token)
        return Program(
            fn=expert_mlp,
            args=[_shape(64, width), ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32), stack],
            hbm_bytes=_bytes((gate, up, down)) + 2 * 2 * 64 * width,
            flops=2 * 3 * 64 * per_token * width * hidden,
        )

    return Launch(name=f"experts_{model}_{form.replace('-', '_')}_64", program=program)


def _dense_experts(model: str, *, num_experts: int, per_token: int, width: int, hidden: int) -> Launch:
    """The same in bfloat16."""
    E, D, F = num_experts, width, hidden

    def program(generation: str) -> Program:
        weights = {"gate": _shape(E, F, D), "up": _shape(E, F, D), "down": _shape(E, D, F)}
        stack = ExpertStack(**weights, first_expert=jnp.zeros((), jnp.int32), kernels=_target(generation))
        ids = (np.arange(64 * per_token, dtype=np.int32) % E).reshape(64, per_token)
        return Program(
            fn=expert_mlp,
            args=[_shape(64, D), ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32), stack],
            hbm_bytes=_bytes(weights) + 2 * 2 * 64 * D,
            flops=2 * 3 * 64 * per_token * D * F,
        )

    return Launch(name=f"experts_{model}_bf16_64", program=program)


def _indexer(context: int) -> Launch:
    """DeepSeek-V3.2's choice of 2,048 keys in 8 rows of decoding."""

    def program(generation: str) -> Program:
        step = tpu_indexer.Step(generation, context, rows=8, block_size=64, num_heads=16)
        return Program(
            fn=functools.partial(choose_keys, implementation="mosaic_tpu"),
            args=[*step.of_indexer, step.pool, step.indexer],
            donate=(3,),
            hbm_bytes=8 * context * (tpu_indexer.KEY_BYTES + tpu_indexer.LIMIT_BYTES),
            flops=2 * 8 * context * tpu_indexer.HEADS * tpu_indexer.WIDTH,
        )

    return Launch(name=f"indexer_{context // 1024}k", program=program)


def _gated_delta(num_rows: int, count: int) -> Launch:
    """Qwen3-Next-80B's: 32 heads of 128 by 128, two for each key."""
    return _recurrence("gated_delta", gated_delta, num_rows, count, keys=(16, 128), state=(32, 128, 128), of_rule=3)


def _kda(num_rows: int, count: int) -> Launch:
    """Kimi-Linear-48B's: a decay for each channel of k."""
    return _recurrence("kda", gated_delta, num_rows, count, keys=(32, 128), state=(32, 128, 128), of_rule=3, decays=128)


def _mamba2(num_rows: int, count: int) -> Launch:
    """Granite-4.0-H-Small's: 128 heads of 64 with 128 states in one group."""
    return _recurrence("mamba2", state_space, num_rows, count, keys=(1, 128), state=(128, 64, 128), of_rule=2)


def _recurrence(
    name: str,
    op: Callable[..., Any],
    num_rows: int,
    count: int,
    *,
    keys: tuple[int, int],
    state: tuple[int, int, int],
    of_rule: int,
    decays: int | None = None,
) -> Launch:
    """Rows of `count` tokens each, in a step of 16 rows or more. of_rule: products of a token with each state.

    Tiles of rows whose channels decay each by itself are XLA's, all else is the kernels'.
    """
    tokens, width = num_rows * count, 128 if op is state_space else state[2]
    heads = state[0]
    values = _shape(tokens, heads, state[1] if op is state_space else width)
    decay = jax.ShapeDtypeStruct((tokens, heads, decays) if decays else (tokens, heads), jnp.float32)
    beta = [] if op is state_space else [jax.ShapeDtypeStruct((tokens, heads), jnp.float32)]
    given = [_shape(tokens, *keys), _shape(tokens, *keys), values, decay, *beta]
    is_decode, is_xla = count == 1, count > 1 and decays is not None
    places = np.arange(max(num_rows, _GROUP), dtype=np.int32)
    counts = np.where(places < num_rows, count, 0).astype(np.int32)
    given_rows: dict[str, Any] = {
        "slots": places + 1,
        "starts": _TILE * (places + 1),
        "counts": counts,
        "offsets": places * count,
    }
    pool = jax.ShapeDtypeStruct((_POOL_SLOTS, *state), jnp.float32)
    moved = _bytes(given) + _bytes(values) + 2 * 4 * num_rows * int(np.prod(state))

    def program(generation: str) -> Program:
        rows = for_kernels(StateRows(**given_rows, decode_only=is_decode), num_tokens=tokens)
        return Program(
            fn=functools.partial(op, implementation="xla" if is_xla else "mosaic_tpu"),
            args=[*given, pool, jax.tree.map(np.asarray, rows)],
            donate=(len(given),),
            hbm_bytes=moved,
            flops=2 * of_rule * tokens * int(np.prod(state)),
            turns=(0, count // _TILE) if is_xla else (),
        )

    return Launch(
        name=f"{name}_decode_{num_rows}" if is_decode else f"{name}_prefill_{count}",
        program=program,
        generations=("v6e",) if decays and count > 1 else GENERATIONS,  # it takes a minute to compile
        counted_by="estimate" if is_xla else "kernels",
    )


def _jax_attention(name: str) -> Launch:
    """jax's ragged paged attention, which does not write K and V; with large, faster tiles it compiles for a minute."""
    case = next(case for case in REAL_CASES if case.name == name)

    def program(generation: str) -> Program:
        fn, args = tpu_attention.baseline_launch(case)
        work = Work.of(case)
        return Program(fn=fn, args=args, hbm_bytes=work.kv_bytes, flops=work.flops)

    return Launch(name=f"jax_{name}", program=program, generations=("v6e",))


def _jax_experts() -> Launch:
    """jax's megablox: one product of Qwen3-30B-A3B's experts in bfloat16, for 64 rows."""
    E, D, F = 128, 2048, 768

    def program(generation: str) -> Program:
        args = [_shape(512, D), _shape(E, D, F), np.full(E, 512 // E, np.int32)]
        fn = functools.partial(gmm, preferred_element_type=_BF16, tiling=(_GROUP, D, F))
        return Program(fn=fn, args=args, hbm_bytes=_bytes(args) + 2 * 512 * F, flops=2 * 512 * D * F)

    return Launch(name="jax_experts_qwen3_30b_64", program=program)


def _target(generation: str) -> Target:
    return Target.named(f"tpu:{generation}")


def _shape(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, _BF16)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
