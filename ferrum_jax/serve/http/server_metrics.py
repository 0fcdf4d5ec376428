"""Metrics in Prometheus' form: under vLLM's names what others' autoscalers and gateways read, and ours as `ferrum:`.

Times begin when HTTP has a request; those of tokens end when the engine commits their step, so that a reader who takes
them late changes none, and those of whole requests when they are answered. Counts of the engine are as it told them
last, at most a second ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ferrum_jax.core.metrics import MEDIA

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_RECENT = 2048  # times that the page's percentiles are taken of
_GAUGES = ("live", "cached", "clean", "kv_bytes", "weights_bytes", "executables", "host_entries", "pinned")
_DRAFTS = {  # vLLM's name -> ours; an engine that drafts nothing has none
    "vllm:spec_decode_num_drafts": ("speculation_steps", "Steps of rows that had a draft."),
    "vllm:spec_decode_num_draft_tokens": ("drafted_tokens", "Tokens drafted."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted_tokens", "Drafted tokens that stand."),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("accepted_by_position", "The same by their place in a draft."),
}
_COUNTS = ("steps", "computed_tokens", "padded_tokens", "evictions", "saved_prefill_tokens", "compiles_after_ready")
_COUNTS += tuple(MEDIA)


class ServerMetrics:
    """What one server counts. model: the name that all of it is labelled with."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.stats: Mapping[str, Any] = {}
        self._model = model

        def made(kind: Any, name: str, text: str, **more: Any) -> Any:
            return kind(name, text, ("model_name", *more.pop("labels", ())), registry=self.registry, **more)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return made(Histogram, f"vllm:{name}_seconds", text, buckets=buckets).labels(model)

        self._first_token = histogram("time_to_first_token", "From arrival to the first token.", _TTFT)
        self._between_tokens = histogram("inter_token_latency", "Between two tokens of a choice.", _BETWEEN)
        self.num_prompt_tokens = self.num_generated_tokens = 0
        self._recent: dict[str, deque[float]] = {"first": deque(maxlen=_RECENT), "between": deque(maxlen=_RECENT)}
        self.whole = histogram("e2e_request_latency", "From arrival to the end.", _WHOLE)
        self.queue = histogram("request_queue_time", "In the server's queue.", _WHOLE)
        self._prompt_tokens = made(Counter, "vllm:prompt_tokens", "Tokens of prompts.").labels(model)
        self._generated_tokens = made(Counter, "vllm:generation_tokens", "Tokens generated.").labels(model)
        self._success = made(Counter, "vllm:request_success", "Choices by their end.", labels=("finished_reason",))
        self._answers = made(Counter, "ferrum:http_responses", "Answers by status.", labels=("path", "status"))
        self._leavers = made(Counter, "ferrum:disconnects", "Who left before the end.").labels(model)
        self._slow = made(Counter, "ferrum:slow_readers", "Streams cut, for their reader was too slow.").labels(model)
        self._waiting = made(Gauge, "ferrum:queued_tokens", "Tokens of requests in the server's queue.").labels(model)
        self.registry.register(_OfEngine(lambda: self.stats, model))

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)
        self._recent["first"].append(seconds)

    def between_tokens(self, seconds: float) -> None:
        self._between_tokens.observe(seconds)
        self._recent["between"].append(seconds)

    def prompt_tokens(self, count: int) -> None:
        self._prompt_tokens.inc(count)
        self.num_prompt_tokens += count

    def generated_tokens(self, count: int) -> None:
        self._generated_tokens.inc(count)
        self.num_generated_tokens += count

    def recent(self) -> dict[str, list[float]]:
        """The median and the 99th percentile in seconds of times to the first token and between tokens; [] of none."""
        found = {}
        for name, values in self._recent.items():
            ordered = sorted(values)
            found[name] = [ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]] if ordered else []
        return found

    def ended(self, reason: str | None) -> None:
        self._success.labels(self._model, reason or "abort").inc()

    def answered(self, path: str, status: int) -> None:
        self._answers.labels(self._model, path, str(status)).inc()

    def left(self) -> None:
        self._leavers.inc()

    def was_slow(self) -> None:
        self._slow.inc()

    def text(self, num_waiting: int, num_waiting_tokens: int) -> bytes:
        """All of it. num_waiting: in the server's queue, beside the engine's."""
        self._waiting.set(num_waiting_tokens)
        self.stats = {**self.stats, "http_waiting": num_waiting}
        return generate_latest(self.registry)


class _OfEngine(Collector):
    """What the engine said last of itself."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]], model: str) -> None:
        self._stats, self._model = stats, model

    def collect(self) -> Iterable[Any]:
        stats = self._stats()
        usable = stats.get("live", 0) + stats.get("cached", 0) + stats.get("clean", 0)
        yield self._gauge("vllm:num_requests_running", "Rows that run.", stats.get("num_running", 0))
        waiting = stats.get("num_waiting", 0) + stats.get("http_waiting", 0)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", waiting)
        usage = stats.get("live", 0) / usable if usable else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Blocks that are held, of all; 1 is all.", usage)
        queried = stats.get("hit_tokens", 0) + stats.get("missed_tokens", 0)
        yield self._count("vllm:prefix_cache_queries", "Prompt tokens that were looked up.", queried)
        yield self._count("vllm:prefix_cache_hits", "Prompt tokens that were found.", stats.get("hit_tokens", 0))
        yield self._count("vllm:num_preemptions", "Rows taken off for blocks.", stats.get("preemptions", 0))
        for name, (ours, text) in _DRAFTS.items():
            if ours in stats:
                yield self._count(name, text, stats[ours])
        for name in _GAUGES:
            yield self._gauge(f"ferrum:{name}", f"`{name}` of LLM.stats().", stats.get(name, 0))
        for name in _COUNTS:
            yield self._count(f"ferrum:{name}", f"`{name}` of LLM.stats().", stats.get(name, 0))

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _count(self, name: str, text: str, value: float | Sequence[float]) -> CounterMetricFamily:
        """value: a count, or one for each position."""
        is_plain = not isinstance(value, Sequence)
        family = CounterMetricFamily(name, text, labels=("model_name",) if is_plain else ("model_name", "position"))
        for position, count in enumerate([value] if is_plain else value):
            family.add_metric((self._model,) if is_plain else (self._model, str(position)), count)
        return family
