"""The engine as a batch sees it over a link: what goes over it, and what becomes of rows when it is gone."""

import dataclasses
import datetime
import socket
import threading

import pytest

from ferrum_jax.batch.batch_llm import RowAborted, RowRequest, run_rows
from ferrum_jax.core.request import FLEX
from ferrum_jax.openai.asked import EMBEDS, GENERATES
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.serve.batches.link_llm import EngineGone, LinkLLM
from ferrum_jax.serve.link.engine_client import EngineLost
from ferrum_jax.serve.link.wire import Unframer, send
from ferrum_jax.text.prompts import PromptEncoder
from tests.batch.fake_llm import IDENTITY
from tests.serve.test_under_load import until

FACTS = {
    "identity": dataclasses.asdict(IDENTITY),
    "num_rows": 2,
    "generates": True,
    "max_model_len": 100,
    "forms": [None, None],
    "adapters": [],
}
NOW = datetime.datetime(2026, 1, 1)


class Side:
    """The other end of a link, which answers as a test says."""

    def __init__(self) -> None:
        self.end, self.other = socket.socketpair()
        self.ended = threading.Event()
        self._unframer = Unframer()
        self.llm = LinkLLM(self.other, on_end=self.ended.set)

    def open(self) -> LinkLLM:
        send(self.end, [["ready", FACTS]])
        assert self.llm.wait()["num_rows"] == 2
        self.llm.open(PromptEncoder(tokenizer=None, chat=None))
        return self.llm

    def got(self) -> list:
        return list(self._unframer.feed(self.end.recv(1 << 16)))


@pytest.fixture
def side():
    found = Side()
    yield found
    found.end.close()
    assert found.ended.wait(30), "the thread that reads has ended"
    found.other.close()


def answers(llm: LinkLLM, count: int, **more):
    requests = (RowRequest(key, GENERATES, [5, 6, 7], SamplingParams(max_tokens=2)) for key in range(count))
    return run_rows(llm, requests, now=NOW, **more)


def test_rows_go_out_as_flexible_requests_without_a_stream(side):
    llm = side.open()
    llm.salt = "batches of a"
    found = answers(llm, 1)
    thread = threading.Thread(target=lambda: next(found, None))
    thread.start()
    ((kind, request_id, token_ids, params, options),) = side.got()
    assert (kind, token_ids, params["max_tokens"]) == ("add", [5, 6, 7], 2)
    assert options["priority"] == FLEX and options["streams"] is False and options["cache_salt"] == "batches of a\n"
    send(side.end, [["refused", request_id, "invalid", "too long"]])
    thread.join(30)
    assert not thread.is_alive()


def test_a_row_that_is_refused_has_its_error_and_others_go_on(side):
    found = answers(side.open(), 2)
    sent: list = []

    def serve() -> None:
        while len(sent) < 2:
            sent.extend(side.got())
        send(side.end, [["refused", sent[0][1], "invalid", "too long"], ["refused", sent[1][1], "invalid", "too hot"]])

    threading.Thread(target=serve).start()
    assert [(key, str(error)) for key, error in found] == [(0, "too long"), (1, "too hot")]


def test_a_failed_step_is_the_engines_fault(side):
    found = answers(side.open(), 1)

    def serve() -> None:
        ((_, request_id, *_),) = side.got()
        send(side.end, [["refused", request_id, "failed", "a step failed"]])

    threading.Thread(target=serve).start()
    with pytest.raises(EngineLost, match="a step failed"):
        next(found)


def test_vectors_that_who_owns_the_engine_ended_are_no_rows_fault(side):
    found = run_rows(side.open(), [RowRequest(0, EMBEDS, {"prompt": "a text"}, SamplingParams())], now=NOW)

    def serve() -> None:
        ((_, request_id, *_),) = side.got()
        send(side.end, [["refused", request_id, "aborted", "a pause"]])

    threading.Thread(target=serve).start()
    ((_, answer),) = found
    assert isinstance(answer, RowAborted) and str(answer) == "a pause"


def test_the_identity_is_that_of_the_weights_that_answer_now(side):
    llm = side.open()
    send(side.end, [["changed", {"identity": {**FACTS["identity"], "weights": "00.1"}}]])
    until(lambda: llm.identity.weights == "00.1")


def test_a_link_that_is_closed_is_no_rows_fault(side):
    llm = side.open()
    found = answers(llm, 1)

    def serve() -> None:
        side.got()
        side.end.close()

    threading.Thread(target=serve).start()
    with pytest.raises(EngineGone):
        next(found)
    assert side.ended.wait(30), "the clerk ends too"
    with pytest.raises(EngineGone):
        next(answers(llm, 1))


def test_an_engine_that_never_was_ready_is_gone(side):
    side.end.close()
    with pytest.raises(EngineGone):
        side.llm.wait()


def test_rows_that_are_given_up_are_aborted(side):
    found = answers(side.open(), 2, wants_partials=lambda: True)
    _, partial = next(found)
    assert not partial.finished and not partial.outputs
    sent = side.got()
    found.close()
    assert [message[0] for message in sent] == ["add", "add"]
    assert side.got() == [["abort", message[1]] for message in sent]


def test_the_whole_vocabulary_of_a_prompt_is_not_sent(side):
    request = RowRequest(0, GENERATES, [5, 6], SamplingParams(prompt_logprobs=-1))
    ((key, error),) = run_rows(side.open(), [request], now=NOW)
    assert key == 0 and "prompt_logprobs is -1" in str(error)
