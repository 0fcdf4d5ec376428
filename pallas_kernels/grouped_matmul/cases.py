"""Named cases of expert_mlp: tests, tuning and benchmarks run the same ones."""

import dataclasses
from typing import Any

import jax
import numpy as np

from pallas_kernels.grouped_matmul.stack import ExpertStack
from pallas_kernels.on_device import on_device
from pallas_kernels.quantized_matmul import QuantizedWeight
from pallas_kernels.quantized_matmul import cases as product_cases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """favourites: how many experts the router chooses from; the others get no token. tile: by default choose_tile's."""

    name: str
    num_tokens: int
    num_experts: int
    num_experts_per_token: int
    width: int = 24
    hidden: int = 40
    favourites: int | None = None
    tile: int | None = None
    dtype: str = "float32"


CASES = (
    Case(name="one_token", num_tokens=1, num_experts=8, num_experts_per_token=2),
    Case(name="decode_many_experts", num_tokens=16, num_experts=128, num_experts_per_token=8),
    Case(name="prefill", num_tokens=200, num_experts=8, num_experts_per_token=2),
    Case(name="one_expert_takes_all", num_tokens=70, num_experts=6, num_experts_per_token=1, favourites=1),
    Case(name="uneven", num_tokens=96, num_experts=16, num_experts_per_token=3, favourites=4),
    Case(name="fixed_tile", num_tokens=64, num_experts=16, num_experts_per_token=4, tile=16),
    Case(name="bfloat16", num_tokens=64, num_experts=8, num_experts_per_token=2, dtype="bfloat16"),
)

# Experts that are kept as codes, of sizes that a TPU's kernels take: the case, and how each of its matrices is kept.
_TOKENS: dict[str, Any] = {"num_tokens": 9, "num_experts": 4, "num_experts_per_token": 2, "dtype": "bfloat16"}
_MXFP4 = product_cases.Case(name="mxfp4", kind="mxfp4", group=32, scale_dtype="uint8")
TPU_CASES: tuple[tuple[Case, product_cases.Case], ...] = (
    (
        Case(name="w4a16", width=256, hidden=256, favourites=3, **_TOKENS),
        product_cases.Case(name="w4a16", kind="int4", group=128, scale_dtype="bfloat16"),
    ),
    (
        Case(name="w4a16_zeros", width=256, hidden=256, **_TOKENS),
        product_cases.Case(name="w4a16_zeros", kind="int4", group=64, has_zeros=True, scale_dtype="float16"),
    ),
    (
        Case(name="w8a8", width=256, hidden=256, **_TOKENS),
        product_cases.Case(name="w8a8", kind="int8", activations="int8"),
    ),
    (
        Case(name="fp8_blocks", width=256, hidden=256, **_TOKENS),
        # activations as they are: rounding could flip a code between gate and down
        product_cases.Case(name="fp8_blocks", kind="fp8_e4m3", group=128),
    ),
    (Case(name="mxfp4", width=256, hidden=256, **_TOKENS), _MXFP4),
    (Case(name="mxfp4_part_of_a_chunk", width=320, hidden=192, **_TOKENS), _MXFP4),
)
GPU_CASES = tuple(  # those whose inputs fill whole chunks; int8 by int8 is XLA's
    (case, form) for case, form in TPU_CASES if form.activations is None and case.name != "mxfp4_part_of_a_chunk"
)
_REAL: dict[str, Any] = {"num_tokens": 64, "num_experts": 16, "num_experts_per_token": 4, "dtype": "bfloat16"}
REAL_TPU_CASES = tuple(
    (Case(name=f"{form.name}_real", width=2048, hidden=1024, **_REAL), form)
    for _, form in sorted(TPU_CASES, key=lambda pair: pair[1].kind != "mxfp4")
    if form.name != "w4a16_zeros"
)[:-1]
# The same that are bfloat16: of sizes that the TPU's kernel takes, and one that models have.
DENSE_TPU_CASES = (
    Case(name="dense", width=256, hidden=384, favourites=3, **_TOKENS),
    Case(name="dense_real", width=2048, hidden=768, **_REAL),
)


def make_packed_arguments(
    case: Case, form: product_cases.Case, seed: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array, ExpertStack]:
    """As make_arguments, with matrices of codes drawn at random."""
    x, ids, weights, experts = make_arguments(case, seed)
    E, F, D = experts.up.shape

    def stack(O: int, I: int, first: int) -> QuantizedWeight:
        one = dataclasses.replace(form, num_outputs=O, num_inputs=I, dtype=case.dtype)
        each = [product_cases.make_arguments(one, seed + first + e)[1] for e in range(E)]
        return jax.device_put(jax.tree.map(lambda *leaves: np.stack(leaves), *each))

    packed = ExpertStack(gate=stack(F, D, 1), up=stack(F, D, 1 + E), down=stack(D, F, 1 + 2 * E))
    return x, ids, weights, packed


def make_arguments(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, ExpertStack]:
    """x, expert_ids, expert_weights, experts: random, weights scaled as in a trained model."""
    rng = np.random.default_rng(seed)
    T, X, E, D, F = case.num_tokens, case.num_experts_per_token, case.num_experts, case.width, case.hidden
    chosen = rng.permutation(E)[: case.favourites]
    ids = np.stack([rng.permutation(chosen)[:X] for _ in range(T)])
    weights = rng.dirichlet(np.ones(X), T)
    x, gate, up, down = (
        on_device(rng.standard_normal(shape) * scale, case.dtype)
        for shape, scale in (((T, D), 1), ((E, F, D), D**-0.5), ((E, F, D), D**-0.5), ((E, D, F), F**-0.5))
    )
    experts = ExpertStack(gate=gate, up=up, down=down)
    return x, on_device(ids, np.int32), on_device(weights, np.float32), experts
