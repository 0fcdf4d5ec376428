"""Makes tests/goldens/classifiers/: tiny random models that classify texts, and the logits of transformers.

    python -m scripts.make_classifier_goldens [--out tests/goldens/classifiers] [name ...]

Needs torch and transformers (made with 2.13 and 5.24); the test that reads the result needs neither. Each folder is a
real checkpoint, and `golden.json` beside it holds texts as token ids and their logits in float32, each text by itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]

from scripts.goldens.command import run
from scripts.goldens.recipe import replace_weights
from scripts.goldens.reference import load
from scripts.make_encoder_goldens import Golden, law, skeleton

TEXTS = ([7, 11, 30], [2, *range(5, 40), 3], [9] * 20, [4])
_SIZES = {
    "vocab_size": 62,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 76,
    "max_position_embeddings": 64,
}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
_MOODS = {"id2label": {0: "glad", 1: "sad", 2: "neither"}, "label2id": {"glad": 0, "sad": 1, "neither": 2}}
GOLDENS = {
    "bert": Golden(
        model="BertForSequenceClassification",
        dtype="float32",
        config={**_SIZES, **_MOODS, "problem_type": "multi_label_classification"},
    ),
    "llama": Golden(model="LlamaForSequenceClassification", dtype="float32", config={**_DECODER, **_MOODS}),
    "qwen2": Golden(
        model="Qwen2ForSequenceClassification",
        dtype="float32",
        config={**_DECODER, "num_labels": 1, "tie_word_embeddings": True},
    ),
}


def make(name: str, folder: Path) -> None:
    """Writes one folder."""
    golden, seed = GOLDENS[name], list(GOLDENS).index(name) + 40
    like = skeleton(golden)
    like.save_pretrained(folder)
    replace_weights(folder, seed, lambda weight, shape: law(weight, shape, golden), like.all_tied_weights_keys)
    model = load(like, folder, lambda tensors: tensors)
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0].tolist() for ids in TEXTS]
    (folder / "golden.json").write_text(json.dumps({"texts": TEXTS, "logits": logits}, indent=1) + "\n")


if __name__ == "__main__":
    run(__doc__, GOLDENS, "tests/goldens/classifiers", make)
