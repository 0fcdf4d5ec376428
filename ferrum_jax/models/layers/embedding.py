"""Embedding: token ids to vectors, and back to logits where the table is tied; and to an input of each layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.linear import Linear, project, random_weight
from ferrum_jax.models.layers.mlp import activation_of
from ferrum_jax.models.layers.norm import norm_of
from ferrum_jax.models.sharding.shards import WHOLE, Shards
from ferrum_jax.models.spec import LayerInputSpec, ModelSpec


class Embedding(nnx.Module):
    """weight [V, D]. Ids are checked on the host; an id outside the table would read its last row.

    scale: vectors, not logits, are multiplied by it, after it is rounded to dtype. On a mesh each device has an equal
    share of the rows, consecutive ones.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, scale: float = 1.0, dtype: jnp.dtype, rngs: nnx.Rngs | None
    ) -> None:
        self.weight = random_weight((vocab_size, hidden_size), dtype, rngs)
        self.scale = scale

    def __call__(self, token_ids: jax.Array, shards: Shards = WHOLE) -> jax.Array:  # [T] int32 -> [T, D]
        vectors = self._look_up(token_ids, shards)
        return vectors if self.scale == 1 else vectors * jnp.asarray(self.scale, vectors.dtype)

    def _look_up(self, token_ids: jax.Array, shards: Shards) -> jax.Array:
        if shards.size == 1:
            return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")
        rows = token_ids - shards.index() * self.weight.shape[0]
        here = (rows >= 0) & (rows < self.weight.shape[0])
        vectors = jnp.take(self.weight[...], rows, axis=0, mode="clip")
        return shards.sum(jnp.where(here[:, None], vectors, jnp.zeros_like(vectors)))

    def attend(self, hidden: jax.Array) -> jax.Array:  # [R, D] -> [R, V] float32
        """Logits of hidden against the rows of the table that this device has."""
        return project(hidden, self.weight[...], out_dtype=jnp.float32)


class LayerInputs(nnx.Module):
    """For each layer P values of each token: (norm(W x / sqrt(D)) + sqrt(P) E[id]) / sqrt(2), x the token's embedding.

    embed [V, L P]; projection [L P, D]; norm [P]. On a mesh a device has some of the columns of both, in one run, so
    that neither is whole anywhere; they are joined before the norm. Source: Gemma Team 2026 (Gemma 4 E2B).
    """

    def __init__(self, spec: ModelSpec, own: LayerInputSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        width = spec.num_hidden_layers * own.size
        self.size = own.size
        self.embed = random_weight((spec.vocab_size, width), dtype, rngs)
        self.projection = Linear(spec.hidden_size, width, dtype=dtype, rngs=rngs)
        self.norm = norm_of(spec.norm, own.size, dtype=dtype)

    def __call__(
        self,
        token_ids: jax.Array,  # [T] int32
        x: jax.Array,  # [T, D]
        shards: Shards = WHOLE,
    ) -> jax.Array:  # [T, L, P]
        of_ids = jnp.take(self.embed[...], token_ids, axis=0, mode="clip")
        of_ids, of_vectors = (
            shards.gather_columns(each).reshape(len(x), -1, self.size) for each in (of_ids, self.projection(x))
        )
        of_ids = of_ids * jnp.asarray(self.size**0.5, x.dtype)
        of_vectors = self.norm(_times(of_vectors, x.shape[-1] ** -0.5))
        return _times(of_vectors + of_ids, 2**-0.5)


class LayerInputGate(nnx.Module):
    """projection(act(gate x) * u): what a layer adds for its own input u. Every device of a mesh has both matrices."""

    def __init__(self, hidden_size: int, own: LayerInputSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        self.gate = Linear(hidden_size, own.size, dtype=dtype, rngs=rngs)
        self.projection = Linear(own.size, hidden_size, dtype=dtype, rngs=rngs)
        self.act = activation_of(own.hidden_act)

    def __call__(self, x: jax.Array, own_input: jax.Array) -> jax.Array:  # [T, D], [T, P] -> [T, D]
        return self.projection(self.act(self.gate(x)) * own_input)


def _times(x: jax.Array, number: float) -> jax.Array:
    """x times a number that its dtype need not have, rounded once."""
    return (x.astype(jnp.float32) * number).astype(x.dtype)
