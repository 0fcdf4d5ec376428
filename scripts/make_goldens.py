"""Makes tests/goldens/: tiny random models of every family with the outputs of transformers, float32, on the CPU.

    python -m scripts.make_goldens [--out tests/goldens] [name ...]

Needs torch and transformers (made with torch 2.13, transformers 5.24); the tests that read the result need neither.
Each folder is a real Hugging Face checkpoint, and `golden.npz` beside it holds, for prompts of 1 to 150 tokens:

    prompt_I [T] int32        tokens_I [64] int32, greedy      best_I [64, 2] float32, the two best logits of each step
    last_logits [prompts, V]  observed [2] int32, indices of prompts with all of:
    embed_I [T, D]   layers_I [L, T, D]   norm_I [T, D]   logits_I [T, V]
    bf16_error [] float32, how far the reference in bfloat16 is from itself in float32: root mean square over the
    logits of all prompts with their tokens, by that of the logits with each position's mean taken off

Weights are not stored: recipes beside them say what they are drawn from (`goldens/weights.py`), with a scale for which
greedy outputs vary and the first seed for which no token depends on how sums are rounded. What the models are is in
`goldens/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from scripts.goldens.command import run
from scripts.goldens.dense import DENSE
from scripts.goldens.experts import EXPERTS
from scripts.goldens.folder import save
from scripts.goldens.gemma import GEMMA
from scripts.goldens.latent import LATENT
from scripts.goldens.recipe import first_seed
from scripts.goldens.recurrent import RECURRENT
from scripts.goldens.reference import (
    OBSERVED,
    bf16_error,
    draw_prompts,
    is_same_on_meshes,
    load,
    observe,
    skeleton,
    steady,
    unpack_experts,
)
from scripts.goldens.tail import TAIL

GOLDENS = DENSE | GEMMA | EXPERTS | TAIL | LATENT | RECURRENT


def make(name: str, folder: Path) -> None:
    """Writes one folder, with the first seed for which no token and no expert depends on how sums are rounded.

    Nor does what the mesh tests compare.
    """
    golden = GOLDENS[name]
    like = skeleton(golden)
    save(like, golden, folder)
    prompts = draw_prompts(golden.config["vocab_size"], golden.seed)

    def answer() -> dict[str, np.ndarray] | None:
        model = load(like, folder, unpack_experts)
        found = steady(model, prompts)
        if found is None or not is_same_on_meshes(folder, model):
            return None
        return found | observed(model, prompts, found)

    found = first_seed(folder, golden.seed, answer)
    print(f"  error in bfloat16 {found['bf16_error']:.1e}")
    np.savez_compressed(folder / "golden.npz", allow_pickle=False, **found)


@torch.no_grad()
def observed(model: Any, prompts: list[np.ndarray], found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What layers give, and the error of the model in bfloat16, in which it stays."""
    arrays = {"observed": np.array(OBSERVED, np.int32)}
    for i in OBSERVED:
        arrays |= {f"{key}_{i}": value for key, value in observe(model, prompts[i]).items()}
    sequences = [np.concatenate((prompt, found[f"tokens_{i}"])) for i, prompt in enumerate(prompts)]
    return arrays | {"bf16_error": bf16_error(model, sequences)}


if __name__ == "__main__":
    run(__doc__, GOLDENS, "tests/goldens", make)
