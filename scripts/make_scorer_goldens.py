"""Makes tests/goldens/scorers/: tiny random models that score pairs of texts, and the scores of sentence-transformers.

    python -m scripts.make_scorer_goldens [--out tests/goldens/scorers] [name ...]

Needs torch, transformers and sentence-transformers (made with 2.13, 5.24 and 5.7); the test that reads the result needs
none of them. Each folder is a real checkpoint, whose config.json, tokenizer and files of sentence-transformers are
written by hand, and `golden.json` beside it holds pairs, one of them too long, and what `CrossEncoder.predict` gives
for them in float32. A model that generates has a LogitScore; `told` holds scores under an instruction, `published`
those of the prompt that Qwen3-Reranker's authors publish.
"""

import json
from pathlib import Path
from typing import Any

import sentence_transformers  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]

from scripts.goldens.command import run
from scripts.goldens.weights import made
from scripts.make_encoder_goldens import drawn

PAIRS = (
    ("the quick fox", "a lazy dog jumps over the brown fox"),
    ("a block", "holds the keys and values of its tokens"),
    ("tokens", "query"),
    ("query " * 20, "document values " * 15),  # cut on both sides
    ("keys", "the values of a block " * 12),  # on one
)
LONGEST = 40
_PUBLISHED = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
    "{instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SEEDS = {"bert": 0, "xlm_roberta": 1, "qwen3": 17}


def make(name: str, folder: Path) -> None:
    """Writes the recipe and golden.json of one folder."""
    own = drawn(folder, SEEDS[name])
    model = sentence_transformers.CrossEncoder(str(made(folder)), max_length=LONGEST)
    found = {"pairs": PAIRS, "scores": model.predict(list(PAIRS)).tolist()}
    if type(own).__name__.endswith("ForCausalLM"):
        found |= {"told": model.predict(list(PAIRS[:3]), prompt="the quick answer").tolist()}
        found |= {"published": [published(own, model.tokenizer, *pair) for pair in PAIRS[:3]]}
    (folder / "golden.json").write_text(json.dumps(found, indent=1) + "\n")


@torch.no_grad()
def published(model: Any, tokenizer: Any, query: str, document: str) -> float:
    """The score of the prompt that Qwen3-Reranker's authors publish."""
    true_id, false_id = (tokenizer.convert_tokens_to_ids(text) for text in ("yes", "no"))
    text = _PUBLISHED.format(instruction=_INSTRUCTION, query=query, document=document)
    ids = tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
    logits = model(torch.tensor([ids])).logits[0, -1]
    return float(torch.sigmoid(logits[true_id] - logits[false_id]))


if __name__ == "__main__":
    run(__doc__, SEEDS, "tests/goldens/scorers", make, keeps=True)
