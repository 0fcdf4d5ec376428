"""The engine on this device: greedy tokens by "xla" and by the kernels, on one device and on the widest mesh.

A model that sees or hears is also given images or sounds: together, alone, and from the cache. One that only
transcribes is given nothing else. Runs in a child process. Tokens are to be equal; where they first differ, the
log-probabilities of both say how near.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from checkpoints.hub import Show
from ferrum_jax.cli.device_check.media_requests import media_requests, with_room
from ferrum_jax.cli.device_check.problem import kernel_of
from ferrum_jax.cli.device_check.rates import target_of
from ferrum_jax.config import EngineConfig
from ferrum_jax.core.outputs import RequestOutput
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.startup.open import Opening
from ferrum_jax.io.child import Send, first_line
from ferrum_jax.llm import LLM
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.task import EngineRequest, completion

_NEAR = {"float32": 1e-3, "bfloat16": 0.1}  # log-probabilities of a tie, which rounding may decide either way
_MAX_TOKENS = 32
_CONFIG = EngineConfig(
    mesh="tp=1",
    implementation="xla",
    check="off",
    ready="all",
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_model_len=512,
)
_ON_CPU = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 256}  # which compiles few steps
_AGAIN, _MEDIA, _ALONE = ", from the cache", ", media", ", media alone"
_BESIDE = {_AGAIN: "", _ALONE: _MEDIA, _MEDIA + _AGAIN: _MEDIA}  # of the same run

Outputs = list[RequestOutput]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOrder:
    """model: a folder. prompts: token ids of each. budget_s: engines that are not begun by then are left out."""

    model: str
    prompts: tuple[tuple[int, ...], ...]
    full: bool
    compilation_cache_dir: str | None
    budget_s: float = float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRun:
    """One engine. beside: the run that it is compared with, None for the first of its kind."""

    name: str
    config: EngineConfig
    beside: str | None


def check_engine(order: EngineOrder, send: Send) -> None:
    """Sends for each run {"begins": name}, {"so_far": ..} for each part of its start and each prompt, and then its
    line, {"run", "beside", "equal", "of", "tokens_per_s", "difference", "problem"}."""
    until = time.monotonic() + order.budget_s
    devices = jax.devices()
    kernel = kernel_of("paged_attention", target_of(devices[0]), devices[0].platform)
    kernel = None if devices[0].platform == "cpu" else kernel
    small = _ON_CPU if devices[0].platform == "cpu" else {}
    base = dataclasses.replace(_CONFIG, compilation_cache_dir=order.compilation_cache_dir, **small)
    with contextlib.suppress(ValueError, OSError):  # of a model that cannot be opened, which each run says
        base = with_room(base, Opening.of_checkpoint(order.model, base, on_progress=_telling(send)).source.spec)
    found: dict[str, Outputs] = {}
    for run in runs(base, kernel, len(devices), full=order.full):
        if time.monotonic() > until:
            send({"left_out": run.name})
            continue
        send({"begins": run.name})
        try:
            parts, near = _generate(order, run.config, send)
        except Exception as error:  # of the start or of a step: the next run may do
            problem = f"{type(error).__name__}: {first_line(str(error))}"
            line = {"run": run.name, "beside": run.beside, "of": len(order.prompts), "difference": None}
            send(line | {"equal": 0, "problem": problem, "words": traceback.format_exc()})
            continue
        for name, part in parts.items():
            found[run.name + name] = part.outputs
            if name in _BESIDE and run.beside is not None:
                continue
            send(_line(run, name, part, found, near))


def _line(run: EngineRun, name: str, part: Part, found: Mapping[str, Outputs], near: float) -> dict[str, Any]:
    """The result line of a part of a run, whose name is the run's with `name` behind it."""
    beside = run.name + _BESIDE[name] if name in _BESIDE else None if run.beside is None else run.beside + name
    line = {"run": run.name + name, "beside": beside, "of": len(part.outputs)}
    if name not in _BESIDE:
        tokens = sum(len(output.token_ids) for output in part.outputs)
        line |= {"tokens_per_s": tokens / part.seconds}
    if beside is not None and beside in found:
        return line | compare(part.outputs, found[beside], near)
    return line | {"equal": len(part.outputs), "difference": None, "problem": None}


def runs(base: EngineConfig, kernel: str | None, num_devices: int, *, full: bool) -> Iterator[EngineRun]:
    """The engines that are compared. kernel: of this platform, or None where no kernel runs."""
    widest = max((n for n in (1, 2, 4, 8) if n <= num_devices), default=1)
    meshes = [f"tp={n}" for n in (2, 4, 8) if n <= num_devices] if full else [f"tp={widest}"] * (widest > 1)
    yield EngineRun(name="xla", config=base, beside=None)
    names = {"xla": "xla"} if kernel is None else {"xla": "xla", kernel: kernel}
    if kernel is not None:
        yield EngineRun(name=kernel, config=dataclasses.replace(base, implementation=kernel), beside="xla")
    for mesh in meshes:
        for name in names:
            config = dataclasses.replace(base, implementation=name, mesh=mesh)
            yield EngineRun(name=f"{name}, {mesh}", config=config, beside="xla")
    if full:
        config = dataclasses.replace(base, enable_prefix_caching=False, implementation=kernel or "xla")
        yield EngineRun(name=f"{kernel or 'xla'}, no cache", config=config, beside=kernel or "xla")
    for kv_dtype in ("int8", "fp8_e4m3") if full else ():
        plain = f"xla, {kv_dtype}"
        yield EngineRun(name=plain, config=dataclasses.replace(base, kv_dtype=kv_dtype), beside=None)
        if kernel is not None:
            config = dataclasses.replace(base, kv_dtype=kv_dtype, implementation=kernel)
            yield EngineRun(name=f"{kernel}, {kv_dtype}", config=config, beside=plain)


class Part(NamedTuple):
    """Outputs of what a run was asked together, and the seconds that they took."""

    outputs: Outputs
    seconds: float


def _telling(send: Send) -> Show:
    """Sends how far something is."""
    return lambda what, done, total: send({"so_far": f"{what} {done} of {total}"})


def _generate(order: EngineOrder, config: EngineConfig, send: Send) -> tuple[dict[str, Part], float]:
    """Outputs by what was asked, and how near log-probabilities of a tie are in this dtype. A second time prompts are
    found cached; media alone are encoded again, and hit nothing."""
    llm = LLM(order.model, config, on_progress=_telling(send))
    params = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, logprobs=2, ignore_eos=True)
    parts: dict[str, Part] = {}

    def generate(name: str, requests: Sequence[EngineRequest], *, alone: bool = False) -> None:
        found: dict[int, RequestOutput] = {}
        started = time.perf_counter()
        tasks = [(key, partial(completion, request, fails=True)) for key, request in enumerate(requests)]
        for together in [[task] for task in tasks] if alone else [tasks]:
            for key, output in llm.run(together):
                if isinstance(output, ValueError):
                    raise output
                found[key] = output
                send({"so_far": f"{len(found)} of {len(requests)} prompts{name}"})
        parts[name] = Part([found[key] for key in range(len(requests))], time.perf_counter() - started)

    if not llm.loaded.layout.spec.cross_layers:
        most = llm.max_model_len - _MAX_TOKENS
        requests = [llm.model.tasks.request(list(ids)[:most], params, RequestOptions()) for ids in order.prompts]
        generate("", requests)
        generate(_AGAIN, requests)
    if requests := media_requests(llm, params):
        generate(_MEDIA, requests)
        generate(_ALONE, media_requests(llm, params, salt=1), alone=True)
        generate(_MEDIA + _AGAIN, requests)
    return parts, _NEAR[llm.loaded.layout.dtype.name]


def compare(found: Sequence[RequestOutput], expected: Sequence[RequestOutput], near: float) -> dict[str, Any]:
    """How many outputs have equal tokens, the first difference, and a problem where it is no tie."""
    equal, first, problem = 0, None, None
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        place = next((i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b), None)
        if place is None:
            equal += 1
            continue
        here = _difference(number, place, one, other)
        first = first or here
        if problem is None and not here["gap"] <= near:
            problem = (
                f"prompt {number}, token {place}: {here['tokens'][0]} where {here['tokens'][1]} is expected, "
                f"{here['gap']:.3g} apart in log-probability"
            )
    return {"equal": equal, "difference": first, "problem": problem}


def _difference(number: int, place: int, one: RequestOutput, other: RequestOutput) -> dict[str, Any]:
    """Both tokens with the log-probabilities that each run gives them; gap: the larger of what either sees between."""
    tokens = (one.token_ids[place], other.token_ids[place])
    seen = [
        [_logprob(output, place, token) for token in tokens] for output in (one, other)
    ]  # infinitely far where it is not among the best two
    gaps = [abs(a - b) for a, b in seen]
    return {"prompt": number, "token": place, "tokens": list(tokens), "logprobs": seen, "gap": max(gaps)}


def _logprob(output: RequestOutput, place: int, token: int) -> float:
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None, "they were asked for"
    found = logprobs[place].get(token)
    return -1e9 if found is None else float(found.logprob)
