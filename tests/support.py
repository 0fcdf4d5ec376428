"""Small engines over golden folders, and how tests run them."""

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import math
import os
import pathlib
import subprocess
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NoReturn

from ferrum_jax.config import EngineConfig
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.runtime.compile.executable_store import digest
from ferrum_jax.text.output_processor.choice_text import TokenTexts
from ferrum_jax.text.output_processor.collect import Collector
from tests.golden_table import GOLDENS, goldens

ROOT = pathlib.Path(__file__).parent.parent
FAMILIES = goldens("ladder")
QUANTISED = ("quantised/w4a16_zeros", "quantised/w8a8_experts")  # dense, and experts with rounded activations
COMPILED = ROOT / ".pytest_cache" / "executables"

# Few and small executables: decode of 1, 2, 4 rows, mixed of 16 tokens.
SMALL = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=256,
    num_blocks=80,
    block_size=16,
    compilation_cache_dir=str(COMPILED),
    ready="all",
)
# One executable serves all steps: 64 tokens, 64 rows.
INVARIANT = dataclasses.replace(SMALL, max_num_batched_tokens=64, invariant=True)


def child_environment() -> dict[str, str]:
    """For a process of its own: the repository comes first on its path, what was there (a compiler's folder) behind."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


def written_by(command: Sequence[str], *, cwd: pathlib.Path = ROOT, **how: Any) -> str:
    """The output of a program that ends well. how: of subprocess.run."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return done.stdout


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The test, which awaits, in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures) -> None:
        asyncio.run(test(**fixtures))

    return run


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A function that raises it, whatever it is called with."""

    def raises(*_: object, **__: object) -> NoReturn:
        raise error

    return raises


def is_running(process: int) -> bool:
    """Whether it is there and no zombie that nobody has waited for."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def one_at_a_time(*what: str) -> Iterator[None]:
    """Lets one process compile something, whose executables the next ones find in the store."""
    COMPILED.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(COMPILED / f"{digest(*what)}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def small_llm(family: str, config: EngineConfig = SMALL):
    """An LLM over a golden folder, made once in a process; tests build fresh engines from its `loaded`.

    Where several processes want the same one, the first compiles with all cores, and the others find its executables.
    """
    from ferrum_jax.llm import LLM

    with one_at_a_time(family, repr(config)):
        return LLM(str(GOLDENS / family), config)


def fresh_engine(llm, *, fill: float = math.nan, adapters=None, forms=None, **overrides):
    """An engine of its own over an llm's weights, with empty pools and books; what nobody wrote holds `fill`.

    adapters, forms: see `build_engine`. overrides: of the llm's config.
    """
    from ferrum_jax.engine.startup.build_engine import build_engine

    config, more = dataclasses.replace(llm.config, **overrides), {} if forms is None else {"forms": forms}
    return build_engine(llm.loaded, config, llm.tokenizer, adapters=adapters, fill=fill, **more)


def requests_of(prompts, params) -> list[tuple]:
    """Arguments of `Engine.add`, each prompt with a key of its own. params: of each, or of all."""
    params = params if isinstance(params, list) else [params] * len(prompts)
    named = [RequestOptions(key=str(i)) for i in range(len(prompts))]
    return list(zip(prompts, params, named, strict=True))


def answers(engine, requests, *, max_steps: int = 100_000) -> list:
    """Outputs of requests (the arguments of `Engine.add`) that run together, in their order."""
    ids = [engine.add(*request) for request in requests]
    outputs = finish(engine, max_steps=max_steps)
    return [outputs[id] for id in ids]


def run(llm, prompts, params, *, max_steps: int = 100_000, **overrides):
    """Outputs of a fresh engine, in the order of the prompts; the books are proven after every step.

    overrides: see `fresh_engine`.
    """
    return answers(fresh_engine(llm, **overrides), requests_of(prompts, params), max_steps=max_steps)


def told(outputs) -> list:
    """All that outputs say of their tokens: what they are, with which log-probabilities, and why they ended."""
    return [
        ([(c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs], output.prompt_logprobs)
        for output in outputs
    ]


def logprobs_of(output) -> list[dict[int, float]]:
    """Token id to log-probability, exactly, for each generated token."""
    return [{token: entry.logprob for token, entry in row.items()} for row in output.outputs[0].logprobs]


_COLLECTED = weakref.WeakKeyDictionary()  # by engine: what has come of its submissions, by their ids


def step(engine, call=None) -> list:
    """The outputs of one step, or of another call that gives deltas: of what has ended, and of what grows."""
    found = _COLLECTED.setdefault(engine, {})
    texts = TokenTexts(engine._input_processor.tokenizer, engine._constraints.forms)
    collector = Collector(texts, engine._input_processor._max_model_len)
    for id, submission in engine._submissions.items():
        if id not in found:
            found[id] = collector.collected(submission.prompt_token_ids, submission.sampling, submission.options)
    outputs = []
    for delta in (call or engine.step)():
        found[delta.id].take(delta)
        if delta.is_last or found[delta.id].streams:
            outputs.append(found[delta.id].output())
    return outputs


def peek(engine, submission: int):
    """The output of a submission so far; None where it has ended."""
    if submission not in engine._submissions:
        return None
    step(engine, lambda: engine.peek(submission))
    return _COLLECTED[engine][submission].output()


def finish(engine, *, max_steps: int = 100_000) -> dict:
    """Steps an engine to its end; outputs by submission id."""
    outputs = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            break
        outputs |= {output.request_id: output for output in step(engine) if output.finished}
        engine.scheduler.check_invariants()
    assert not engine.has_unfinished, f"not finished after {max_steps} steps"
    engine.drain()
    assert engine.scheduler.metrics().live == 0, "blocks are held by nobody"
    return outputs
