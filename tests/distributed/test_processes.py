"""What processes of one engine tell one another: here two of them in one process, over a pipe."""

import contextlib
import dataclasses
import os
import socket
from multiprocessing import Pipe
from threading import Thread

import jax
import numpy as np
import pytest

from ferrum_jax.core.plan import Copy, ShardPlan, StepPlan
from ferrum_jax.engine.lockstep import plan_bytes
from ferrum_jax.integrations.distributed import serve
from ferrum_jax.io import system
from ferrum_jax.runtime.distributed.handshake import Channel
from ferrum_jax.runtime.distributed.messages import Broken, End
from ferrum_jax.runtime.distributed.processes import CHECK_STEPS, EXIT_LOST, Processes, ProcessLost, connect
from tests.support import raising


@pytest.fixture
def pair(monkeypatch):
    """Process 0, process 1, and what those that would have ended their program said, or with which code they left."""
    said = []
    monkeypatch.setattr(Processes, "_exit", lambda self: said.append((self.index, *self._lost)))
    monkeypatch.setattr(Processes, "_leave", lambda self, code: said.append((self.index, code)))
    near, far = channels()
    pair = Processes(0, [near]), Processes(1, [far])
    yield *pair, said
    for processes, connection in zip(pair, (near, far), strict=True):
        hang_up(processes)
        for thread in processes._threads:
            thread.join()
        connection.close()


def channels():
    """Both ends of a connection whose handshake is done."""
    near, far = Pipe()
    keys = b"to the follower", b"to the leader"
    return Channel(near, sends=keys[0], receives=keys[1]), Channel(far, sends=keys[1], receives=keys[0])


def hang_up(processes):
    """What the end of its process does to a connection: to close it while a thread reads it would end nothing."""
    processes._ended = True
    processes._quiet.set()
    processes._beating.join()
    for connection in processes._connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


def wait_until_lost(processes):
    with pytest.raises(ProcessLost) as lost:
        processes.receive()
    assert lost.value.code == EXIT_LOST


def test_they_agree_on_the_smallest_value(pair):
    leader, other, _ = pair
    found = []
    thread = Thread(target=lambda: found.append(other.agree(7)))
    thread.start()
    assert leader.agree(9) == 7
    thread.join()
    assert found == [7]


def test_the_others_end_with_the_exit_code_of_process_0(pair):
    leader, other, said = pair
    received = []

    def follow():
        with pytest.raises(SystemExit) as end:
            while True:
                received.append(other.receive())
        received.append(end.value.code)
        other.end(end.value.code)

    thread = Thread(target=follow)
    thread.start()
    leader.send("work")
    leader.end(3)
    thread.join()
    assert received == ["work", 3] and said == []


@pytest.mark.parametrize("code", [0, 2])
def test_a_process_that_does_not_come_to_the_end_is_not_waited_for(pair, monkeypatch, code):
    """Process 0 leaves at once where something went wrong, and who is busy as soon as process 0 has gone."""
    monkeypatch.setattr("ferrum_jax.runtime.distributed.processes._ORDERLY_S", 0.1)
    leader, other, said = pair
    leader.end(code)
    assert said == ([(0, 2)] if code else [])
    hang_up(leader)
    other._threads[0].join()
    assert said == ([(0, 2), (1, 2)] if code else [(1, 0)])


def test_a_process_that_has_gone_while_process_0_ends_is_not_waited_for(pair):
    leader, other, said = pair

    def go():
        with pytest.raises(SystemExit):
            other.receive()
        hang_up(other)

    thread = Thread(target=go)
    thread.start()
    leader.end(2)
    thread.join()
    assert (0, 2) in said


def test_plans_that_differ_end_all_with_the_step_and_the_process(pair):
    leader, other, _ = pair
    leader.compare(CHECK_STEPS, b"same")
    other.compare(CHECK_STEPS, b"same")
    leader.compare(2 * CHECK_STEPS, b"these")
    other.compare(2 * CHECK_STEPS, b"those")
    wait_until_lost(leader)
    reason, code = leader._lost
    assert f"step {2 * CHECK_STEPS}" in reason and "process 1" in reason and code == EXIT_LOST


def test_a_process_that_ends_is_missed_at_once(pair):
    leader, other, _ = pair
    hang_up(other)
    wait_until_lost(leader)
    assert leader._lost[0] == "process 1 has ended"


def test_an_engine_that_breaks_everywhere_may_be_renewed_once(pair):
    leader, other, _ = pair
    for processes in (leader, other):
        processes.compare(CHECK_STEPS, b"before")
    thread = Thread(target=other.break_together, args=(5, "a step failed"))
    thread.start()
    leader.break_together(5, "a step failed")
    thread.join()
    for processes in (leader, other):
        processes.renew()
        with pytest.raises(ValueError, match="broken off in this process and not in the others"):
            processes.renew()
        processes.compare(CHECK_STEPS, b"after")
    thread = Thread(target=other.agree, args=(0,))  # comes behind the digest
    thread.start()
    leader.agree(0)
    thread.join()


@pytest.mark.parametrize("others", ["nothing", 6])
def test_an_engine_that_breaks_in_one_process_ends_all_with_what_failed(pair, monkeypatch, others):
    """The other has no error, or had one in a step before."""
    monkeypatch.setattr("ferrum_jax.runtime.distributed.processes._ORDERLY_S", 0.1)
    leader, other, _ = pair
    if others != "nothing":
        other.send(Broken(others))
    with pytest.raises(ProcessLost):
        leader.break_together(7, "a step failed: why")
    assert leader._lost == ("a step failed: why", EXIT_LOST)


def test_a_process_waits_for_the_end_where_process_0_broke_alone(pair):
    """Process 0 says why it broke, and ends all; the word of it is no model's arguments."""
    leader, other, _ = pair
    leader.send(Broken(3))
    leader.send(End(75))
    with pytest.raises(SystemExit) as end:
        serve(other, raising(AssertionError("no model is opened")))
    assert end.value.code == 75


def test_a_process_that_says_nothing_is_missed_and_one_that_waits_is_not(monkeypatch):
    """Process 0 has two others, and one is stopped."""
    monkeypatch.setattr("ferrum_jax.runtime.distributed.processes.SILENCE_S", 0.5)
    monkeypatch.setattr(Processes, "_exit", lambda self: None)
    monkeypatch.setattr(Processes, "_leave", lambda self, code: None)
    pipes = [channels(), channels()]
    waits = Processes(1, [pipes[0][1]])
    leader = Processes(0, [near for near, _ in pipes])
    with pytest.raises(ProcessLost):
        leader._take(1)
    assert leader._lost == ("process 2 has said nothing for 0.5 s", EXIT_LOST)
    assert waits._lost is None
    for processes in (leader, waits):
        hang_up(processes)
    for thread in (*leader._threads, *waits._threads):
        thread.join()
    for connection in (end for pipe in pipes for end in pipe):
        connection.close()


def test_a_process_that_cannot_start_says_why(pair, monkeypatch):
    exits = []
    monkeypatch.setattr(system, "leave", exits.append)
    leader, other, _ = pair
    other.fail("no such folder", 2)
    assert exits == [2]
    with pytest.raises(ProcessLost) as lost:
        leader.receive()
    assert lost.value.code == 2 and leader._lost[0] == "process 1: no such folder"


def test_processes_that_cannot_be_found_are_refused_with_what_to_give(monkeypatch):

    monkeypatch.setattr(jax.distributed, "initialize", raising(ValueError("no cluster")))
    with pytest.raises(ValueError, match=r"no cluster.*HOST:PORT"):
        connect("auto", None, None)


def test_processes_that_do_not_come_end_the_program_as_one_to_be_started_again(monkeypatch):

    monkeypatch.setattr(jax.distributed, "initialize", raising(jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")))
    with pytest.raises(SystemExit) as end:
        connect("127.0.0.1:1", 2, 0)
    assert end.value.code == EXIT_LOST


def test_every_integer_of_a_plan_is_in_its_bytes():
    row = np.arange(2, dtype=np.int32)
    fields = ("slots", "starts", "counts", "samples", "state_slots", "source_slots", "target_slots", "masked")
    named = dict.fromkeys((*fields, "adapter_ids", "rope_shifts", "clip_slots"), row)
    shard = ShardPlan(**named, block_tables=(np.zeros((2, 3), np.int32),))
    plan = StepPlan(step=5, shards=(shard,), admitted=((0, 1, 2),))
    others = [dataclasses.replace(plan, step=6), dataclasses.replace(plan, admitted=((0, 1, 3),))]
    copies = (Copy(pool=0, source=1, target=2),)
    for changed in (
        {"starts": row + 1},
        {"clip_slots": row + 1},
        {"block_tables": (np.ones((2, 3), np.int32),)},
        {"block_tables": (np.zeros((3, 2), np.int32),)},
        {"copies_before": copies},
        {"drafts": (7,)},
        {"copies_after": copies},
    ):
        others.append(dataclasses.replace(plan, shards=(dataclasses.replace(shard, **changed),)))
    assert len({plan_bytes(plan), *map(plan_bytes, others)}) == 1 + len(others)
    assert plan_bytes(plan) == plan_bytes(dataclasses.replace(plan))
