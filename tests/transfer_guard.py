"""A guard around each step of every engine in this process: arrays move and are waited for by name (`NamedTransfers`).

jax refuses hidden transfers to devices by itself. It does not see the way to the host on the CPU, where NumPy reads an
array's own memory; that is closed here, and what is left obeys jax's setting for the thread, as on a GPU. To read
what was not sent before is refused too: the step would wait for a copy that nobody had begun.
"""

import ctypes
import functools
import weakref

import jax
from jax._src.array import ArrayImpl

from ferrum_jax.engine.encoder_engine import EncoderEngine
from ferrum_jax.engine.engine import Engine

_AS_BUFFER = 20  # the pointer to what gives a type's memory, in words from the start of CPython's PyTypeObject
_sent: dict[int, weakref.ref] = {}


def stand_around_steps() -> None:
    """From now on, for as long as the process runs."""
    word = ctypes.c_void_p
    word.from_address(word.from_address(id(ArrayImpl) + _AS_BUFFER * ctypes.sizeof(word)).value).value = None
    read, send = ArrayImpl._value.fget, ArrayImpl.copy_to_host_async

    def sent(array):
        at = id(array)
        _sent[at] = weakref.ref(array, lambda _: _sent.pop(at, None))
        return send(array)

    def value(array):
        if _level() == "allow" and id(array) not in _sent:
            raise RuntimeError(f"{array.aval} is fetched and was not sent: a step waits for a copy that had not begun")
        return read(array)

    ArrayImpl._value, ArrayImpl.copy_to_host_async = property(_refusing(value)), sent
    ArrayImpl.block_until_ready = _refusing(ArrayImpl.block_until_ready)
    jax.block_until_ready = _refusing(jax.block_until_ready)
    for engine in (Engine, EncoderEngine):
        engine.step = _guarded(engine.step)


def _level() -> str | None:
    return jax.transfer_guard_device_to_host.value


def _refusing(call):
    """The call, in a thread that does not disallow it."""

    def checked(arrays):
        if _level() == "disallow":
            raise RuntimeError("a step reads an array on a device, or waits for one, and not through `NamedTransfers`")
        return call(arrays)

    return checked


def _guarded(step):
    @functools.wraps(step)
    def guarded(engine):
        with jax.transfer_guard("disallow"):
            return step(engine)

    return guarded
