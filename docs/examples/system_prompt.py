"""Computes a long system prompt once, keeps it, and hands it to the next process.

    python docs/examples/system_prompt.py DIR FOLDER

The first start computes the prompt and writes it to FOLDER; every later one reads it from there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ferrum_jax import LLM, EngineConfig, SamplingParams

SYSTEM = (
    "# A module of small functions over lists of numbers.\n# Every function has a docstring and no side effects.\n" * 6
)
QUESTIONS = ["def total(numbers):\n", "def largest(numbers):\n", "def mean(numbers):\n"]


def main(model: str, folder: str, config: EngineConfig | None = None) -> list[int]:
    llm = LLM(model, config)
    if Path(folder).exists():
        print(f"{llm.load_prefix_cache(folder, pin=True)} blocks read")
    else:
        print(f"{llm.cache_prefix(SYSTEM, pin=True)} tokens computed and kept")
        llm.save_prefix_cache(folder, SYSTEM)
    outputs = llm.generate(
        [SYSTEM + question for question in QUESTIONS], SamplingParams(max_tokens=16, temperature=0.0)
    )
    for output in outputs:
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached")
    return [output.num_cached_tokens for output in outputs]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
