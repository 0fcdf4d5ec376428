"""Matrix products of tokens that each go to a few of many experts."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.grouped_matmul import xla
from pallas_kernels.grouped_matmul.config import choose_tile
from pallas_kernels.shapes import check_shapes

__all__ = ["choose_tile", "expert_mlp", "swiglu"]


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up. Source: Shazeer 2020, section 2."""
    return jax.nn.silu(gate) * up


def expert_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    first_expert: jax.Array | int = 0,
    num_experts: int | None = None,
    tile: int | None = None,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    activation: Callable[[jax.Array, jax.Array], jax.Array] = swiglu,
    implementation: str = "xla",
) -> jax.Array:  # [T, D], the dtype of x
    """sum over choices c of weights[t, c] * down[e] activation(gate[e] x[t], up[e] x[t]), e = expert_ids[t, c].

    x: [T, D]. expert_ids: [T, X] int32 below num_experts. expert_weights: [T, X] float32. gate, up: [E, F, D] and
    down: [E, D, F], the layout of checkpoints: of the experts from first_expert on, when there are num_experts
    (None: E) on several devices; choices of experts that are not here add nothing. biases: [E, F], [E, F] and [E, D],
    added to what gate, up and down give. tile: tokens of one expert that
    share a read of its weights, None takes choose_tile's. With a fixed tile of two or more, a token's bits depend on
    its own row alone. Products are summed in float32. Raises ValueError for shapes or a tile that do not fit and
    for an unknown implementation.
    """
    sizes = check_shapes(
        ("T D", x),
        ("T X", expert_ids),
        ("T X", expert_weights),
        ("E F D", gate),
        ("E F D", up),
        ("E D F", down),
        *(() if biases is None else zip(("E F", "E F", "E D"), biases, strict=True)),
    )
    T, X, E = sizes["T"], sizes["X"], sizes["E"]
    if tile is None:
        tile = choose_tile(num_tokens=T, num_experts_per_token=X, num_experts=num_experts or E)
    if implementation == "xla":
        own_ids = xla.ids_here(expert_ids, first_expert, E) if num_experts not in (None, E) else expert_ids
        return xla.expert_mlp(
            x, own_ids, expert_weights, gate, up, down, biases=biases, tile=tile, activation=activation
        )
    raise ValueError(f"implementation is {implementation!r}; expert_mlp has only 'xla'")
