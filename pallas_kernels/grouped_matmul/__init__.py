"""Matrix products of tokens that each go to a few of many experts."""

from collections.abc import Callable

import jax

from pallas_kernels.grouped_matmul import xla
from pallas_kernels.grouped_matmul.stack import ExpertAdapters, ExpertStack
from pallas_kernels.quantized_matmul import QuantizedWeight, implementation_of
from pallas_kernels.shapes import check_counts, check_shapes

_MIN_ROWS = 8
_MAX_ROWS = 64
__all__ = ["ExpertAdapters", "ExpertStack", "choose_tile", "expert_mlp", "swiglu"]


def choose_tile(*, num_tokens: int, num_experts_per_token: int, num_experts: int) -> int:
    """Rows of a tile of one expert: about the tokens that an expert gets when all get the same.

    1 where an expert gets two or fewer: one row needs no copy of an expert's weights (XLA:CPU), more rows do.
    """
    check_counts(num_tokens=num_tokens, num_experts_per_token=num_experts_per_token, num_experts=num_experts)
    pairs = num_tokens * num_experts_per_token
    if pairs <= 2 * num_experts:
        return 1
    share = -(-pairs // num_experts)
    return min(pairs, _MAX_ROWS, max(_MIN_ROWS, 1 << (share - 1).bit_length()))


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up. Source: Shazeer 2020, section 2."""
    return jax.nn.silu(gate) * up


def expert_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    experts: ExpertStack,
    *,
    tile: int | None = None,
    activation: Callable[..., jax.Array] = swiglu,
    implementation: str | None = None,
) -> jax.Array:  # [T, D], the dtype of x
    """sum over choices c of weights[t, c] * down[e] activation(gate[e] x[t], up[e] x[t]), e = expert_ids[t, c].

    Without gates activation is given up[e] x[t] alone.
    x: [T, D]. expert_ids: [T, X] int32 below experts.num_experts. expert_weights: [T, X] float32. Choices of experts
    that are not in the stack add nothing. tile: tokens of one expert that share a read of its weights, None takes
    choose_tile's. With a fixed tile of two or more, a token's bits depend on its own row alone. Products and biases are
    summed in float32, and `activation` is computed in it; its result and that of down are each rounded once, to the
    dtype of x. implementation: None is "mosaic_tpu" or "mosaic_gpu" where all three matrices are codes that name such a
    device, or arrays whose stack names a TPU, and there are no adapters, and else "xla". Raises ValueError for shapes
    or a tile that do not fit, for an unknown implementation and for what that one does not take.
    """
    sizes = check_shapes(
        ("T D", x),
        ("T X", expert_ids),
        ("T X", expert_weights),
        *(() if experts.gate is None else (("E F D", experts.gate),)),
        ("E F D", experts.up),
        ("E D F", experts.down),
        *(() if experts.biases is None else zip(("E F", "E F", "E D"), experts.biases, strict=True)),
    )
    T, X, E, num_experts = sizes["T"], sizes["X"], sizes["E"], experts.num_experts
    check_counts(tile=tile)
    if num_experts is not None and num_experts < E:
        raise ValueError(f"num_experts is {num_experts}, and there are weights of {E}; None takes as many")
    if tile is None:
        tile = choose_tile(num_tokens=T, num_experts_per_token=X, num_experts=num_experts or E)
    kernels = kernels_of(experts)
    implementation = implementation or kernels
    own_ids = xla.ids_here(expert_ids, experts.first_expert, E) if num_experts not in (None, E) else expert_ids
    if implementation == "xla":
        return xla.expert_mlp(x, own_ids, expert_weights, experts, tile=tile, activation=activation)
    if implementation not in ("mosaic_tpu", "mosaic_gpu"):
        raise ValueError(f"implementation is {implementation!r}; expert_mlp has 'xla', 'mosaic_tpu', 'mosaic_gpu'")
    if implementation != kernels:
        raise ValueError(
            f"implementation is {implementation!r}, which takes gate, up and down as codes that name their Target, "
            "or as arrays of a stack that names a TPU, without adapters; take 'xla'"
        )
    run = _runner(kernels)
    return run(x, own_ids, expert_weights, experts, num_experts=num_experts or E, activation=activation)


def _runner(kernels: str) -> Callable[..., jax.Array]:
    """An implementation's expert_mlp, by an import that no other platform should pay for."""
    if kernels == "mosaic_gpu":
        from pallas_kernels.grouped_matmul import mosaic_gpu

        return mosaic_gpu.expert_mlp
    from pallas_kernels.grouped_matmul import mosaic_tpu

    return mosaic_tpu.expert_mlp


def kernels_of(experts: ExpertStack) -> str:
    """The implementation whose kernels multiply all of a stack, or "xla"."""
    parts = (experts.gate, experts.up, experts.down)
    named = [
        implementation_of(p.kernels if isinstance(p, QuantizedWeight) else None if p is None else experts.kernels)
        for p in parts
    ]
    return named[0] if experts.adapters is None and len(set(named)) == 1 else "xla"
