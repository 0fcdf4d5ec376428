"""Makes tests/goldens/: tiny random models of every family with the outputs of transformers, float32, on the CPU.

    python -m scripts.make_goldens [--out tests/goldens] [name ...]          the outputs of these folders anew
    python -m scripts.make_goldens NAME --seed 100 [--gain 2.0]              draws the weights of a new one first

Needs torch and transformers (made with torch 2.13, transformers 5.24); the tests that read the result need neither.
Names are rows of families.toml. A folder holds a real Hugging Face checkpoint: its config.json is written by hand, and
weights are not stored, but a recipe that says what they are drawn from (`goldens/weights.py`), with a scale for which
greedy outputs vary and the first seed for which no token depends on how sums are rounded. `golden.npz` beside it holds,
for prompts of 1 to 150 tokens:

    prompt_I [T] int32        tokens_I [64] int32, greedy      best_I [64, 2] float32, the two best logits of each step
    last_logits [prompts, V]  observed [2] int32, indices of prompts with all of:
    embed_I [T, D]   layers_I [L, T, D]   norm_I [T, D]   logits_I [T, V]
    bf16_error [] float32, how far the reference in bfloat16 is from itself in float32: root mean square over the
    logits of all prompts with their tokens, by that of the logits with each position's mean taken off
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from scripts.goldens.folder import draw
from scripts.goldens.recipe import first_seed
from scripts.goldens.reference import (
    OBSERVED,
    PROMPT_LENGTHS,
    Laws,
    bf16_error,
    config_of,
    draw_prompts,
    is_same_on_meshes,
    load,
    observe,
    skeleton,
    steady,
    unpack_experts,
)

GOLDENS = Path("tests/goldens")


def main() -> None:
    """Makes what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(tomllib.loads((GOLDENS / "families.toml").read_text()))
    parser.add_argument("names", nargs="*", default=known, help="rows of families.toml (default: all)")
    parser.add_argument("--out", type=Path, default=GOLDENS, help="folder of the folders")
    parser.add_argument(
        "--seed", type=int, help="draw the weights and prompts of one folder, with this seed or the next"
    )
    for name, default in (("gain", Laws.gain), ("norm-mean", Laws.norm_mean), ("embed-std", Laws.embed_std)):
        parser.add_argument(f"--{name}", type=float, default=default, help=f"of drawn weights (default: {default})")
    args = parser.parse_args()
    if unknown := set(args.names) - set(known):
        parser.error(f"families.toml has no row {sorted(unknown)}")
    if args.seed is not None and len(args.names) != 1:
        parser.error("--seed draws the weights of one folder; name it")
    transformers.utils.logging.disable_progress_bar()
    for name in args.names:
        print(name)
        make(args.out / name, args.seed, {"gain": args.gain, "norm_mean": args.norm_mean, "embed_std": args.embed_std})


def make(folder: Path, seed: int | None, laws: dict[str, float]) -> None:
    """Writes golden.npz. seed: the recipe is drawn first, with the first seed from it on that leaves nothing to chance.

    No token and no expert may depend on how sums are rounded, nor may what the mesh tests compare.
    """
    config = config_of(folder)
    like = skeleton(config)
    if seed is None:
        with np.load(folder / "golden.npz") as old:
            prompts = [old[f"prompt_{i}"] for i in range(len(PROMPT_LENGTHS))]
    else:
        either_sign = laws["norm_mean"] == 0 or config.model_type.startswith("gemma4")
        draw(like, folder, seed, Laws(**laws, either_sign=either_sign).of)
        prompts = draw_prompts(config.vocab_size, seed)

    def answer() -> dict[str, np.ndarray] | None:
        model = load(like, folder, unpack_experts)
        found = steady(model, prompts)
        if found is None or not is_same_on_meshes(folder, model):
            return None
        return found | observed(model, prompts, found)

    found = answer() if seed is None else first_seed(folder, seed, answer)
    if found is None:
        raise SystemExit(f"{folder}: a token depends on how sums are rounded; draw other weights with --seed")
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
    main()
