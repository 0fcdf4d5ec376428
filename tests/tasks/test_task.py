"""RunningTasks: outputs of several requests become one answer, whoever runs the requests and in whatever order."""

import itertools
from collections.abc import Sequence

import pytest

from ferrum_jax.core.outputs import RequestOutput
from ferrum_jax.core.request_options import NO_OPTIONS
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.task import ONE_TOKEN, EngineRequest, RunningRequest, RunningTasks, Task
from tests.support import raising, small_llm


def request(token: int) -> EngineRequest:
    return EngineRequest([token], ONE_TOKEN, NO_OPTIONS)


def read(outputs: Sequence[RequestOutput]) -> list[int | None]:
    """The token that each request was asked with; None of one that has not begun."""
    return [output.prompt_token_ids[0] if output.prompt_token_ids else None for output in outputs]


def task(*tokens: int) -> Task[list[int | None]]:
    return Task([request(token) for token in tokens], read, read)


def begin(runs: RunningTasks) -> RunningRequest:
    found = runs.next()
    assert found is not None
    ids = tuple(found.request.token_ids)
    found.output = lambda: RequestOutput(
        request_id=0, prompt=None, prompt_token_ids=ids, outputs=(), num_cached_tokens=0
    )
    return found


def test_an_answer_has_its_outputs_in_the_order_of_its_requests_whichever_ends_first():
    runs = RunningTasks([("a", lambda: task(1, 2)), ("b", lambda: task(3))])
    one, two, three = (begin(runs) for _ in range(3))
    for each, ready in ((two, []), (three, [("b", [3])]), (one, [("a", [1, 2])])):
        runs.end(each)
        assert list(runs.answers()) == ready
    assert runs.next() is None and not runs.has_more


def test_a_refused_request_refuses_its_task_and_those_beside_it_are_aborted():
    aborted: list[RunningRequest] = []
    runs = RunningTasks([("a", lambda: task(1, 2, 3)), ("b", lambda: task(4))], aborted.append)
    first, second = begin(runs), begin(runs)
    runs.refuse(second, error := ValueError("too long"))
    assert list(runs.answers()) == [("a", error)]
    assert [each for each in aborted if each.request.token_ids != [3]] == [first]
    assert begin(runs).request.token_ids == [4]  # the third of the refused task is left out


def test_a_request_that_tasks_share_runs_once_and_answers_them_all():
    query = request(7)
    runs = RunningTasks((n, lambda n=n: Task([query, request(n)], read)) for n in (1, 2, 3))
    shared, one, two = (begin(runs) for _ in range(3))
    runs.end(one)
    runs.end(shared)
    runs.end(two)
    assert list(runs.answers()) == [(1, [7, 1]), (2, [7, 2])]
    three = begin(runs)  # after the shared one has ended
    runs.end(three)
    assert list(runs.answers()) == [(3, [7, 3])] and runs.next() is None


def test_a_refused_request_refuses_every_task_that_shares_it():
    query = request(7)
    runs = RunningTasks((n, lambda n=n: Task([query, request(n)], read)) for n in (1, 2))
    runs.refuse(begin(runs), error := ValueError("empty"))
    assert list(runs.answers()) == [(1, error)]
    assert runs.next() is None and list(runs.answers()) == [(2, error)]


def test_a_shared_request_that_was_aborted_runs_again():
    query, aborted = request(7), []
    runs = RunningTasks([(n, lambda n=n: Task([query, request(n)], read)) for n in (1, 2)], aborted.append)
    shared, one = begin(runs), begin(runs)
    runs.refuse(one, ValueError("too long"))
    assert aborted == [shared]
    assert begin(runs).request is query and begin(runs).request.token_ids == [2]


def test_tasks_are_read_one_by_one_and_those_without_requests_are_answered_at_once():

    made = itertools.cycle([raising(ValueError("no text")), lambda: Task([], read)])
    runs = RunningTasks(enumerate(made))
    assert runs.next() is None
    ((key, error),) = runs.answers()
    assert key == 0 and str(error) == "no text"
    assert runs.next() is None and list(runs.answers()) == [(1, [])] and runs.has_more


def test_partial_answers_have_what_has_begun_and_a_refused_one_ends_its_task():
    aborted: list[RunningRequest] = []
    runs = RunningTasks([("a", lambda: task(1, 2)), ("b", lambda: Task([request(3)], read))], aborted.append)
    one = begin(runs)
    assert list(runs.partials()) == [("a", [1, None])] and one.has_partials
    assert not [begin(runs), begin(runs)][1].has_partials
    assert list(runs.partials()) == [("a", [1, 2])]


@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_that_cannot_be_made_is_the_tasks_error(ends):
    fails = raising(ValueError("not finite"))
    aborted: list[RunningRequest] = []
    runs = RunningTasks([("a", lambda: Task([request(1)], fails, fails))], aborted.append)
    one = begin(runs)
    assert runs.end(one) is None if ends else list(runs.partials()) == []
    ((key, error),) = runs.answers()
    assert key == "a" and str(error) == "not finite" and aborted == ([] if ends else [one])


def test_an_engine_runs_the_requests_of_a_task_and_drops_those_of_a_refused_one():
    llm, greedy = small_llm("qwen3"), SamplingParams(max_tokens=3, temperature=0.0)
    one, two = (EngineRequest(ids, greedy, NO_OPTIONS) for ids in ([5, 6, 7], [8, 9]))
    too_long = EngineRequest([5] * 10_000, greedy, NO_OPTIONS)

    def texts(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
        return [output.token_ids for output in outputs]

    tasks = {"both": Task([two, one], texts), "refused": Task([one, too_long], texts)}
    found = dict(llm.run((key, lambda task=task: task) for key, task in tasks.items()))
    assert found["both"] == [llm.generate(ids, greedy)[0].token_ids for ids in ([8, 9], [5, 6, 7])]
    assert "10000" in str(found["refused"]).replace(",", "") and not llm.calls.busy
