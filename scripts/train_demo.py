"""Trains the demo model on the standard library's sources.

    python -m scripts.train_demo --out DIR --steps 1900
    python -m scripts.train_demo --out DIR --steps 1900 --resume
    python -m scripts.train_demo --measure checkpoints/demo

A Qwen3-MoE decoder of 5 M parameters in float32 on the CPU, with Muon for its matrices and AdamW for the rest. The
learning rate is flat and falls to zero over the last part of `--steps`; in a run that is resumed with fewer steps it
falls at once. Rows are short at first, which is cheap, and long at the end, so that the model learns to look back.
DIR gets `state.npz` every few minutes, from which `--resume` continues, and at the end `hf/`, a Hugging Face folder in
bfloat16. Its bits per byte on the held-out modules are measured with the rounded weights. --measure does that for any
checkpoint, with the engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from ferrum_jax import LLM, EngineConfig, SamplingParams
from scripts import demo_corpus
from scripts.demo_model import Model, Shape

Weights = dict[str, jax.Array]
Apply = Callable[[Weights, jax.Array, float], tuple[jax.Array, jax.Array]]

_BALANCE = 0.01
_SLACK = 1.25
_SAVE_S = 120.0
_SCORED = 1024  # tokens of a window of held-out text
# Messages become comments above the code that the model writes, because it was never taught to chat.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '# ' + message['content'].replace('\\n', '\\n# ') + '\\n' }}{% endfor %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How many steps there are and what each one reads.

    batch_tokens: tokens of a step. rows: pairs of a fraction of the steps and the length of rows from there on, in
    tokens. fall: the last fraction of the steps, over which the learning rate falls.
    """

    steps: int
    batch_tokens: int = 2048
    rows: tuple[tuple[float, int], ...] = ((0.0, 128), (0.4, 256), (0.88, 1024))
    fall: float = 0.3
    warmup: int = 40

    def rate(self, step: int) -> float:
        """The learning rate's fraction of its peak at `step`."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / (self.fall * self.steps))

    def row(self, step: int) -> int:
        """Tokens of a row at `step`."""
        return [tokens for start, tokens in self.rows if step >= start * self.steps][-1]


def initial(shape: Shape, seed: int) -> tuple[Weights, Apply]:
    """The weights by dotted name, and the model as a function of (weights, ids [B, S], slack)."""
    graph, state = nnx.split(Model(shape, np.random.default_rng(seed)))
    paths, tree = jax.tree.flatten_with_path(state)
    names = [".".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path) for path, _ in paths]
    names = [name.removesuffix(".value") for name in names]

    def apply(weights: Weights, ids: jax.Array, slack: float) -> tuple[jax.Array, jax.Array]:
        return nnx.merge(graph, jax.tree.unflatten(tree, [weights[name] for name in names]))(ids, slack)

    return {name: leaf for name, (_, leaf) in zip(names, paths, strict=True)}, apply


def token_losses(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """-ln p of each next token: logits [B, S, V], ids [B, S] to [B, S - 1]."""
    logits = logits[:, :-1]
    chosen = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def muon_axes(weights: Any) -> Any:
    """For each matrix [..., out, in] of attention and experts, which axes Muon orthogonalises; None for the rest."""
    axes = {name: (w.ndim - 1, w.ndim - 2) if "_proj" in name else None for name, w in weights.items()}
    return {name: a and optax.contrib.MuonDimensionNumbers(*a) for name, a in axes.items()}


def optimiser() -> optax.GradientTransformation:
    """Muon (Jordan 2024) for the matrices of attention and experts, AdamW for embedding, router and norms."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            0.02,
            weight_decay=0.02,
            adam_learning_rate=4e-3,
            adam_b1=0.9,
            adam_b2=0.98,
            adam_weight_decay=0.01,
            muon_weight_dimension_numbers=muon_axes,
        ),
    )


def train_step(
    apply: Apply, optimise: optax.GradientTransformation, weights: Weights, state: optax.OptState, ids, rate
) -> tuple[Weights, optax.OptState, jax.Array]:
    """The weights and optimiser state after one step on ids [B, S], and the mean loss in nats per token."""

    def objective(weights: Weights) -> tuple[jax.Array, jax.Array]:
        logits, balance = apply(weights, ids, _SLACK)
        loss = token_losses(logits, ids).mean()
        return loss + _BALANCE * balance, loss

    (_, loss), gradient = jax.value_and_grad(objective, has_aux=True)(weights)
    updates, state = optimise.update(gradient, state, weights)
    updates = jax.tree.map(lambda u: u * rate, updates)
    return cast(Weights, optax.apply_updates(weights, updates)), state, loss


def bits_per_byte(
    apply: Apply, shape: Shape, weights: Weights, documents: list[np.ndarray], num_bytes: int, length: int
) -> float:
    """Bits that the model needs per byte of the documents; each token has at least half a window of context."""
    windows = [w for ids in documents for w in demo_corpus.scored_windows(ids, length, length // 2)]
    losses = jax.jit(lambda weights, ids: token_losses(apply(weights, ids, shape.E / shape.X)[0], ids))
    rows = max(1, 4096 // length)
    nats = 0.0
    for i in range(0, len(windows), rows):
        ids = np.full((rows, length), -1, np.int32)
        ids[: len(windows[i : i + rows])] = [w for w, _ in windows[i : i + rows]]
        loss = np.asarray(losses(weights, np.maximum(ids, 0)), np.float64)
        for row, (window, first) in enumerate(windows[i : i + rows]):
            nats += float(loss[row, first - 1 : int((window >= 0).sum()) - 1].sum())
    return nats / num_bytes / math.log(2)


def engine_bits_per_byte(llm: Any, documents: list[np.ndarray], num_bytes: int, length: int) -> float:
    """`bits_per_byte` of the checkpoint that `llm` serves, from the log-probabilities of its prompts."""
    windows = [w for ids in documents for w in demo_corpus.scored_windows(ids, length, length // 2)]
    prompts = [window[window >= 0].tolist() for window, _ in windows]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    nats = 0.0
    for output, prompt, (_, first) in zip(outputs, prompts, windows, strict=True):
        rows = zip(output.prompt_logprobs[first:], prompt[first:], strict=True)
        nats -= sum(row[token].logprob for row, token in rows)
    return nats / num_bytes / math.log(2)


def save_state(path: pathlib.Path, step: int, trees: tuple[Weights, optax.OptState]) -> None:
    """Writes the step and every leaf, whole or not at all."""
    leaves: dict[str, Any] = {f"{i:04d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(trees))}
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, step=step, **leaves)
    os.replace(partial, path)


def load_state(path: pathlib.Path, trees: tuple[Weights, optax.OptState]) -> tuple[int, tuple]:
    """The step and the trees of `save_state`, in the structure of `trees`."""
    with np.load(path) as stored:
        leaves, tree = jax.tree.flatten(trees)
        if len(stored.files) != len(leaves) + 1:
            raise ValueError(
                f"{path} holds {len(stored.files) - 1} arrays, the model {len(leaves)}; start without --resume"
            )
        return int(stored["step"]), jax.tree.unflatten(tree, [stored[f"{i:04d}"] for i in range(len(leaves))])


def rounded(weights: Weights) -> Weights:
    """The weights as bfloat16 keeps them."""
    return {name: jnp.asarray(w, jnp.bfloat16) for name, w in weights.items()}


def hugging_face_tensors(weights: Weights) -> dict[str, np.ndarray]:
    """The tensors as Qwen3MoeForCausalLM names them: one per expert and projection, the router as mlp.gate."""
    tensors = {}
    for name, array in jax.tree.map(np.asarray, rounded(weights)).items():
        layer, _, projection = name.partition(".mlp.")
        if not projection:
            tensors[f"model.{name}" if name != "embed_tokens" else "model.embed_tokens.weight"] = array
        elif projection == "gate":
            tensors[f"model.{name}.weight"] = array
        else:
            for e, matrix in enumerate(array):
                tensors[f"model.{layer}.mlp.experts.{e}.{projection}.weight"] = np.ascontiguousarray(matrix)
    return tensors


def export(folder: pathlib.Path, shape: Shape, weights: Weights, tokenizer: Tokenizer) -> None:
    """Writes a Hugging Face folder: config, weights in bfloat16, tokenizer with a template."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hugging_face_tensors(weights), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    end = demo_corpus.END_OF_TEXT
    pages = {
        "config": shape.config(),
        "generation_config": {"eos_token_id": 0, "pad_token_id": 0, "do_sample": False},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "pad_token": end,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_length,
            "chat_template": _CHAT_TEMPLATE,
        },
    }
    for name, page in pages.items():
        (folder / f"{name}.json").write_text(json.dumps(page, indent=2) + "\n")


class Corpus:
    """The documents as ids: `windows` to train on, and the held-out modules with their size in bytes."""

    def __init__(self, documents: list[demo_corpus.Document], vocabulary: int, seed: int) -> None:
        seen = [d for d in documents if not d.held_out]
        held = [d for d in documents if d.held_out]
        self.tokenizer = demo_corpus.train_tokenizer(seen, vocabulary)
        self.windows = demo_corpus.Windows(demo_corpus.encode_documents(self.tokenizer, seen), seed)
        self.held = demo_corpus.encode_documents(self.tokenizer, held)
        self.held_bytes = sum(len(d.text.encode()) for d in held)
        print(f"{len(seen)} modules to train on, {self.windows.epoch_tokens} tokens; ", end="")
        print(f"held out: {len(held)} modules, {self.held_bytes} bytes, {sum(map(len, self.held))} tokens", flush=True)


class Trainer:
    """The model of one shape and seed: its function, its first state and its compiled training step."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape, self._seed = shape, seed
        self._optimiser = optimiser()
        _, self.apply = initial(shape, seed)
        self.step = jax.jit(functools.partial(train_step, self.apply, self._optimiser), donate_argnums=(0, 1))

    def fresh(self) -> tuple[Weights, optax.OptState]:
        """The weights and the optimiser's state before the first step."""
        weights, _ = initial(self._shape, self._seed)
        return weights, self._optimiser.init(weights)


def train(
    out: pathlib.Path, trainer: Trainer, schedule: Schedule, windows: demo_corpus.Windows, resume: bool
) -> Weights:
    """The trained weights. Writes `out/state.npz` as it goes and prints the progress."""
    start, (weights, state) = 0, trainer.fresh()
    if resume:
        start, (weights, state) = load_state(out / "state.npz", (weights, state))
    print(f"{sum(w.size for w in weights.values())} parameters, from step {start}", flush=True)
    progress = Progress(start, schedule)
    saved = time.monotonic()
    for step in range(start, schedule.steps):
        row = schedule.row(step)
        ids = windows.batch(step, schedule.batch_tokens // row, row)
        weights, state, loss = trainer.step(weights, state, ids, np.float32(schedule.rate(step)))
        progress.note(step + 1, float(loss))
        if time.monotonic() - saved > _SAVE_S or step + 1 == schedule.steps:
            save_state(out / "state.npz", step + 1, (weights, state))
            saved = time.monotonic()
    return weights


class Progress:
    """Prints the mean loss and the pace of every twenty steps."""

    def __init__(self, start: int, schedule: Schedule) -> None:
        self._start, self._schedule = start, schedule
        self._begun = time.monotonic()
        self._losses: list[float] = []

    def note(self, done: int, loss: float) -> None:
        """Counts one step of `loss` nats per token, after which `done` steps are complete."""
        self._losses.append(loss)
        if done % 20 == 0:
            pace = (done - self._start) * self._schedule.batch_tokens / (time.monotonic() - self._begun)
            mean = sum(self._losses) / len(self._losses)
            print(f"step {done}/{self._schedule.steps} loss {mean:.3f} {pace:.0f} tok/s", flush=True)
            self._losses.clear()


def measure(folder: str) -> None:
    """Prints the bits per byte of a checkpoint, with its own tokenizer."""
    config = EngineConfig(dtype="float32", max_num_seqs=1, max_num_batched_tokens=_SCORED, max_model_len=_SCORED + 1)
    llm = LLM(folder, config)
    held = [d for d in demo_corpus.read_documents() if d.held_out]
    ids = demo_corpus.encode_documents(Tokenizer.from_file(f"{folder}/tokenizer.json"), held)
    num_bytes = sum(len(d.text.encode()) for d in held)
    print(f"held out: {len(held)} modules, {num_bytes} bytes, {sum(map(len, ids))} tokens", flush=True)
    print(f"held-out bits per byte {engine_bits_per_byte(llm, ids, num_bytes, _SCORED):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=pathlib.Path, help="folder for the state and the result")
    what.add_argument("--measure", metavar="DIR", help="train nothing; print the bits per byte of this checkpoint")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the whole run (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the windows (default: 0)")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.npz")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    shape = Shape()
    corpus = Corpus(demo_corpus.read_documents(), shape.V, arguments.seed)
    trainer = Trainer(shape, arguments.seed)
    schedule = Schedule(steps=arguments.steps)
    weights = train(arguments.out, trainer, schedule, corpus.windows, arguments.resume)
    export(arguments.out / "hf", shape, weights, corpus.tokenizer)
    kept = {name: jnp.asarray(w, jnp.float32) for name, w in rounded(weights).items()}
    bits = bits_per_byte(trainer.apply, shape, kept, corpus.held, corpus.held_bytes, _SCORED)
    print(f"held-out bits per byte {bits:.4f}", flush=True)


if __name__ == "__main__":
    main()
