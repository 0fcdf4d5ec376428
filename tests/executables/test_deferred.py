"""An executable is loaded once, by whoever needs it first, and a program that ends does not wait for all of them."""

import subprocess
import sys
import threading

import pytest

from ferrum_jax.runtime.compile.deferred import DeferredExecutable, Prepared, load_behind
from tests.support import ROOT, raising


def counted(loads, name):
    return DeferredExecutable(lambda: loads.append(name) or (lambda: name))


def test_what_is_looked_up_is_loaded_once_and_the_rest_waits():
    loads = []
    executables = Prepared({name: counted(loads, name) for name in "abc"})
    assert (list(executables), len(executables), executables.num_loaded) == (["a", "b", "c"], 3, 0)
    assert "a" in executables and {"a", "d"} - executables.keys() == {"d"} and not loads, (
        "asking what is there loads nothing"
    )
    assert executables["b"]() == executables["b"]() == "b"
    assert loads == ["b"] and executables.num_loaded == 1


def test_more_may_be_put_in_while_another_walks_over_them():
    executables = Prepared({name: DeferredExecutable.made(name.upper) for name in "ab"})
    walked = []
    for name in executables:
        walked.append(name)
        executables.put(name * 2, DeferredExecutable.made(name.upper))
    assert walked == ["a", "b"] and len(executables) == 4


def test_the_thread_loads_in_its_order_what_nobody_needed_before():
    loads = []
    laters = [counted(loads, name) for name in "abc"]
    laters[2].result()
    load_behind(laters).join()
    assert loads == ["c", "a", "b"] and all(later.done for later in laters)


def test_those_who_ask_while_it_is_loaded_wait_for_it():
    begun, go, loads, found = threading.Event(), threading.Event(), [], []

    def load():
        loads.append(1)
        begun.set()
        assert go.wait(60)
        return lambda: "loaded"

    later = DeferredExecutable(load)
    threads = [threading.Thread(target=lambda: found.append(later.result()())) for _ in range(3)]
    threads[0].start()
    assert begun.wait(60)
    for thread in threads[1:]:
        thread.start()
    assert not later.done
    go.set()
    for thread in threads:
        thread.join()
    assert (loads, found) == ([1], ["loaded"] * 3)


def test_an_error_is_told_to_those_who_need_it_and_an_interrupt_may_be_tried_again():

    failed = DeferredExecutable(raising(ValueError("no such executable")))
    failed.prepare()  # as the thread does, which goes on with others
    for _ in range(2):
        with pytest.raises(ValueError, match="no such executable"):
            failed.result()
    errors = iter([KeyboardInterrupt])

    def interrupted():
        for error in errors:
            raise error
        return lambda: "loaded"

    later = DeferredExecutable(interrupted)
    with pytest.raises(KeyboardInterrupt):
        later.result()
    assert later.result()() == "loaded"


def test_a_program_ends_though_executables_wait():
    program = """
import itertools, time
from ferrum_jax.runtime.compile.deferred import DeferredExecutable, load_behind
count = itertools.count()
load_behind([DeferredExecutable(lambda: time.sleep(0.01) or print(next(count), flush=True)) for _ in range(100_000)])
while next(count) < 5:
    time.sleep(0.01)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) < 100 and done.stderr == ""
