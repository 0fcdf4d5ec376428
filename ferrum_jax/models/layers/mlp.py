"""MLP: down(gating(gate x, up x)), most often with act(gate x) * up x; without a gate down(act(up x)).

Source: Shazeer 2020, section 2 (SwiGLU).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.attention import LayerContext
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.spec import MlpSpec

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def activation_of(name: str) -> Callable[[jax.Array], jax.Array]:
    """The function of a hidden_act. Raises ValueError naming those that are known."""
    if name not in ACTIVATIONS:
        raise ValueError(f"hidden_act is {name!r}; supported are {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[name]


@dataclasses.dataclass(frozen=True)
class Gated:
    """act(gate) * up."""

    act: Callable[[jax.Array], jax.Array]

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return self.act(gate) * up


@dataclasses.dataclass(frozen=True)
class LimitedGated:
    """act(gate) * up, act(gate) at most a limit and up within it; before: gate itself is, and not what act gives of it.

    Source: inclusionAI 2026 (Ling 3.0), as served; before as in Tencent's Hy4.
    """

    act: Callable[[jax.Array], jax.Array]
    limit: float
    before: bool = False

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        limited = self.act(jnp.minimum(gate, self.limit)) if self.before else jnp.minimum(self.act(gate), self.limit)
        return limited * jnp.clip(up, -self.limit, self.limit)


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """(up + 1) * gate * sigmoid(alpha * gate), gate at most limit and up within it. Source: OpenAI 2025 (gpt-oss)."""

    limit: float
    alpha: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(gate * self.alpha))


def gating_of(spec: MlpSpec) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """How a model's MLPs join gate and up. A value: two of equal specs are equal."""
    if spec.swiglu_limit is not None:
        return ClampedSwiGLU(spec.swiglu_limit, spec.swiglu_alpha)
    act = activation_of(spec.hidden_act)
    return LimitedGated(act, spec.gated_limit) if spec.gated_limit else Gated(act)


class MLP(nnx.Module):
    """gate, up [F, D]; down [D, F]. On a mesh a device has some of F. gate is None where the spec has none."""

    def __init__(self, hidden_size: int, spec: MlpSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        D, F, bias = hidden_size, spec.intermediate_size, spec.bias
        self.gate = Linear(D, F, bias=bias, dtype=dtype, rngs=rngs) if spec.gated else None
        self.up = Linear(D, F, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(F, D, bias=bias, dtype=dtype, rngs=rngs)
        self.gating = gating_of(spec)
        self.act = activation_of(spec.hidden_act)
        self.gate_multiplier, self.output_multiplier = spec.gate_multiplier, spec.output_multiplier

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:  # [T, D] -> [T, D]
        return _times(self.down(self.hidden(x), context.shards), self.output_multiplier)

    def hidden(self, x: jax.Array) -> jax.Array:  # [T, D] -> [T, F]
        """The input of `down`."""
        if self.gate is None:
            return self.act(self.up(x))
        return self.gating(_times(self.gate(x), self.gate_multiplier), self.up(x))


def _times(x: jax.Array, multiplier: float) -> jax.Array:
    return x if multiplier == 1 else x * jnp.asarray(multiplier, x.dtype)
