"""Asks all requests of a load at their times, and makes numbers of what came: under the names of `vllm bench serve`."""

from __future__ import annotations

import asyncio
import bisect
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.bench.serving.http_client import Address, Answered, ask, lines_of
from ferrum_jax.bench.serving.loads import TimedRequest

_TIMES = ("ttft", "tpot", "itl", "e2el")
LIMITED = ("ttft", "tpot", "e2el")  # what a limit of goodput may name


async def model_of(place: Address, headers: Mapping[str, str]) -> str:
    """The first model of the server. Raises ConnectionError, saying what to do, where none answers."""
    where = f"{place.host}:{place.port}"
    try:
        content = b"".join([line async for line in lines_of(place, "GET", "/v1/models", None, headers)])
        return str(json.loads(content)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConnectionError(f"{where} answers, but not as a server of models does; see --url") from error
    except OSError as error:
        raise ConnectionError(f"no server answers at {where}: {error}; start one, or give another --url") from error


async def run(
    place: Address,
    requests: Sequence[TimedRequest],
    *,
    model: str,
    headers: Mapping[str, str],
    more: Mapping[str, Any],
    max_concurrency: int | None = None,
) -> list[Answered]:
    """What became of each request, in their order."""
    room = asyncio.Semaphore(max_concurrency or len(requests))
    began = time.perf_counter()

    async def one(asked: TimedRequest) -> Answered:
        await asyncio.sleep(max(0.0, began + asked.at_s - time.perf_counter()))
        async with room:
            late_s = time.perf_counter() - began - asked.at_s
            found = await ask(place, asked, model, headers, more)
        found.late_s = late_s
        return found

    return await asyncio.gather(*map(one, requests))


def limits_of(words: Sequence[str]) -> dict[str, float]:
    """Seconds by name, of words as in "ttft:500", in milliseconds. Raises ValueError for others."""
    found = {}
    for word in words:
        name, _, value = word.partition(":")
        if name not in LIMITED or not value.replace(".", "", 1).isdigit():
            raise ValueError(f"--goodput has {word!r}; it must be NAME:MS with a name of {', '.join(LIMITED)}")
        found[name] = float(value) / 1000
    return found


def summary_of(answers: Sequence[Answered], limits: Mapping[str, float]) -> dict[str, Any]:
    """Numbers of a run. limits: seconds by name, within which a request counts as good."""
    good = [each for each in answers if not each.error]
    start = min(each.sent for each in answers)
    seconds = max(each.ended for each in answers) - start
    num_in, num_out = sum(each.num_prompt_tokens for each in good), sum(each.num_tokens for each in good)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(_is_within(each, limits) for each in good) / seconds if limits else None,
        "output_throughput": num_out / seconds,
        "total_token_throughput": (num_in + num_out) / seconds,
        "max_output_tokens_per_s": _most_in_a_second([at for each in good for at in each.event_times]),
        "max_concurrent_requests": _most_at_once(answers),
        "p99_late_ms": 1000 * quantile([each.late_s for each in answers], 0.99),
    }
    for name, values in zip(_TIMES, _times_of(good), strict=True):
        found |= _spread(name, values)
    return found


def _times_of(good: Sequence[Answered]) -> tuple[list[float], ...]:
    between = [value for each in good for value in each.between_s]
    tpot = [each.tpot_s for each in good if each.num_tokens > 1]
    return [each.ttft_s for each in good], tpot, between, [each.latency_s for each in good]


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    ms = [1000 * value for value in values] or [0.0]
    parts = {"mean": statistics.fmean(ms), "median": statistics.median(ms), "std": statistics.pstdev(ms)}
    parts |= {f"p{percent}": quantile(ms, percent / 100) for percent in (90, 99)}
    return {f"{part}_{name}_ms": value for part, value in parts.items()}


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies, between two of them where none is there. values: at least one."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _is_within(answer: Answered, limits: Mapping[str, float]) -> bool:
    times = {"ttft": answer.ttft_s, "tpot": answer.tpot_s, "e2el": answer.latency_s}
    return all(times[name] <= most for name, most in limits.items())


def _most_in_a_second(times: list[float]) -> int:
    """The most events within a second."""
    times.sort()
    return max((bisect.bisect_left(times, at + 1.0) - place for place, at in enumerate(times)), default=0)


def _most_at_once(answers: Sequence[Answered]) -> int:
    changes = sorted([(each.ended, -1) for each in answers] + [(each.sent, 1) for each in answers])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def details_of(answers: Sequence[Answered]) -> dict[str, Any]:
    """What a summary is made of, request by request."""
    return {
        "input_lens": [each.num_prompt_tokens for each in answers],
        "output_lens": [each.num_tokens for each in answers],
        "ttfts": [each.ttft_s if each.event_times else 0.0 for each in answers],
        "itls": [each.between_s for each in answers],
        "latencies": [each.latency_s for each in answers],
        "start_times": [each.sent for each in answers],
        "generated_texts": [each.text for each in answers],
        "errors": [each.error for each in answers],
    }
