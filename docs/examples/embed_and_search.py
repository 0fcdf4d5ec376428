"""Embeds documents and finds those that are nearest to a query.

    python docs/examples/embed_and_search.py DIR "a vehicle with two wheels"

DIR is an encoder (BERT, BGE, E5, ...) or a model that generates.
"""

from __future__ import annotations

import sys

import numpy as np

from ferrum_jax import LLM, EngineConfig

DOCUMENTS = [
    "A bicycle has two wheels and is moved by pedals.",
    "Bread is baked from flour, water and yeast.",
    "A lake is a body of water surrounded by land.",
    "The moon goes around the earth in about a month.",
    "Trains run on rails and stop at stations.",
]


def main(model: str, query: str, config: EngineConfig | None = None, count: int = 3) -> list[tuple[float, str]]:
    llm = LLM(model, config)
    texts = [output.embedding for output in llm.embed(DOCUMENTS, normalize=True, truncate=True)]
    (asked,) = llm.embed([query], normalize=True, truncate=True)
    scores = np.stack(texts) @ asked.embedding  # vectors have length 1, so these are cosines
    best = [(float(scores[i]), DOCUMENTS[i]) for i in np.argsort(-scores)[:count]]
    for score, text in best:
        print(f"{score:.3f}  {text}")
    return best


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
