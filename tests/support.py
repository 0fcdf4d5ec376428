"""Small engines over golden folders, and how tests run them."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import os
import pathlib
import weakref

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


def is_running(process: int) -> bool:
    """Whether it is there and no zombie that nobody has waited for."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@functools.cache
def small_llm(family: str, config: EngineConfig = SMALL):
    """An LLM over a golden folder, made once in a process; tests build fresh engines from its `loaded`.

    Where several processes want the same one, the first compiles with all cores, and the others find its executables.
    """
    from ferrum_jax.llm import LLM

    COMPILED.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(COMPILED / f"{digest(family, repr(config))}.lock", "w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        return LLM(str(GOLDENS / family), config)


def run(llm, prompts, params, *, fill: float = 0.0, max_steps: int = 100_000, **overrides):
    """Outputs of a fresh engine (empty pools, filled with `fill`), in the order of the prompts.

    overrides: of the llm's config; the books are proven after every step.
    """
    from ferrum_jax.engine.startup.build_engine import build_engine

    config = dataclasses.replace(llm.config, **overrides)
    engine = build_engine(llm.loaded, config, llm.tokenizer, fill=fill)
    params = params if isinstance(params, list) else [params] * len(prompts)
    named = [RequestOptions(key=str(i)) for i in range(len(prompts))]
    ids = [engine.add(*request) for request in zip(prompts, params, named, strict=True)]
    outputs = finish(engine, max_steps=max_steps)
    return [outputs[i] for i in ids]


_COLLECTED = weakref.WeakKeyDictionary()  # by engine: what has come of its submissions, by their ids


def step(engine, call=None) -> list:
    """The outputs of one step, or of another call that gives deltas: of what has ended, and of what grows."""
    found = _COLLECTED.setdefault(engine, {})
    texts = TokenTexts(engine._intake.tokenizer, engine._constraints.forms)
    collector = Collector(texts, engine._intake._max_model_len)
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
