"""A child answers, or the reason why not is known; it takes no more than its bounds and reaches nothing."""

import dataclasses
import time

import pytest

from ferrum_jax.io.sandbox.in_child import ChildBounds, NoAnswer, in_child
from tests.rows import rows_beside

BOUNDS = ChildBounds(seconds=20, memory_bytes=256 << 20, answer_bytes=1 << 20)


def run(name: str, content: bytes = b"abc", order=None, look=lambda: None, **changed) -> bytes:
    bounds = dataclasses.replace(BOUNDS, **changed)
    return in_child(f"tests.confined.actions:{name}", content, order, bounds, look=look)


def test_bytes_go_in_and_an_answer_comes_back():
    assert run("reversed_bytes", b"abc", order=[1, "x"]) == b"cba[1, 'x']"
    assert run("reversed_bytes", bytes(3 << 20), order="", answer_bytes=4 << 20) == bytes(3 << 20)


def test_a_refusal_keeps_its_words():
    with pytest.raises(ValueError, match=r"^the sound is b'abc': why$"):
        run("refuse", order="why")


@pytest.mark.parametrize(
    ("name", "changed", "why"), rows_beside(__file__)["a child that gives no answer leaves a reason"]
)
def test_a_child_that_gives_no_answer_leaves_a_reason(name, changed, why):
    with pytest.raises(NoAnswer) as raised:
        run(name, **changed)
    assert str(raised.value) == why


def test_a_child_opens_no_file_and_no_socket_and_sees_no_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    said = run("reach").decode().split()
    assert set(said) <= {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "LC_CTYPE"}


def test_a_child_ends_when_nobody_waits_for_it():
    start, looks = time.monotonic(), []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise TimeoutError("gone")

    with pytest.raises(TimeoutError, match="gone"):
        run("sleep", look=look)
    assert time.monotonic() - start < 10
