"""Named cases of expert_mlp: tests, tuning and benchmarks run the same ones."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul.stack import ExpertStack


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


def make_arguments(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, ExpertStack]:
    """x, expert_ids, expert_weights, experts: random, weights scaled as in a trained model."""
    rng = np.random.default_rng(seed)
    T, X, E, D, F = case.num_tokens, case.num_experts_per_token, case.num_experts, case.width, case.hidden
    chosen = rng.permutation(E)[: case.favourites]
    ids = np.stack([rng.permutation(chosen)[:X] for _ in range(T)])
    weights = rng.dirichlet(np.ones(X), T)
    x, gate, up, down = (
        jnp.asarray(rng.standard_normal(shape) * scale, case.dtype)
        for shape, scale in (((T, D), 1), ((E, F, D), D**-0.5), ((E, F, D), D**-0.5), ((E, D, F), F**-0.5))
    )
    experts = ExpertStack(gate=gate, up=up, down=down)
    return x, jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32), experts
