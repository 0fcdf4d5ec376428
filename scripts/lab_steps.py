"""A process of the laboratory (`scripts.gpu_lab`): an engine over random weights, its decode steps timed in turns.

The environment's LAB_ORDER has the fields of an `Order`, in JSON. Only what it needs is compiled. Prints JSON lines as
they come: {"token_s"} for a turn of a case, {"busy_s", "kernels"} of a step from a profile, {"problem"} for a case that
fails, {"left_out"} for one that the product lacks; each with the case's fields.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.cli.device_check.problem import kernel_of
from ferrum_jax.cli.device_check.rates import target_of
from ferrum_jax.core.plan import Draw
from ferrum_jax.io.child import first_line
from ferrum_jax.runtime import settled
from ferrum_jax.runtime.buckets import Ladder, LaunchBucket, make_ladder
from ferrum_jax.runtime.compile.compile import make_all
from ferrum_jax.runtime.compile.deferred import DeferredExecutable, Prepared
from ferrum_jax.runtime.programs import programs_of
from scripts.shapes import SHAPES, random_source, small

_LOOKS_EVERY = 16  # steps, after which an engine may look how far launches go on
_MANY, _PROFILED = 16, 8  # sets of results that take turns where addresses move; steps of a profile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is timed. tokens: of a row in a launch.

    loop: "engine", or "bare" for the executables of a step called over and over, whose results nobody reads. addresses:
    "two" sets of results take turns, as the engine has them; "many"; or "one", which a bare loop alone can have.
    """

    step: str  # "halves" or "launch"
    tokens: int = 1
    loop: str = "engine"
    addresses: str = "two"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """model: of scripts.shapes. config: fields of EngineConfig. cases: fields of each. prompt, tokens: of a row in a
    turn. prefill: tokens of a prompt that is timed by itself; 0 for none. small: few layers, for a CPU. about: of every
    line."""

    about: dict[str, Any]
    model: str
    config: dict[str, Any]
    cases: list[dict[str, Any]]
    rows: list[int]
    prompt: int
    tokens: int
    turns: int
    prefill: int = 0
    small: bool = False


class Lab:
    """The engine of an order. say: takes a line."""

    def __init__(self, order: Order, say: Callable[[dict[str, Any]], None]) -> None:
        self.order, self.say, began_s = order, say, time.perf_counter()
        given = small(SHAPES[order.model]) if order.small else SHAPES[order.model]
        device = jax.devices()[0]
        kernel = kernel_of("paged_attention", target_of(device), device.platform) if device.platform == "gpu" else None
        chosen = {"implementation": kernel, "check": "off", "ready": "all", "max_cached_prompts": 512}
        chosen |= {"product_implementation": kernel} if kernel and "weights" in order.config else {}
        config = EngineConfig(compilation_cache_dir=None, **chosen, **order.config)
        with mock.patch.object(settled, "make_ladder", self._ladder):
            self.llm = LLM.from_source(random_source(given), config, on_progress=tell)
        self.runner, loaded = self.llm.engine.runner, self.llm.loaded
        launches = [each for each in loaded.layout.ladder.launches if each.draw == Draw.GREEDY]
        programs, most = programs_of(loaded.layout, launches), max(Case(**fields).tokens for fields in order.cases)
        wanted = {each: programs[each] for each in launches if tokens_of(each) == 1 or most > 1}
        self._made = make_all(wanted, wanted, executable_cache=None, on_done=lambda *of: tell("launches", *of))
        self._executables, self._held = loaded.executables, collections.deque[Any]()
        self._calls = list[tuple[str, Any, np.ndarray]]()  # of the last step
        self._steps: dict[tuple[str, int], list[tuple[str, Any, np.ndarray]]] = {}  # the last of all rows, by case
        self._seen, self._now = list[tuple[float, int]](), (0, Case(step=""))  # dispatches, and what is timed
        self._spy()
        count, runs = len(loaded.executables) + len(self._made), loaded.layout.options.recorded
        say({"runs": runs, "opened_s": time.perf_counter() - began_s, "executables": count})

    def _ladder(self, **given: Any) -> Ladder:
        """What the order needs of the ladder: the largest mixed bucket, and one to decode each number of rows."""
        ladder = make_ladder(**given)
        kept = {next(b for b in ladder.buckets if b.decode_only and b.num_rows >= n) for n in self.order.rows}
        kept |= {ladder.largest[0]}
        return dataclasses.replace(ladder, buckets=tuple(bucket for bucket in ladder.buckets if bucket in kept))

    def _spy(self) -> None:
        """Keeps the calls of each step, and when it was dispatched."""
        runner, dispatch = vars(self.runner), self.runner.dispatch

        def spying(name: str, part: Any, blob: Any) -> Any:
            self._calls.append((name, part, blob.copy()))
            return vars(type(self.runner))[name](self.runner, part, blob)

        runner |= {name: functools.partial(spying, name) for name in ("_forward", "_sample", "_launch")}

        def timed(plan: Any, *more: Any) -> Any:
            self._calls = []
            step = dispatch(plan, *more)
            self._seen.append((time.perf_counter(), plan.num_tokens))
            rows, case = self._now
            if plan.num_tokens == rows * case.tokens:
                self._steps[case.step, case.tokens] = self._calls
            return step

        runner["dispatch"] = timed

    def _launches(self, case: Case) -> dict[LaunchBucket, DeferredExecutable]:
        """The launches of a case's steps; none where the product has none."""
        longer = {each for each in self._made if tokens_of(each) >= case.tokens > 1}
        if case.step == "halves" or (case.tokens > 1 and not longer):
            return {}
        return {each: made for each, made in self._made.items() if tokens_of(each) == 1 or each in longer}

    @contextlib.contextmanager
    def _as(self, case: Case) -> Iterator[None]:
        """Steps meanwhile are those of the case, also how far launches go on, where the product measures that."""
        launches, engine, spares = self._launches(case), self.llm.engine, self.runner._spares
        longer = [each for each in sorted(launches) if tokens_of(each) > 1]
        horizons = tuple((each.forward.num_rows, int(each.draw), case.tokens) for each in longer)
        looks = types.SimpleNamespace(look=lambda ladder, alone: horizons)
        take_back = spares._take_back

        def later(lent: Any) -> None:
            self._held.append(lent)
            if len(self._held) > _MANY:
                take_back(self._held.popleft())

        with contextlib.ExitStack() as stack:
            executables = dataclasses.replace(self._executables, launches=Prepared(launches))
            stack.enter_context(mock.patch.object(self.runner, "_executables", executables))
            stack.enter_context(mock.patch.object(self.runner, "horizons", looks, create=True))
            if case.addresses == "many":
                stack.enter_context(mock.patch.object(spares, "_take_back", later))
            engine._num_calls += -engine._num_calls % _LOOKS_EVERY
            yield

    def _engine(self, rows: int, case: Case) -> float:
        rng = np.random.default_rng(rows)  # the prompts of every turn, so that none is computed again
        prompts = rng.integers(6, self.llm.spec.vocab_size, (rows, self.order.prompt)).tolist()
        self._seen, self._now = [], (rows, case)
        self._generate(prompts, self.order.tokens)
        pairs = zip(self._seen, self._seen[1:], strict=False)
        found = [then - now for (now, one), (then, other) in pairs if one == other == rows * case.tokens]
        names = [name for name, *_ in self._steps[case.step, case.tokens]]
        assert names == (["_launch"] if case.step == "launch" else ["_forward", "_sample"]), f"steps ran as {names}"
        return statistics.median(found[2:] or found) / case.tokens  # the first wait for nobody

    def _generate(self, prompts: list[list[int]], count: int) -> None:
        self.llm.generate(prompts, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True), progress=False)

    def _bare(self, count: int, case: Case) -> float:
        """Calls the last step of all rows again, `count` times to warm up and as often to be timed."""
        runner, is_one, lent, began_s = self.runner, case.addresses == "one", list[Callable[[], None]](), 0.0
        step = self._steps[case.step, case.tokens]
        calls = [(vars(type(runner))[name], part, jax.device_put(x) if is_one else x) for name, part, x in step]
        for number in range(2 * count):
            if number == count:
                jax.block_until_ready(runner._hidden)
                began_s = time.perf_counter()
            for call, part, blob in calls:
                call(runner, part, blob)
            lent.append(runner._spares.returning())
            if is_one or len(lent) > 1:
                lent.pop(0)()
        jax.block_until_ready(runner._hidden)
        seconds = time.perf_counter() - began_s
        for back in lent:
            back()
        return seconds / count / case.tokens

    def decode(self, rows: int) -> None:
        """Says a profile of each kind of step, and the samples of all cases in turns."""
        cases = [Case(**fields) for fields in self.order.cases]
        left = [case for case in cases if case.step == "halves" or self._launches(case)]
        for case in (case for case in cases if case not in left):
            self.say({"left_out": f"no launch of this product has {case.tokens} tokens"})
        self._steps.clear()
        for turn in range(-1, self.order.turns):  # the first loads and warms up
            for case in [*left]:
                about, seconds = {"rows": rows, **dataclasses.asdict(case)}, None
                try:
                    with self._as(case):
                        is_bare, count = case.loop == "bare", self.order.tokens
                        seconds = self._bare(count, case) if is_bare else self._engine(rows, case)
                        if turn >= 0:
                            self.say(about | {"token_s": seconds})
                        elif case.loop == "engine" and case.addresses == "two":
                            with profiled() as found:
                                self._bare(_PROFILED, case)
                            self.say(about | {name: n / (2 * _PROFILED * case.tokens) for name, n in found.items()})
                except Exception as error:  # of this case, or of its profile alone
                    if seconds is None:
                        left.remove(case)
                    self.say(about | {"problem": f"{type(error).__name__}: {first_line(str(error))}"})
            tell(f"{rows} rows, turn", turn + 1, self.order.turns)

    def prefill(self) -> None:
        """Says how long a prompt of so many tokens takes that nobody has asked before."""
        rng, about = np.random.default_rng(0), {"prefill": self.order.prefill}
        for turn in range(-1, self.order.turns + 1):  # the first warms up, the last is profiled
            prompt = rng.integers(6, self.llm.spec.vocab_size, self.order.prefill).tolist()
            with profiled() if turn == self.order.turns else contextlib.nullcontext({}) as found:
                began_s = time.perf_counter()
                self._generate([prompt], 1)
                seconds = time.perf_counter() - began_s
            if turn >= 0:
                self.say(about | (found if turn == self.order.turns else {"token_s": seconds}))


def tokens_of(launch: LaunchBucket) -> int:
    """Tokens that a row may draw in a launch."""
    return getattr(launch, "horizon", 1)


@contextlib.contextmanager
def profiled() -> Iterator[dict[str, float]]:
    """Filled when the block ends: busy_s, in which a kernel or a copy ran on the device, and how many did."""
    found: dict[str, float] = {}
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2 if jax.default_backend() == "cpu" else 1
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield found
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            found |= busy(jax.profiler.ProfileData.from_file(str(file)).planes)


def busy(planes: Iterable[Any]) -> dict[str, float]:
    """busy_s and kernels of a profile: of a GPU's streams, or of the threads in which a CPU runs executables."""
    where = (("/device:GPU:0", "stream"), ("/host:CPU", "tf_xla"))
    lines = [(plane.name, line) for plane in planes for line in plane.lines]
    ran = [
        line for name, line in lines if any(name.startswith(p) and line.name.lower().startswith(q) for p, q in where)
    ]
    events = [event for line in ran for event in line.events if event.duration_ns]
    spans = [(event.start_ns, event.start_ns + event.duration_ns) for event in events]
    total = end = 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return {"busy_s": total / 1e9, "kernels": len(spans)} if spans else {}


def tell(what: str, done: int, total: int) -> None:
    print(f"  {what} {done} of {total}", file=sys.stderr, flush=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    order = Order(**json.loads(os.environ["LAB_ORDER"]))

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(order.about | line), flush=True)

    try:
        lab = Lab(order, say)
        for rows in order.rows:
            lab.decode(rows)
        if order.prefill:
            lab.prefill()
    except Exception as error:  # what does not open is a line of the page
        say({"problem": f"{type(error).__name__}: {first_line(str(error))}"})


if __name__ == "__main__":
    main()
