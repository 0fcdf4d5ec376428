"""The prompts that the mesh tests give to a golden, and what the engine says to them on one device.

A mesh adds in another order. Its tests compare log-probabilities at positions that golden.npz does not have, so the
maker looks at these too before it takes a seed.
"""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np

from ferrum_jax import SamplingParams
from scripts.goldens.weights import make

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=20)
DRAWN = dataclasses.replace(GREEDY, temperature=0.9, top_k=40, seed=5, repetition_penalty=1.2)
SCORED = dataclasses.replace(GREEDY, prompt_logprobs=20, max_tokens=1)
PREFIX = list(range(7, 45))
ROWS = (
    ([*PREFIX, 60], GREEDY),
    ([9], DRAWN),
    ([*PREFIX, 61, 62], GREEDY),
    (PREFIX[:20], SCORED),
    ([*PREFIX, 60], DRAWN),
)
# Two on each of four shards, whose pools hold one of them whole.
PRESSED = [[stem * 9 + i * i % 17 + 6 for i in range(30)] for stem in range(8)]


def answered(folder: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts with their tokens: of ROWS, then of PRESSED. folder: a golden's, with recipes of weights."""
    from ferrum_jax.config import EngineConfig
    from ferrum_jax.llm import LLM

    prompts = [*(prompt for prompt, _ in ROWS), *PRESSED]
    params = [*(each for _, each in ROWS), *(GREEDY for _ in PRESSED)]
    with tempfile.TemporaryDirectory() as plain:
        make(folder, Path(plain))
        config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, num_blocks=32, block_size=16)
        outputs = LLM(plain, config).generate(prompts, params, progress=False)
    found = [np.array([*p, *o.token_ids], np.int32) for p, o in zip(prompts, outputs, strict=True)]
    return found[: len(ROWS)], found[len(ROWS) :]
