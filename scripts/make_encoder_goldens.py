"""Makes tests/goldens/encoders/: tiny random encoders of every family, and transformers' float32 vectors.

    python -m scripts.make_encoder_goldens [--out tests/goldens/encoders] [name ...]

Needs torch and transformers (made with torch 2.13, transformers 5.24); the tests that read the result need neither.
Each folder is a real checkpoint whose config.json is written by hand, as are the files of sentence-transformers and
the recipes of its linear layers where it has them. The script draws the recipe of the encoder's weights, and
`golden.npz` beside it holds, for texts of one token and more:

    prompt_I [T] int32    hidden_I [T, D] float32, the last layer    mean_I, cls_I, last_I [D], pooled, not normalised
    sentence_I [D], where linear layers stand behind the pooling: what sentence-transformers makes of the text

Weights are rounded to the dtype they are stored in.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from scripts.goldens.command import run
from scripts.goldens.folder import draw
from scripts.goldens.recipe import Law, normal
from scripts.goldens.reference import load, whole_skeleton
from scripts.goldens.weights import made

LENGTHS = (1, 2, 13, 16, 17, 40, 64)
NAMES = (  # by the seeds of their weights and prompts
    *("bert", "bert_masked", "xlm_roberta", "xlm_roberta_masked", "modernbert", "modernbert_masked"),
    *("embedding_gemma", "embedding_gemma_dense"),
)


def make(name: str, folder: Path) -> None:
    """Writes the recipe and golden.npz of one folder."""
    seed = NAMES.index(name)
    model = drawn(folder, seed)
    encoder = model if type(model).__name__.endswith("Model") else model.base_model
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for i, length in enumerate(LENGTHS):
        prompt = rng.integers(5, model.config.vocab_size, length).astype(np.int32)
        with torch.no_grad():
            hidden = encoder(torch.from_numpy(prompt).long()[None]).last_hidden_state[0]
        pooled = {"mean": hidden.double().mean(dim=0).float(), "cls": hidden[0], "last": hidden[-1]}
        arrays |= {f"prompt_{i}": prompt, f"hidden_{i}": hidden.numpy()}
        arrays |= {f"{how}_{i}": vector.numpy() for how, vector in pooled.items()}
        if any(folder.glob("*_Dense")):
            arrays[f"sentence_{i}"] = sentence_vector(folder, prompt)
    np.savez_compressed(folder / "golden.npz", **arrays)  # pyright: ignore[reportArgumentType]


def drawn(folder: Path, seed: int) -> Any:
    """The model of a folder's config.json in float32, with weights of the recipe that is drawn for it."""
    like = whole_skeleton(folder)
    draw(like, folder, seed, law(type(like).__name__))
    return load(like, folder, lambda tensors: tensors)


def law(architecture: str) -> Law:
    """What weights are drawn from."""

    def of(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        if "norm.weight" in name.lower():
            return normal(0.0 if "Gemma" in architecture else 1.0, 0.2)  # Gemma's multiply by 1 + weight
        if name.endswith("bias"):
            return normal(0.0, 0.3)
        return normal(0.0, 0.5 if "embeddings" in name else 1.5 / math.sqrt(shape[-1]))

    return of


def sentence_vector(folder: Path, prompt: np.ndarray) -> np.ndarray:
    """What sentence-transformers makes of token ids."""
    import sentence_transformers  # pyright: ignore[reportMissingImports]

    model = sentence_transformers.SentenceTransformer(
        str(made(folder)), model_kwargs={"dtype": "float32"}, device="cpu"
    )
    ids = torch.from_numpy(prompt).long()[None]
    with torch.no_grad():
        found = model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"][0]
    return found.float().numpy()


if __name__ == "__main__":
    run(__doc__, NAMES, "tests/goldens/encoders", make, keeps=True)
