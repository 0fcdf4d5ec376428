"""Makes tests/goldens/classifiers/: tiny random models that classify texts, and the logits of transformers.

    python -m scripts.make_classifier_goldens [--out tests/goldens/classifiers] [name ...]

Needs torch and transformers (made with 2.13 and 5.24); the test that reads the result needs neither. Each folder is a
real checkpoint whose config.json is written by hand, and `golden.json` beside it holds texts as token ids and their
logits in float32, each text by itself.
"""

import json
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]

from scripts.goldens.command import run
from scripts.make_encoder_goldens import drawn

TEXTS = ([7, 11, 30], [2, *range(5, 40), 3], [9] * 20, [4])
SEEDS = {"bert": 40, "llama": 41, "qwen2": 42}


def make(name: str, folder: Path) -> None:
    """Writes the recipe and golden.json of one folder."""
    model = drawn(folder, SEEDS[name])
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0].tolist() for ids in TEXTS]
    (folder / "golden.json").write_text(json.dumps({"texts": TEXTS, "logits": logits}, indent=1) + "\n")


if __name__ == "__main__":
    run(__doc__, SEEDS, "tests/goldens/classifiers", make, keeps=True)
