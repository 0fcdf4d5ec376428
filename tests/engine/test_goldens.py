"""The engine's greedy tokens are those of the reference implementation."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from tests.support import GOLDENS, INVARIANT, SMALL, answers, run, small_llm

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)

TIE = 1e-4  # two best float32 logits closer than this are a tie: either token is right
MOST_TIES = 1 / 20  # of the rows


def golden_prompts(family: str) -> tuple[list[list[int]], list[np.ndarray], list[np.ndarray]]:
    """Prompts, greedy tokens [64] and the two best logits of each step [64, 2]."""
    with np.load(GOLDENS / family / "golden.npz") as golden:
        count = sum(name.startswith("prompt_") for name in golden.files)
        return tuple([golden[f"{what}_{i}"] for i in range(count)] for what in ("prompt", "tokens", "best"))


def check_equal(outputs, tokens, best) -> None:
    """Equal token for token; a row may differ only from a step on whose two best logits tie."""
    num_ties = 0
    for output, expected, logits in zip(outputs, tokens, best, strict=True):
        differs = np.flatnonzero(np.asarray(output.token_ids) != expected)
        if len(differs):
            gap = logits[differs[0], 0] - logits[differs[0], 1]
            assert gap < TIE, f"token {differs[0]} differs where the best logits are {gap} apart"
            num_ties += 1
    assert num_ties <= MOST_TIES * len(tokens), f"{num_ties} of {len(tokens)} rows end in a tie"


def check_again(
    engine, prompts, tokens, best, *, used: Sequence[int] = (0, 3), copies: int = 1, n: int = 1, max_tokens: int = 64
) -> None:
    """Prompts have the reference's tokens when they come again and again, each time with some of their tokens.

    used: how many, one number for each time. copies: of a prompt at once. n: choices of each.
    """
    for start in used:
        params = dataclasses.replace(GREEDY, n=n, max_tokens=max_tokens - start)
        whole = [[*map(int, prompt), *map(int, said[:start])] for prompt, said in zip(prompts, tokens, strict=True)]
        outputs = answers(engine, [(ids, params) for ids in whole for _ in range(copies)])
        for copy, choice in itertools.product(range(copies), range(n)):
            found = [output.outputs[choice] for output in outputs[copy::copies]]
            check_equal(found, [t[start:max_tokens] for t in tokens], [b[start:max_tokens] for b in best])


def check_tokens(name: str, config) -> None:
    prompts, tokens, best = golden_prompts(name)
    check_equal(run(small_llm(name, config), [p.tolist() for p in prompts], GREEDY), tokens, best)


def test_greedy_tokens_equal_the_reference(family):
    check_tokens(family, SMALL)


@pytest.mark.parametrize("name", ["qwen3_moe", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "qwen2"))])
def test_greedy_tokens_in_one_bucket_equal_the_reference(name):
    check_tokens(name, INVARIANT)
