"""A batch job whose rows are answered by actors of a Ray cluster; everything else runs in the driver.

The driver reads the input, keeps the journal and writes the output, as it does without Ray, so the output has the same
bytes and a job that was begun with Ray may be ended without it. Rows go to the actors as a Ray Dataset, by
`map_batches` over an actor pool, a window of many rows at a time; each actor loads the model once per window. Ray
replaces an actor that dies and gives its rows to another; a row that is therefore answered twice is journaled once.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import pickle
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ferrum_jax.batch.batch_llm import BatchLLM, RowCrash, RowRequest, run_rows
from ferrum_jax.batch.job import JobStart, run_batch
from ferrum_jax.inputs.identity import ModelIdentity
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.io.paths import install_command
from ferrum_jax.openai.asked import GENERATES
from ferrum_jax.tasks.task import NOT_BEGUN

if TYPE_CHECKING:
    from ferrum_jax.tasks.transcription.heard_sound import HeardSound

_MAX_WAIT_S = 0.2  # for an answer, before the job is asked whether it wants partial ones
_SUMMED = ("live", "num_blocks", "computed_tokens", "padded_tokens")


def run_batch_on_ray(
    make_llm: Callable[..., BatchLLM],
    input_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    num_actors: int,
    rows_at_once: int = 256,
    window_rows: int = 65536,
    actor_options: Mapping[str, Any] | None = None,
    hub_model: str | None = None,
    revision: str | None = None,
    **job: Any,
) -> int:
    """`run_batch` with the rows answered by `num_actors` actors; returns its exit code.

    make_llm: loads the model, in each actor; it is pickled. rows_at_once: how many an actor is given, and how many are
    repeated if it dies. window_rows: rows of one Dataset, which the driver holds in memory. actor_options: what each
    actor needs, such as {"num_gpus": 1} or {"resources": {"TPU": 4}}. hub_model: id of the hub's model that make_llm
    loads; it is then called with `revision=`, the commit that `revision` had when the job began. job: see `run_batch`.
    Raises ValueError, with what to install, if Ray is missing.
    """
    try:
        import ray.data  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        raise ValueError(f"a job on Ray needs Ray Data ({error}); {install_command('ray')}") from error
    llm = RayLLM(
        make_llm,
        num_actors=num_actors,
        rows_at_once=rows_at_once,
        window_rows=window_rows,
        actor_options=actor_options or {},
        hub_model=hub_model,
        revision=revision,
    )
    return run_batch(llm.started, input_path, output_path, **job)


_Window = Sequence[tuple[RowRequest, datetime.datetime]]  # requests, and the time of day that they see


class RayLLM:
    """An engine whose requests are answered by the actors of a Ray Dataset."""

    def __init__(
        self,
        make_llm: Callable[..., BatchLLM],
        *,
        num_actors: int,
        rows_at_once: int,
        window_rows: int,
        actor_options: Mapping[str, Any],
        hub_model: str | None = None,
        revision: str | None = None,
    ) -> None:
        self._make_llm, self._num_actors, self._actor_options = make_llm, num_actors, dict(actor_options)
        self._rows_at_once, self._window_rows = rows_at_once, window_rows
        self._hub_model, self._revision = hub_model, revision
        self._stats: dict[str, Mapping[str, Any]] = {}  # by actor, from its last answer
        self._begin: Callable[[ModelIdentity], None] = lambda identity: None

    def started(self, start: JobStart) -> RayLLM:
        """Itself, bound to a job. Each actor sends its model's identity; answers of another model are refused."""
        self._begin = start.identity.begin
        if self._hub_model is not None:
            commit = start.commit_of(self._hub_model, self._revision)
            self._make_llm = functools.partial(self._make_llm, revision=commit)
        return self

    @property
    def identity(self) -> None:
        """None: the model's identity is not known before the first answers."""

    def row_tasks(self, now: datetime.datetime) -> Callable[[RowRequest], tuple[RowRequest, datetime.datetime]]:
        return lambda request: (request, now)

    def run(
        self,
        tasks: Iterable[tuple[int, Callable[[], Any]]],
        *,
        wants_partials: Callable[[], bool],
        most_running: Callable[[], float],
    ) -> Generator[tuple[int, Any], None, None]:
        source = (make() for _, make in tasks)
        while window := list(itertools.islice(source, int(min(self._window_rows, most_running())))):
            yield from self._answers(window, wants_partials)

    def learn(self, texts: Iterable[str], *, cache_salt: str) -> None:
        """Nothing: each engine drafts from what it answers itself."""

    def hear(self, sound: str, params: TranscriptionParams) -> HeardSound:
        """Raises ValueError: sounds do not travel to actors."""
        raise ValueError("sounds are not written down over Ray; run the job without it, on one machine or several")

    def progress(self) -> dict[str, tuple[float, float, float]]:
        """Nothing: answers come whole."""
        return {}

    def stats(self) -> dict[str, Any]:
        """Statistics of all actors together."""
        found = {name: sum(stats[name] for stats in self._stats.values()) for name in _SUMMED}
        return {**found, "actors": len(self._stats)}

    def _answers(self, window: _Window, wants_partials: Callable[[], bool]) -> Generator[tuple[int, Any], None, None]:
        """Each request's answer as it comes. A request in progress has no tokens here: these are with the actor."""
        waiting, answers, ended = {request.key for request, _ in window}, queue.SimpleQueue(), threading.Event()
        threading.Thread(target=self._run, args=(window, answers, ended), name="ray", daemon=True).start()
        try:
            while waiting:
                if wants_partials():
                    yield from [(key, NOT_BEGUN) for key in sorted(waiting)]
                try:
                    key, answer = answers.get(timeout=_MAX_WAIT_S)
                except queue.Empty:
                    continue
                if isinstance(answer, ModelIdentity):
                    self._begin(answer)
                    continue
                if key is None:
                    raise answer
                if key in waiting:
                    waiting.remove(key)
                    yield key, answer
        finally:
            ended.set()

    def _run(self, window: _Window, answers: queue.SimpleQueue, ended: threading.Event) -> None:
        """Puts (key, answer) of each request into the queue; (None, identity of the model that answers) before these,
        and (None, error) if Ray fails."""
        import ray.data  # type: ignore[import-not-found]

        try:
            num_blocks = ceil_div(len(window), self._rows_at_once)
            tasks = [{"task": pickle.dumps(task)} for task in window]
            dataset = ray.data.from_items(tasks, override_num_blocks=num_blocks)
            answered = dataset.map_batches(
                _Actor,
                fn_constructor_args=(self._make_llm,),
                batch_size=self._rows_at_once,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=min(self._num_actors, num_blocks)),
                **self._actor_options,
            )
            for row in answered.iter_rows():
                if ended.is_set():
                    return  # which ends the Dataset
                found, actor, identity, stats = pickle.loads(row["answers"])
                self._stats[actor] = stats
                if identity is not None:
                    answers.put((None, identity))
                for item in found:
                    answers.put(item)
        except Exception as error:  # the loop raises it
            answers.put((None, error))


class _Actor:
    """One model of the pool. Called with rows, each a pickled task, it gives their answers as one row."""

    def __init__(self, make_llm: Callable[[], BatchLLM]) -> None:
        self._llm, self._name = make_llm(), f"{os.uname().nodename} {os.getpid()}"

    def __call__(self, rows: Any) -> Any:
        import pyarrow

        found = self._answers([pickle.loads(task) for task in rows["task"].to_pylist()])
        return pyarrow.table({"answers": [pickle.dumps((found, self._name, self._llm.identity, self._llm.stats()))]})

    def _answers(self, tasks: _Window) -> list[tuple[int, Any]]:
        """The answers. If the engine crashes, each request without an answer is run once more, alone."""
        found: dict[int, Any] = {}
        try:
            self._session(tasks, found)
        except Exception:
            for task in tasks:
                if (key := task[0].key) not in found:
                    try:
                        self._session([task], found)
                    except Exception as error:
                        found[key] = RowCrash(repr(error))
        return list(found.items())

    def _session(self, window: _Window, found: dict[int, Any]) -> None:
        """Adds the answers to requests, as they come."""
        own = self._llm.identity.generation if self._llm.identity else {}
        requests = (
            request._replace(params=request.params.over(own)) if request.kind == GENERATES else request
            for request, _ in window
        )
        found.update(run_rows(self._llm, requests, now=window[0][1]))
