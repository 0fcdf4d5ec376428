"""What is asked of a server, and when: loads of random tokens, arrivals, and traces from a file.

Prompts are token ids, so that their length is exact and does not depend on a tokenizer. Arrivals are drawn before the
run and never wait for answers: an open loop, in which a server that falls behind has a queue that grows.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOADS = ("uniform", "shared-prefix", "ragged")
_LEAST_ID = 10  # lower ids are special in many vocabularies
_HASHED_TOKENS = 512  # that a hash of a trace stands for


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedRequest:
    """at_s: after the start. prompt: token ids, a text, or messages of a chat. num_prompt_tokens: 0 of unknown."""

    at_s: float
    prompt: Any
    max_tokens: int
    num_prompt_tokens: int = 0

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], Mapping)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """load: of LOADS. input_len, output_len: tokens; the most of a ragged load. max_token_id: most that is drawn.

    prefix_len: tokens that the prompts of a shared-prefix load begin with, which are part of input_len; num_prefixes:
    how many different ones there are. request_rate: requests a second; infinite asks all at once. burstiness: 1 draws a
    Poisson process, less comes in bursts, more evenly.
    """

    load: str = "uniform"
    num_prompts: int = 100
    input_len: int = 256
    output_len: int = 64
    prefix_len: int = 192
    num_prefixes: int = 4
    max_token_id: int = 255
    request_rate: float = 4.0
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.load not in LOADS:
            raise ValueError(f"load is {self.load!r}; it must be one of {', '.join(LOADS)}")
        for field in ("num_prompts", "input_len", "output_len", "num_prefixes"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be 1 or more")
        for field in ("request_rate", "burstiness"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be more than 0")
        if self.load == "shared-prefix" and not 0 < self.prefix_len < self.input_len:
            raise ValueError(f"prefix_len is {self.prefix_len}; it must be 1 to {self.input_len - 1}, within input_len")
        if self.max_token_id <= _LEAST_ID:
            raise ValueError(f"max_token_id is {self.max_token_id}; it must be more than {_LEAST_ID}")


def requests_of(load: Load) -> list[TimedRequest]:
    """The requests of a load; the same for the same seed."""
    draw, at_s, arrivals = random.Random(load.seed), 0.0, []
    for _ in range(load.num_prompts):
        arrivals.append(at_s)
        if load.request_rate != float("inf"):  # gaps are of a gamma distribution of mean 1 / rate
            at_s += draw.gammavariate(load.burstiness, 1 / (load.request_rate * load.burstiness))
    length = load.prefix_len if load.load == "shared-prefix" else 0
    prefixes = [_tokens(draw, length, load.max_token_id) for _ in range(load.num_prefixes)]
    return [_request(draw, load, at_s, draw.choice(prefixes)) for at_s in arrivals]


def _request(draw: random.Random, load: Load, at_s: float, prefix: list[int]) -> TimedRequest:
    num_prompt, max_tokens = (
        draw.randint(1, most) if load.load == "ragged" else most for most in (load.input_len, load.output_len)
    )
    prompt = prefix + _tokens(draw, num_prompt - len(prefix), load.max_token_id)
    return TimedRequest(at_s=at_s, prompt=prompt, max_tokens=max_tokens, num_prompt_tokens=num_prompt)


def _tokens(draw: random.Random, count: int, max_token_id: int) -> list[int]:
    return [draw.randint(_LEAST_ID, max_token_id) for _ in range(count)]


def read_trace(path: str | Path, *, max_token_id: int = 255) -> list[TimedRequest]:
    """The requests of a file of JSON lines, each with `timestamp`, in milliseconds after the start.

    A line has a `prompt` (a text or token ids) or `messages`, with `max_tokens`; or lengths alone, `input_length` and
    `output_length`, with `hash_ids` of its blocks of 512 tokens: lines that share the first hashes share a prefix.
    Raises ValueError, naming the line, for what is neither.
    """
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                found.append(_traced(json.loads(line), number, max_token_id))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path}, line {number}, is no request ({type(error).__name__}: {error}); it must be an object "
                    "with timestamp and either prompt or messages and max_tokens, or input_length and output_length"
                ) from error
    if not found:
        raise ValueError(f"{path} holds no requests; write one JSON object a line")
    first = min(each.at_s for each in found)
    return sorted((dataclasses.replace(each, at_s=each.at_s - first) for each in found), key=lambda each: each.at_s)


def _traced(line: Mapping[str, Any], line_number: int, max_token_id: int) -> TimedRequest:
    at_s = float(line["timestamp"]) / 1000
    prompt = line.get("prompt", line.get("messages"))
    if prompt:
        return TimedRequest(at_s=at_s, prompt=prompt, max_tokens=int(line["max_tokens"]))
    length, prompt = int(line["input_length"]), []
    for hashed in line.get("hash_ids", ()):
        prompt += _tokens(random.Random(f"block {hashed}"), _HASHED_TOKENS, max_token_id)
    prompt += _tokens(random.Random(f"line {line_number}"), length - len(prompt), max_token_id)
    output = int(line["output_length"])
    return TimedRequest(at_s=at_s, prompt=prompt[:length], max_tokens=output, num_prompt_tokens=length)
