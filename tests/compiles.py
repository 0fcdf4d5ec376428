"""When engines of tests compile: when a step first wants an executable, for a test uses few of those of a ladder."""

from concurrent.futures import ThreadPoolExecutor

from ferrum_jax.runtime import encoder_runtime, programs
from ferrum_jax.runtime.compile.compile import make_all
from ferrum_jax.runtime.compile.deferred import DeferredExecutable


def at_start() -> None:
    """As those of users do."""
    programs.make_all = encoder_runtime.make_all = make_all


def when_used() -> None:
    """A step waits for what it wants."""
    programs.make_all = encoder_runtime.make_all = _make_when_used


def _make_when_used(parts, order_of_use, *, executable_cache, on_done=lambda done, total: None, abandoned=None):
    def deferred(part) -> DeferredExecutable:
        return DeferredExecutable(lambda: _in_a_thread(lambda: part.get(executable_cache).result()))

    for done, _ in enumerate(parts, 1):
        on_done(done, len(parts))
    return {key: deferred(part) for key, part in parts.items()}


def _in_a_thread(make):
    """Made by another thread: an engine would count a compile of the one that steps as a fault."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(make).result()
