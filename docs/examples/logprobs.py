"""Scores completions that are given: the log-probability of each after a prompt, in all and a token.

    python docs/examples/logprobs.py DIR

Nothing is generated. The prompt is computed once for all completions.
"""

from __future__ import annotations

import sys

from ferrum_jax import LLM, EngineConfig

PROMPT = "class Stack:\n    def __init__(self):\n        "
COMPLETIONS = ["self.items = []\n", "return None\n", "banana banana banana\n"]


def main(model: str, config: EngineConfig | None = None) -> dict[str, float]:
    llm = LLM(model, config)
    found = llm.compute_logprobs([PROMPT] * len(COMPLETIONS), COMPLETIONS)
    scores = {text: each.cumulative_logprob for text, each in zip(COMPLETIONS, found, strict=True)}
    for text, each in zip(COMPLETIONS, found, strict=True):
        print(f"{scores[text]:8.2f} in all, {each.logprobs.mean():6.2f} a token: {text!r}")
    return scores


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
