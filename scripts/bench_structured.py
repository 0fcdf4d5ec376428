"""What structured output costs: a device's idle time, the demo's speed, a new schema's first token; one JSON line.

    python -m scripts.bench_structured [--rows 256] [--vocabulary 151936] [--forward-ms 10] [--model checkpoints/demo]

The device computes nothing: its forward takes a fixed time of a clock that runs with the host's, and jumps ahead where
the host would wait. What samples draws any token that the mask allows; that is no part of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.asked.structured_outputs import StructuredOutputsParams
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.adapters import HeldSlots, LoadedAdapters
from ferrum_jax.engine.constraints import Constraints
from ferrum_jax.engine.engine import Engine
from ferrum_jax.engine.submission import Intake
from ferrum_jax.ints import ceil_div
from ferrum_jax.llm import LLM
from ferrum_jax.plan import StepPlan
from ferrum_jax.prefix_cache.cache_manager import CacheManager
from ferrum_jax.scheduling.scheduler import Scheduler
from ferrum_jax.sizes.engine_sizes import EngineSizes
from ferrum_jax.startup.build_engine import no_adapter
from ferrum_jax.structured.reading.message_parser import NO_FORMS
from ferrum_jax.text.tokenizer import Tokenizer
from scripts.git_state import git_state

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 20},
        "scores": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 30},
    },
    "required": ["name", "born", "tags", "scores"],
    "additionalProperties": False,
}
_WARM_STEPS, _STEPS, _TOKENS = 20, 120, 160


def make_tokenizer(size: int) -> Tokenizer:
    """A byte-level tokenizer of so many tokens, of texts of up to 12 letters as words have them, half after a space."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    texts = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    merges, known = [], ["Ġ", *letters]
    while len(texts) < size - 1:
        first, second = rng.choice(known), letters[min(int(rng.expovariate(0.15)), 25)]
        if first + second not in texts and len(first) < 12:
            texts[first + second] = None
            merges.append((first, second))
            known.append(first + second)
    made = tokenizers.Tokenizer(models.BPE({text: place for place, text in enumerate(texts)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    with tempfile.TemporaryDirectory() as folder:
        made.save(str(Path(folder, "tokenizer.json")))
        found = Tokenizer.load(folder)
    assert found is not None and found.vocab_size == size
    return found


class FakeDevice:
    """A runner whose forward takes `forward_s`, and nothing else takes time. idle_s: when it had nothing to do."""

    def __init__(self, forward_s: float, words: int, rows: int) -> None:
        self.forward_s = forward_s
        self.masks = np.full((rows + 1, words), -1, np.int32)
        self.most_tokens, self.idle_s, self.busy_s = None, 0.0, 0.0
        self.own_cpu_s = 0.0  # of the processor, for what the device draws
        self._skipped_s = self._free_at = 0.0
        self._rng = np.random.default_rng(0)

    def now(self) -> float:
        return time.perf_counter() + self._skipped_s

    @contextlib.contextmanager
    def outside_of_time(self) -> Iterator[None]:
        start, cpu = time.perf_counter(), time.process_time()
        yield
        self._skipped_s -= time.perf_counter() - start
        self.own_cpu_s += time.process_time() - cpu

    def wait_until(self, moment: float) -> None:
        self._skipped_s += max(0.0, moment - self.now())

    def take_parts(self) -> bool:
        return False

    def write_slot(self, shard: int, slot: int, record: np.ndarray) -> None:
        pass

    def write_masks(self, ids: Sequence[Sequence[int]], masks: Sequence[np.ndarray]) -> None:
        self.masks[ids[0]] = masks[0]

    def _start(self, seconds: float) -> None:
        now = self.now()
        if self._free_at:
            self.idle_s += max(0.0, now - self._free_at)
        self._free_at = max(now, self._free_at) + seconds
        self.busy_s += seconds

    def dispatch(self, plan: StepPlan, before_sampling: Callable[[], None] = lambda: None) -> Any:
        self._start(self.forward_s)
        before_sampling()
        self._start(0.0)
        with self.outside_of_time():
            tokens = self._draw(plan.shards[0].mask_ids)
        return _Drawn(device=self, plan=plan, tokens=tokens, ready_at=self._free_at)

    def _draw(self, mask_ids: np.ndarray) -> np.ndarray:
        """The lowest allowed token of a word of each row's mask that has one; chance decides which word."""
        masks = self.masks[mask_ids].view(np.uint32)
        order = np.roll(np.arange(masks.shape[1]), int(self._rng.integers(masks.shape[1])))
        words = order[(masks[:, order] != 0).argmax(axis=1)]
        found = masks[np.arange(len(masks)), words].astype(np.int64)
        return (32 * words + np.log2(found & -found).astype(np.int64)).astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A step of the device."""

    device: FakeDevice
    plan: StepPlan
    tokens: np.ndarray
    ready_at: float

    def rows(self) -> np.ndarray:
        self.device.wait_until(self.ready_at)
        return self.tokens[:, None]


def make_engine(num_rows: int, vocabulary: int, device: FakeDevice, tokenizer: Tokenizer) -> Engine:
    """An engine over the fake device."""
    end_ids = frozenset({vocabulary - 1})
    sizes = EngineSizes(
        block_size=16,
        group_blocks=(num_rows * 32,),
        max_num_seqs=num_rows,
        max_num_batched_tokens=8192,
        max_model_len=512,
    )
    constraints = Constraints(tokenizer, vocab_size=vocabulary, end_ids=end_ids, forms=NO_FORMS)
    intake = Intake(
        tokenizer=tokenizer,
        vocab_size=vocabulary,
        end_ids=end_ids,
        max_model_len=512,
        max_request_tokens=512,
        seed=0,
        grammar=constraints.grammar,
        adapter=LoadedAdapters(None, no_adapter).get,
    )
    runner: Any = device
    return Engine(
        runner=runner,
        scheduler=Scheduler([CacheManager(sizes)]),
        intake=intake,
        constraints=constraints,
        adapters=HeldSlots(LoadedAdapters(None, no_adapter), 0, lambda slot, staged: None),
    )


def idle_share(num_rows: int, vocabulary: int, forward_s: float, tokenizer: Tokenizer, *, held: bool) -> dict[str, Any]:
    """How much of its time the device has nothing to do in steps in which all rows decode. held: under grammars."""
    device = FakeDevice(forward_s, ceil_div(vocabulary, 32), num_rows)
    engine = make_engine(num_rows, vocabulary, device, tokenizer)
    wishes = itertools.cycle(
        StructuredOutputsParams(json=_PERSON | {"title": str(i)}, disable_any_whitespace=True) for i in range(8)
    )
    free = SamplingParams(max_tokens=_TOKENS, detokenize=False)
    for row in range(num_rows):
        sampling = dataclasses.replace(free, structured_outputs=next(wishes)) if held else free
        engine.add([1 + row % 97, *range(2, 40)], sampling)
    steps = []
    for _ in range(_WARM_STEPS + _STEPS):
        before = device.idle_s, device.busy_s, time.process_time() - device.own_cpu_s
        engine.step()
        after = device.idle_s, device.busy_s, time.process_time() - device.own_cpu_s
        steps.append([b - a for a, b in zip(before, after, strict=True)])
    idle, busy, cpu = zip(*steps[_WARM_STEPS:], strict=True)
    return {
        "idle_share": round(sum(idle) / (sum(idle) + sum(busy)), 4),
        "idle_ms_a_step": _spread_ms(idle),
        "cpu_ms_a_step": _spread_ms(cpu),  # of all threads, whatever else the machine does
        "rows_left": engine.scheduler.num_running,
        "masks": engine.counts()["masks"],
    }


def _spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    tenths = statistics.quantiles([1e3 * value for value in seconds], n=10)
    return {name: round(value, 2) for name, value in zip(("p10", "p50", "p90"), tenths[::4], strict=True)}


def speed(llm: LLM, num_rows: int, repeats: int) -> dict[str, Any]:
    """Tokens a second of rows with and without grammars, in turn."""
    held = StructuredOutputsParams(json=_PERSON, disable_any_whitespace=True)
    kinds = {
        "free": SamplingParams(max_tokens=96, temperature=1.0, ignore_eos=True, seed=1),
        "held": SamplingParams(max_tokens=96, temperature=1.0, seed=1, structured_outputs=held),
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repeat in range(repeats + 1):  # the first one warms up
        for kind, params in kinds.items():
            prompts = [[5 + row, 6 + repeat, *range(20, 40)] for row in range(num_rows)]
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, progress=False)
            seconds = time.perf_counter() - start
            if repeat:
                rates[kind].append(sum(len(output.token_ids) for output in outputs) / seconds)
    free, held_rate = (statistics.median(rates[kind]) for kind in kinds)
    return {"free_tokens_s": round(free, 1), "held_tokens_s": round(held_rate, 1), "ratio": round(held_rate / free, 3)}


def first_token(llm: LLM, repeats: int) -> dict[str, Any]:
    """Milliseconds from the end of the compile of a schema of 2 kB that is new to the first token of its row."""
    compiled, after = [], []
    for repeat in range(repeats):
        names = [f"field_{repeat}_{number}" for number in range(24)]
        fields = {name: {"type": "string", "description": "x" * 20, "maxLength": 40} for name in names}
        schema = {"type": "object", "properties": fields, "required": names, "additionalProperties": False}
        params = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(json=schema))
        engine = llm.engine
        ended: list[float] = []
        start = time.perf_counter()
        submission = engine.add([7, 8, 9, 10 + repeat], params)
        grammar = engine._submissions[submission].grammar
        assert grammar is not None
        grammar._compiled.add_done_callback(lambda _, ended=ended: ended.append(time.perf_counter()))
        while engine.has_unfinished and not any(delta.token_ids for delta in engine.peek(submission)):
            engine.step()
        after.append(1e3 * (time.perf_counter() - ended[0]))
        compiled.append(1e3 * (ended[0] - start))
        while engine.has_unfinished:
            engine.step()
    median = statistics.median
    return {
        "bytes": len(json.dumps(schema)),
        "compile_ms": round(median(compiled), 1),
        "then_ms": round(median(after), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="that decode at once on the fake device")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="tokens of its tokenizer")
    parser.add_argument("--forward-ms", type=float, default=10.0, help="of each of its steps")
    parser.add_argument("--model", default="checkpoints/demo", help="whose speed is measured")
    parser.add_argument("--demo-rows", type=int, default=32, help="that it runs at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-model", action="store_true", help="measure the fake device alone")
    arguments = parser.parse_args()
    tokenizer = make_tokenizer(arguments.vocabulary)
    sizes = arguments.rows, arguments.vocabulary, arguments.forward_ms / 1e3, tokenizer
    found: dict[str, Any] = {name: idle_share(*sizes, held=held) for name, held in (("free", False), ("held", True))}
    if not arguments.no_model:
        rows = arguments.demo_rows
        llm = LLM(arguments.model, EngineConfig(max_num_seqs=rows, max_model_len=256, ready="all"))
        found |= {
            "demo": speed(llm, rows, arguments.repeats),
            "new_schema": first_token(llm, 2 * arguments.repeats + 1),
        }
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({**found, **machine, **git_state()}))


if __name__ == "__main__":
    main()
