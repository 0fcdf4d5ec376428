"""Scores completions that are given: the log-probability of each after a prompt, in all and a token.

    python docs/examples/logprobs.py DIR

Nothing but one token is generated: `prompt_logprobs` gives the log-probability of every token of a prompt, and those
behind the common beginning are the completion's.
"""

from __future__ import annotations

import sys

from ferrum_jax import LLM, EngineConfig, SamplingParams

PROMPT = "class Stack:\n    def __init__(self):\n        "
COMPLETIONS = ["self.items = []\n", "return None\n", "banana banana banana\n"]


def main(model: str, config: EngineConfig | None = None) -> dict[str, float]:
    llm = LLM(model, config)
    ask = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    given, *outputs = llm.generate([PROMPT, *(PROMPT + completion for completion in COMPLETIONS)], ask)
    scores = {}
    for completion, output in zip(COMPLETIONS, outputs, strict=True):
        ids, entries = output.prompt_token_ids, output.prompt_logprobs
        pairs = zip(ids, given.prompt_token_ids, strict=False)  # where a token reaches over the seam, it counts
        start = next((i for i, (token, own) in enumerate(pairs) if token != own), len(given.prompt_token_ids))
        logprobs = [entries[i][ids[i]].logprob for i in range(max(start, 1), len(ids))]
        scores[completion] = sum(logprobs)
        print(f"{sum(logprobs):8.2f} in all, {sum(logprobs) / len(logprobs):6.2f} a token: {completion!r}")
    return scores


if __name__ == "__main__":
    main(sys.argv[1])
