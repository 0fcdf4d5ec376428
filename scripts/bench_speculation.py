"""Times drafted tokens: the same requests with and without them, in turns, in one process.

    python -m scripts.bench_speculation --shape qwen3-0.6b [--rows 1,4,16] [--tokens 128] [--method suffix] [--rounds 5]
    python -m scripts.bench_speculation --model checkpoints/demo --corpus README.md

again   requests that were answered once before, with an empty prefix cache: their drafts come true, the ceiling
fresh   requests that nobody has asked: with random ids, or stretches of the corpus at temperature 0.8
like    with a corpus: 200 rows that resemble 200 answered ones, at temperature 0.2, as a job's rows do

Prints one JSON line: seconds without over seconds with drafts, medians of rounds, and what became of the drafts.
Tokens are compared: the same bytes, or the line says how many rows differ.
"""

import argparse
import dataclasses
import json
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from ferrum_jax import LLM, EngineConfig, SamplingParams
from scripts.git_state import git_state
from scripts.shapes import SHAPES, write_random_checkpoint

_PROMPT = 64  # tokens or, of a corpus, four times as many characters
_LIKE = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--model")
    parser.add_argument("--corpus", type=pathlib.Path)
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--method", default="suffix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--invariant", action="store_true")
    arguments = parser.parse_args()
    model = arguments.model or write_random_checkpoint(arguments.shape, pathlib.Path(tempfile.gettempdir()) / "shapes")
    rows = [int(count) for count in arguments.rows.split(",")]
    config = EngineConfig(
        dtype="float32", max_model_len=1024, max_num_seqs=max(rows), invariant=arguments.invariant, ready="all"
    )
    both = [
        LLM(str(model), config),
        LLM(str(model), dataclasses.replace(config, speculative_config={"method": arguments.method})),
    ]
    text = arguments.corpus.read_text() if arguments.corpus else None
    greedy = SamplingParams(max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True)
    line: dict[str, Any] = {"model": str(arguments.model or arguments.shape), "method": arguments.method}
    for count in rows:
        prompts = _prompts(count, text, both[0].spec.vocab_size, seed=count)
        line[f"again {count}"] = _ratio(both, lambda _, prompts=prompts: prompts, greedy, arguments.rounds)

        def fresh(turn: int, count: int = count) -> Sequence[Any]:
            return _prompts(count, text, both[0].spec.vocab_size, seed=1000 * count + turn)

        drawn = dataclasses.replace(greedy, temperature=0.8, seed=1)
        line[f"fresh {count}"] = _ratio(both, fresh, drawn, arguments.rounds)
    if text is not None:
        line["like"] = _like(both, text, arguments)
    stats = both[1].stats()
    line["counts"] = {key: stats[key] for key in ("speculation_steps", "drafted_tokens", "accepted_tokens")}
    print(json.dumps({**line, **git_state()}))


def _prompts(count: int, text: str | None, vocab_size: int, *, seed: int) -> list[Any]:
    drawing = random.Random(seed)
    if text is None:
        return [[drawing.randrange(6, vocab_size) for _ in range(_PROMPT)] for _ in range(count)]
    starts = [drawing.randrange(len(text) - 4 * _PROMPT) for _ in range(count)]
    return [text[start : start + 4 * _PROMPT] for start in starts]


def _ratio(
    both: Sequence[LLM], prompts_of: Callable[[int], Sequence[Any]], params: SamplingParams, rounds: int
) -> dict[str, Any]:
    """The first turn warms up: executables are loaded, and answers are learnt."""
    seconds: list[list[float]] = [[], []]
    differing = 0
    for turn in range(rounds + 2):
        prompts, told = prompts_of(turn), []
        for number, llm in enumerate(both if turn % 2 else [*both][::-1]):
            llm.reset_prefix_cache()
            began_s = time.perf_counter()
            outputs = llm.generate(prompts, params, progress=False)
            if turn > 1:
                seconds[number if turn % 2 else 1 - number].append(time.perf_counter() - began_s)
            told.append([output.token_ids for output in outputs])
        differing += sum(one != other for one, other in zip(*told, strict=True))
    without, with_drafts = map(statistics.median, seconds)
    pairs = [one / other for one, other in zip(*seconds, strict=True)]
    return {
        "times": round(without / with_drafts, 2),
        "of pairs": round(statistics.median(pairs), 2),
        "without_s": round(without, 2),
        "rows that differ": differing,
    }


def _like(both: Sequence[LLM], text: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows in few forms: each asks for what comes after one of a dozen beginnings, behind a number of its own."""
    params = SamplingParams(max_tokens=arguments.tokens, temperature=0.2, seed=3, ignore_eos=True)
    beginnings = _prompts(12, text, 0, seed=7)

    def rows(first: int) -> list[str]:
        return [f"{number}. {beginnings[number % 12]}" for number in range(first, first + _LIKE)]

    answered = both[0].generate(rows(0), params, progress=False)
    both[1].learn(output.text for output in answered)
    return _ratio(both, lambda turn: rows(_LIKE * (turn + 1)), params, 3)


if __name__ == "__main__":
    main()
