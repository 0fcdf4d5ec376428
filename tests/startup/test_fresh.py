"""A function in a fresh interpreter gets its order and its environment."""

import os
import pickle
import subprocess
import sys

from ferrum_jax.io.child import start


def shows(order) -> None:
    print(order, os.environ.get("FRESH"), "jax" in sys.modules, sep="|")


def test_a_fresh_process_has_the_order_and_environment_and_no_library():
    with start("tests.startup.test_fresh:shows", ("a", 1), environment=["FRESH=yes"], stdout=-1) as process:
        assert process.stdout is not None and process.stdout.read() == b"('a', 1)|yes|False\n"
    assert process.returncode == 0


def test_a_process_that_ends_at_once_is_no_error_of_who_gives_it_a_large_order():
    with start("no.such.module:f", pickle.dumps(bytes(1 << 22)), stderr=subprocess.DEVNULL) as process:
        assert process.wait() == 1
