"""Makes tests/goldens/: tiny random models of every family with the outputs of transformers, float32, on the CPU.

    python -m scripts.make_goldens [--out tests/goldens] [name ...]

Needs torch and transformers (made with torch 2.13, transformers 5.23); the tests that read the result need neither.
Each folder is a real Hugging Face checkpoint, and `golden.npz` beside it holds, for prompts of 1 to 150 tokens:

    prompt_I [T] int32        tokens_I [64] int32, greedy      best_I [64, 2] float32, the two best logits of each step
    last_logits [prompts, V]  observed [2] int32, indices of prompts with all of:
    embed_I [T, D]   layers_I [L, T, D]   norm_I [T, D]   logits_I [T, V]
    bf16_error [] float32, how far the reference in bfloat16 is from itself in float32: root mean square over the
    logits of all prompts with their tokens, by that of the logits with each position's mean taken off

Weights are drawn with a scale for which greedy outputs vary, then rounded to the dtype they are stored in. What the
models are is in `goldens/`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scripts.goldens.command import run
from scripts.goldens.dense import DENSE
from scripts.goldens.experts import EXPERTS
from scripts.goldens.folder import save
from scripts.goldens.gemma import GEMMA
from scripts.goldens.latent import LATENT
from scripts.goldens.recurrent import RECURRENT
from scripts.goldens.reference import (
    NUM_GREEDY,
    OBSERVED,
    bf16_error,
    build,
    draw_prompts,
    greedy,
    observe,
    pack_experts,
)
from scripts.goldens.tail import TAIL

GOLDENS = DENSE | GEMMA | EXPERTS | TAIL | LATENT | RECURRENT


def make(name: str, folder: Path) -> None:
    """Writes one folder."""
    golden = GOLDENS[name]
    model = build(golden)
    packed = pack_experts(model, golden.seed) if golden.mxfp4 else {}
    save(model, packed, golden, folder)
    prompts = draw_prompts(golden.config["vocab_size"], golden.seed)
    arrays: dict[str, np.ndarray] = {"observed": np.array(OBSERVED, np.int32)}
    last, sequences = [], []
    for i, prompt in enumerate(prompts):
        tokens, best, logits = greedy(model, prompt)
        arrays |= {f"prompt_{i}": prompt, f"tokens_{i}": tokens, f"best_{i}": best}
        last.append(logits)
        sequences.append(np.concatenate((prompt, tokens)))
        if i in OBSERVED:
            arrays |= {f"{key}_{i}": value for key, value in observe(model, prompt).items()}
        gap = np.min(best[:, 0] - best[:, 1])
        print(f"  {len(prompt)} tokens: {len(set(tokens.tolist()))} of {NUM_GREEDY} differ, smallest gap {gap:.1e}")
    arrays["last_logits"] = np.stack(last)
    arrays["bf16_error"] = bf16_error(model, sequences)
    print(f"  error in bfloat16 {arrays['bf16_error']:.1e}")
    np.savez_compressed(folder / "golden.npz", **arrays)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    run(__doc__, GOLDENS, "tests/goldens", make)
