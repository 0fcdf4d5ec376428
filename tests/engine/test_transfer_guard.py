"""The guard that stands around every step in tests (tests/transfer_guard.py) fails where it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.runtime.runner import Runner
from tests.support import fresh_engine, small_llm

HIDDEN = {
    "NumPy for an executable": lambda runner, array, double: double(np.ones(4, np.float32)),
    "an array that is made": lambda runner, array, double: jnp.zeros(4),
    "a Python number": lambda runner, array, double: array + 1,
    "NumPy of an array": lambda runner, array, double: np.asarray(array),
    "NumPy that takes an array in": lambda runner, array, double: np.concatenate([np.zeros(1), array]),
    "a list": lambda runner, array, double: array.tolist(),
    "a number": lambda runner, array, double: float(array),
    "a wait": lambda runner, array, double: array.block_until_ready(),
    "a wait for several": lambda runner, array, double: jax.block_until_ready([array, array]),
    "a fetch of what was not sent": lambda runner, array, double: runner.transfers.fetch(array),
}


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_a_hidden_transfer_or_wait_breaks_its_step(monkeypatch, hidden):
    double = jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()
    array, dispatch = double(jnp.ones(4))[:1].sum(), Runner.dispatch

    def dispatch_and_more(runner, plan):
        hidden(runner, array, double)
        return dispatch(runner, plan)

    monkeypatch.setattr(Runner, "dispatch", dispatch_and_more)
    engine = fresh_engine(small_llm("qwen3"))
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    with pytest.raises(Exception, match=r"Disallowed host-to-device transfer|through `NamedTransfers`|was not sent"):
        engine.step()
