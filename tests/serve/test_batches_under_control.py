"""A training loop pauses a server, changes its weights and has it sleep while a batch is answered."""

import time

import openai
import pytest

from ferrum_jax import LLM
from ferrum_jax.serve.http.settings import ServerSettings
from tests.serve.batch_input import begin, ended, lines_of, rows
from tests.serve.running import running
from tests.serve.test_adapters import read_key
from tests.serve.test_control import ADMIN, root  # noqa: F401
from tests.serve.test_under_load import until
from tests.support import INVARIANT

NUM_ROWS = 16
BODY = {"model": "small", "prompt": "a b", "max_tokens": 30, "ignore_eos": True, "n": 2}
INPUT = b"".join(
    rows(1, first=i, url="/v1/completions", body=BODY | {"prompt": f"{i} and so on"}) for i in range(NUM_ROWS)
)


@pytest.fixture(scope="module")
def llm(root):  # noqa: F811
    return LLM(str(root / "same"), INVARIANT, tokenizer=str(root / "same"))


@pytest.fixture
def desk(llm, root, tmp_path):  # noqa: F811
    """A server of the first weights, what asks it with an admin key, and a client of it."""
    settings = ServerSettings(
        names=("small",), admin_keys=(read_key("admin-key"),), weights_root=str(root), batches=str(tmp_path / "b")
    )
    with running(settings, inner=llm) as server:

        def ask(path: str, body: object = {}) -> object:
            status, _, answer = server.ask(path, body, **ADMIN)
            assert status == 200, answer
            return answer

        ask("/update_weights", {"path": "same"})
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield server, ask, client


def bodies(client, done) -> list[dict]:
    return [line["response"]["body"] for line in lines_of(client, done.output_file_id)]


def texts(client, done) -> list[list[str]]:
    return [[choice["text"] for choice in body["choices"]] for body in bodies(client, done)]


WANTED: list[list[str]] = []  # of the first weights


def wanted_of(client) -> list[list[str]]:
    WANTED[:] = WANTED or texts(client, ended(client, asked(client)))
    return WANTED


def asked(client) -> object:
    return begin(client, INPUT, endpoint="/v1/completions")


def under_way(server, num_steps: int = 1) -> None:
    """Returns after so many steps more; four choices run at once, and have their tokens after 30."""
    wanted = server.llm.thread.num_steps + num_steps
    until(lambda: server.llm.thread.num_steps >= wanted, 60)


def test_rows_that_a_pause_aborts_run_again_to_the_same_texts(desk):
    server, ask, client = desk
    wanted = wanted_of(client)
    batch = asked(client)
    for num_steps in (4, 70):
        under_way(server, num_steps)
        ask("/pause?mode=abort")
        time.sleep(0.3)
        ask("/resume")
    done = ended(client, batch)
    assert done.request_counts.completed == NUM_ROWS and texts(client, done) == wanted
    assert {choice["finish_reason"] for body in bodies(client, done) for choice in body["choices"]} == {"length"}


@pytest.mark.parametrize("requests", ["keep", "abort"])
def test_a_batch_ends_with_the_rows_of_its_weights_when_they_change(desk, requests):
    server, ask, client = desk
    wanted = wanted_of(client)
    batch = asked(client)
    under_way(server, 100)
    ask("/update_weights", {"path": "other", "requests": requests})
    later = asked(client)
    done = ended(client, batch)
    kept = texts(client, done)
    assert done.status == "failed" and 0 < len(kept) < NUM_ROWS and all(each in wanted for each in kept)
    (error,) = done.errors.data
    assert error.code == "job_refused" and "this batch began: weights" in error.message
    begun_later = ended(client, later)
    assert begun_later.status == "completed" and begun_later.request_counts.completed == NUM_ROWS
    old, new = ({body["system_fingerprint"] for body in bodies(client, each)} for each in (done, begun_later))
    assert len(old) == len(new) == 1 and old != new


def test_rows_wait_while_the_engine_sleeps(desk):
    server, ask, client = desk
    wanted = wanted_of(client)
    ask("/sleep?level=1")
    batch = asked(client)
    until(lambda: server.llm.thread.num_open >= 4)
    assert server.ask("/v1/completions", BODY)[0] == 400, "a live request is refused"
    ask("/wake_up?tags=weights")
    ask("/wake_up?tags=kv_cache")
    done = ended(client, batch)
    assert done.request_counts.completed == NUM_ROWS and texts(client, done) == wanted
