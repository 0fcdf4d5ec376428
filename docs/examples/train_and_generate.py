"""Trains a flax.nnx model and generates with it in turn: new weights act at once and compile nothing.

    pip install -e '.[train]'
    python docs/examples/train_and_generate.py

The model learns to count. After each round of training `update_weights` takes copies of its weights, so the trainer may
go on with its own, and what was cached of the old weights is forgotten.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.models.families.decoder import Decoder
from ferrum_jax.models.families.registry import spec_of
from ferrum_jax.models.layers.attention import ForwardContext

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
SIZES = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)
COUNTING = jnp.asarray((np.arange(16) + np.arange(8)[:, None]) % 31 + 1, jnp.int32)  # [8, 16]: 1 2 3 ..., 2 3 4 ...


def loss_of(model: Decoder, sequences: jax.Array) -> jax.Array:
    """Cross-entropy of each next token of sequences [B, S]."""

    def one(ids: jax.Array) -> jax.Array:
        hidden = model(ids, jnp.arange(len(ids)), ForwardContext())
        return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden)[:-1], ids[1:]).mean()

    return jax.vmap(one)(sequences).mean()


@nnx.jit
def train_step(model: Decoder, optimizer: nnx.Optimizer, sequences: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, sequences)
    optimizer.update(model, gradients)
    return loss


def main(config: EngineConfig = SIZES, rounds: int = 4, steps: int = 40) -> list[tuple[int, ...]]:
    model = Decoder(spec_of(CONFIG), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    llm = LLM.from_model(model, config)
    answers = []
    for number in range(rounds + 1):
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
        answers.append(output.token_ids)
        print(f"after {number * steps} steps: 1 2 3 ->", *output.token_ids)
        for _ in range(steps if number < rounds else 0):
            train_step(model, optimizer, COUNTING)
        llm.update_weights(model)
    print(f"{llm.stats()['compiles_after_ready']} compiles after the start")
    return answers


if __name__ == "__main__":
    main()
