"""GRPO in one file: an engine samples, a reward judges, optax trains, and the engine takes the new weights each step.

    pip install -e '.[train,plot]'
    python docs/examples/grpo.py                  # two minutes on two idle cores
    python docs/examples/grpo.py reward.png       # and draws the reward

A tiny model has seen a little counting, and gets a reward for each token that goes on counting. Nothing tells it which
token would be right: of eight completions of a prompt, those with more reward than their group become more likely.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

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
SIZES = EngineConfig(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=32)
GROUP, NEW = 8, 6  # completions of a prompt, and tokens of a completion
PROMPTS = [[(start + i) % 31 + 1 for i in range(3)] for start in range(0, 31, 4)]  # 1 2 3, 5 6 7, ...


def reward_of(prompt: Sequence[int], completion: Sequence[int]) -> float:
    """The share of tokens that are one more than the token before them; 1 comes after 31."""
    tokens = [prompt[-1], *completion]
    return float(np.mean([b == a % 31 + 1 for a, b in itertools.pairwise(tokens)]))


def logprobs_of(model: Decoder, sequences: jax.Array) -> jax.Array:
    """[B, NEW] log-probabilities of the last tokens of sequences [B, S]."""

    def one(ids: jax.Array) -> jax.Array:
        logits = model.logits(model(ids, jnp.arange(len(ids)), ForwardContext()))[-NEW - 1 : -1]
        return -optax.softmax_cross_entropy_with_integer_labels(logits, ids[-NEW:])

    return jax.vmap(one)(sequences)


@nnx.jit
def warm_up_step(model: Decoder, optimizer: nnx.Optimizer, sequences: jax.Array) -> None:
    """A step towards sequences that count."""
    gradients = nnx.grad(lambda m: -logprobs_of(m, sequences).mean())(model)
    optimizer.update(model, gradients)


@nnx.jit
def grpo_step(
    model: Decoder, optimizer: nnx.Optimizer, sequences: jax.Array, sampled: jax.Array, advantages: jax.Array
) -> None:
    """The clipped objective over the ratio to the probabilities that the engine drew from."""

    def loss_of(m: Decoder) -> jax.Array:
        ratio = jnp.exp(logprobs_of(m, sequences) - sampled)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        return -jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).mean()

    optimizer.update(model, nnx.grad(loss_of)(model))


def sample(llm: LLM, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences [B, S], log-probabilities of what was drawn [B, NEW], rewards [B]; groups stand together."""
    params = SamplingParams(n=GROUP, max_tokens=NEW, temperature=1.0, logprobs=0, ignore_eos=True, seed=step)
    rows, sampled, rewards = [], [], []
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, progress=False), strict=True):
        assert output.weights_version == llm.weights_version, "it was drawn with the newest weights"
        for choice in output.outputs:
            entries = zip(choice.token_ids, choice.logprobs or (), strict=True)
            rows.append([*prompt, *choice.token_ids])
            sampled.append([entry[token].logprob for token, entry in entries])
            rewards.append(reward_of(prompt, choice.token_ids))
    return np.array(rows, np.int32), np.array(sampled, np.float32), np.array(rewards, np.float32)


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """[B] how much better each completion is than its group, in the group's standard deviations."""
    groups = rewards.reshape(-1, GROUP)
    spread = groups - groups.mean(1, keepdims=True)
    return (spread / (groups.std(1, keepdims=True) + 1e-4)).reshape(-1)


def main(config: EngineConfig = SIZES, steps: int = 80, warm_up: int = 12) -> list[float]:
    """The mean reward of each step."""
    model = Decoder(spec_of(CONFIG), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)
    counting = jnp.asarray((np.arange(3 + NEW) + np.arange(31)[:, None]) % 31 + 1, jnp.int32)
    for _ in range(warm_up):
        warm_up_step(model, optimizer, counting)
    llm, found = LLM.from_model(model, config), []
    for step in range(steps):
        sequences, sampled, rewards = sample(llm, step)
        found.append(float(rewards.mean()))
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step}: reward {found[-1]:.2f}", flush=True)
        grpo_step(model, optimizer, sequences, sampled, advantages_of(rewards))
        llm.update_weights(model)
    print(f"{llm.stats()['compiles_after_ready']} compiles after the start")
    return found


def draw(rewards: list[float], path: str) -> None:
    """The reward over steps, as a picture."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    axes.plot(rewards, color="#1f5fa8", linewidth=1.6)
    axes.set(xlabel="GRPO step", ylabel="mean reward", ylim=(0, 1.02), xlim=(0, len(rewards) - 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    earned = main()
    if len(sys.argv) > 1:
        draw(earned, sys.argv[1])
