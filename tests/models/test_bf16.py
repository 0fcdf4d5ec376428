"""In bfloat16 a model of every family is as near to float32 as the reference implementation is."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.models.families.registry import abstract_parts
from tests.models.test_goldens import GOLDENS, NAMES, executable, load

MOST = 1.2  # times the reference's own error
# One shape of each family.
FIRST = {json.loads((GOLDENS / name / "config.json").read_text())["architectures"][0]: name for name in reversed(NAMES)}


def logits(name: str, sequences: list[np.ndarray], dtype: str) -> np.ndarray:
    """[positions of all sequences, V] float64."""
    spec, _, weights, _ = load(name)
    kept = abstract_parts(spec, dtype)[1]  # some are float32 whatever the dtype
    parameters = {key: jnp.asarray(x, kept[key].dtype) for key, x in weights.items()}
    found = []
    for ids in sequences:
        padded = np.zeros(214, np.int32)
        padded[: len(ids)] = ids
        found.append(np.asarray(executable(name)(parameters, padded)[1], np.float64)[: len(ids)])
    return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST.values())
def test_the_error_in_bfloat16_is_at_most_that_of_the_reference_and_a_fifth(name: str):
    golden = load(name)[3]
    turns = range(len(golden["last_logits"]))
    sequences = [np.concatenate((golden[f"prompt_{i}"], golden[f"tokens_{i}"])) for i in turns]
    exact = logits(name, sequences, "float32")
    error = logits(name, sequences, "bfloat16") - exact
    spread = exact - exact.mean(axis=1, keepdims=True)
    relative = np.sqrt(np.mean(error**2) / np.mean(spread**2))
    assert 0 < relative <= MOST * golden["bf16_error"], f"{relative:.2e}, the reference {golden['bf16_error']:.2e}"
