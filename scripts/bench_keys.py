"""Whether a prompt that another key has asked comes sooner: times to the first token, one JSON line.

    python -m scripts.bench_keys --url http://127.0.0.1:8000 --api-key-file FILE [--prompts 40] [--tokens 400]

FILE is the server's, and its first two keys have caches of their own. Each prompt is asked by the first key, by the
second, and by the first again, and beside it one that nobody has asked before, by the second: `other_key` is to be as
`fresh`, and `same_key` is a hit. Requests come one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from ferrum_jax.bench.serving.http_client import Address, ask
from ferrum_jax.bench.serving.loads import TimedRequest
from ferrum_jax.bench.serving.run import model_of, quantile
from ferrum_jax.serve.http.api_keys import read_keys
from scripts.git_state import git_state


async def measure(url: str, keys: tuple[str, str], num_prompts: int, num_tokens: int) -> dict[str, Any]:
    """Milliseconds to the first token, by what the server has seen of a prompt."""
    place, draw = Address.of(url), random.Random(0)
    headers = [{"Authorization": f"Bearer {key}"} for key in keys]
    model = await model_of(place, headers[0])
    found: dict[str, list[float]] = {"first_key": [], "other_key": [], "fresh": [], "same_key": []}

    async def one(name: str, prompt: list[int], key: int) -> None:
        asked = TimedRequest(at_s=0.0, prompt=prompt, max_tokens=1, num_prompt_tokens=num_tokens)
        answer = await ask(place, asked, model, headers[key], {"temperature": 0})
        if answer.error:
            raise SystemExit(answer.error)
        found[name].append(1000 * answer.ttft_s)

    for _ in range(num_prompts):
        prompt, other = ([draw.randint(10, 255) for _ in range(num_tokens)] for _ in range(2))
        await one("first_key", prompt, 0)
        for name, which in draw.sample([("other_key", prompt), ("fresh", other)], 2):
            await one(name, which, 1)
        await one("same_key", prompt, 0)
    shares = {"p10": 0.1, "median": 0.5, "p90": 0.9}
    return {name: {word: round(quantile(ms, share), 1) for word, share in shares.items()} for name, ms in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the server, as in http://127.0.0.1:8000")
    parser.add_argument("--api-key-file", type=Path, required=True, help="that the server was given")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=400, help="of each prompt")
    arguments = parser.parse_args()
    words = [line.split()[0] for line in arguments.api_key_file.read_text().splitlines() if line.split()]
    read_keys(arguments.api_key_file)  # raises for a file that no server takes
    if len(words) < 2:
        parser.error(f"{arguments.api_key_file} has {len(words)} keys; it must have two")
    ms = asyncio.run(measure(arguments.url, (words[0], words[1]), arguments.prompts, arguments.tokens))
    line = {"benchmark": "keys", "tokens": arguments.tokens, "ttft_ms": ms, "load": os.getloadavg()[0], **git_state()}
    json.dump(line, sys.stdout)
    print()


if __name__ == "__main__":
    main()
