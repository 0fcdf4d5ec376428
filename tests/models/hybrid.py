"""A model for tests alone, whose layers have all kinds of caches.

    0  a recurrent state                       3  a window, with fewer KV heads and a V of another size
    1  keys and values of all, and a state     4  those of layer 1
    2  none

state = g * state + (1 - g) * v,   g = sigmoid(W_q x),   v = W_k x,   y = W_o state
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from checkpoints.rules import Rule
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.decoder import Decoder, SideBySide
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.registry import abstract_model, unbind
from ferrum_jax.models.layers.attention import LayerContext
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.sharding import StateArray
from ferrum_jax.models.spec import AttentionSpec, CacheGroup, MlpSpec, ModelSpec
from pallas_kernels.state_rows import StateRows

NAME = "HybridForTests"
STATE_SIZE = 40


class Recurrence(nnx.Module):
    """Stands where a layer's attention stands; its parameters have the names of attention's."""

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        self.q = Linear(spec.hidden_size, STATE_SIZE, dtype=dtype, rngs=rngs)
        self.k = Linear(spec.hidden_size, STATE_SIZE, dtype=dtype, rngs=rngs)
        self.o = Linear(STATE_SIZE, spec.hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rotation: object, context: LayerContext) -> jax.Array:  # [T, D] -> [T, D]
        gate, value = jax.nn.sigmoid(self.q(x)), self.k(x)

        def compute(pool: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
            row_of, _ = rows.of_tokens(len(x))
            states = jax.lax.optimization_barrier(jnp.where((rows.starts == 0)[:, None], 0, pool[rows.slots]))

            def one(states: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
                state = gate[t] * states.at[row_of[t]].get(mode="clip") + (1 - gate[t]) * value[t]
                return states.at[row_of[t]].set(state, mode="drop"), state  # padding has no row

            states, out = jax.lax.scan(one, states, jnp.arange(len(x)))
            return jnp.where((row_of < len(states))[:, None], out, 0), pool.at[rows.targets].set(states)

        state = jax.ShapeDtypeStruct(value.shape[1:], jnp.float32)
        return self.o(context.recur(state, compute, len(x)), context.shards)


class Hybrid(Decoder):
    """The decoder with recurrences in the layers of the spec's group "state"."""

    def __init__(self, spec: ModelSpec, *, dtype: jnp.dtype | str = jnp.float32, rngs: nnx.Rngs | None) -> None:
        super().__init__(spec, dtype=dtype, rngs=rngs)
        for layer in spec.state_layers:
            recurrence = Recurrence(spec, layer, dtype=jnp.dtype(dtype), rngs=rngs)
            attention = self.layers[layer].attention
            mixer = recurrence if attention is None else SideBySide(attention, recurrence)
            self.layers[layer].attention = nnx.data(mixer)  # where there was None, which is no data


def _spec(reader: ConfigReader) -> ModelSpec:
    return ModelSpec(
        architecture=NAME,
        vocab_size=250,
        hidden_size=24,
        num_hidden_layers=5,
        max_position_embeddings=256,
        attention=AttentionSpec(num_attention_heads=4, num_key_value_heads=2, head_dim=8),
        other_attention=(
            ((3,), AttentionSpec(num_attention_heads=4, num_key_value_heads=1, head_dim=8, v_head_dim=12)),
        ),
        mlp=MlpSpec(intermediate_size=32),
        cache_groups=(
            CacheGroup(kind="full", layers=(1,)),
            CacheGroup(kind="window", layers=(3,), window=21),
            CacheGroup(kind="state", layers=(0, 1)),
        ),
        borrowed=((4, 1),),
    )


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return tuple(Rule(source=_source(name), target=name) for name in unbind(abstract_model(spec))[1])


def _source(parameter: str) -> str:
    """The name of a parameter's tensor."""
    return "lm_head.weight" if parameter == "head.weight" else f"model.{parameter}"


FAMILY = Family(
    read=_spec,
    models=NAME,
    model=Hybrid,
    weight_rules=_rules,
    harmless=lambda spec: (),
    state_arrays=lambda spec, dtype: StateArray(shape=(STATE_SIZE,), dtype=jnp.float32, axes=("heads",)),
)


def save(folder: Path) -> dict[str, np.ndarray]:
    """Writes a checkpoint of random weights with which greedy tokens vary; its family must be registered."""
    rng = np.random.default_rng(3)
    weights = {}
    for name, shape in unbind(abstract_model(_spec(ConfigReader({}))))[1].items():
        draw = rng.normal(size=shape.shape).astype(np.float32)
        norm = "norm" in name
        weights[name] = 1 + 0.2 * draw if norm else draw * (0.5 if "embed" in name else 2.2 / shape.shape[-1] ** 0.5)
    save_file({_source(name): array for name, array in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": [NAME], "model_type": "hybrid"}))
    return weights
