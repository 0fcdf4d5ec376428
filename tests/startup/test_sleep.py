"""Sleep and its end: room for others on the devices, the same tokens afterwards, and no compile."""

import jax
import numpy as np
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.runtime.sampling import RESULT_WORDS
from tests.support import GOLDENS, SMALL

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = list(range(6, 46))


@pytest.fixture(scope="module")
def llm(compiles_at_start) -> LLM:
    return LLM(str(GOLDENS / "qwen3"), SMALL)


def tokens(llm: LLM) -> tuple[int, ...]:
    return llm.generate([PROMPT], GREEDY, progress=False)[0].token_ids


SPARE = 2 * (4 * RESULT_WORDS + 4 * 64)  # two sets of what sampling a row gives, which go with their engine


def num_bytes() -> int:
    """On the device, where arrays may share a buffer."""
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}.values())


def test_level_1_drops_kv_and_the_way_back_compiles_nothing(llm):
    before, awake = tokens(llm), num_bytes()
    freed = llm.sleep()
    assert llm.is_sleeping and set(freed) == {"weights", "kv_cache"}
    assert awake - num_bytes() == freed["kv_cache"] + freed["weights"] + SPARE
    with pytest.raises(ValueError, match=r"weights and kv_cache sleep, so nothing runs; call wake_up\(\)"):
        tokens(llm)
    with pytest.raises(ValueError, match="sleep already"):
        llm.sleep()
    llm.wake_up(tags=["weights"])
    with pytest.raises(ValueError, match="kv_cache sleep"):
        tokens(llm)
    with pytest.raises(ValueError, match="weights cannot wake up"):
        llm.wake_up(["weights"])
    llm.wake_up()
    assert tokens(llm) == before and not llm.is_sleeping and num_bytes() == awake
    assert llm.stats()["compiles_after_ready"] == 0


def test_level_2_drops_the_weights_too_until_an_update_brings_them(llm):
    before, awake = tokens(llm), num_bytes()
    freed = llm.sleep(level=2)
    assert awake - num_bytes() == freed["kv_cache"] + freed["weights"] + SPARE
    assert freed["weights"] == llm.ledger.weights_bytes
    with pytest.raises(ValueError, match="update_weights"):
        llm.wake_up()
    with pytest.raises(ValueError, match="nothing to keep"):
        llm.update_weights({"norm.weight": np.zeros(64, np.float32)}, partial=True)
    llm.update_weights(GOLDENS / "qwen3")
    llm.wake_up()
    assert tokens(llm) == before


def test_trainers_wake_weights_before_they_load_them_and_kv_after(llm):
    before = tokens(llm)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    with pytest.raises(ValueError, match="weights and kv_cache sleep"):
        tokens(llm)
    llm.update_weights(GOLDENS / "qwen3")
    llm.wake_up(tags=["kv_cache"])
    assert tokens(llm) == before and not llm.is_sleeping
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    llm.update_weights({"norm.weight": np.ones(64, np.float32)}, partial=True)
    llm.wake_up(tags=["kv_cache"])
    llm.update_weights(GOLDENS / "qwen3")
    assert tokens(llm) == before


def test_what_makes_no_sense_is_refused(llm):
    with pytest.raises(ValueError, match="level is 3"):
        llm.sleep(3)
    with pytest.raises(ValueError, match=r"call sleep\(\) first"):
        llm.wake_up()
    with pytest.raises(ValueError, match="tags are"):
        llm.wake_up(["kv"])
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(ValueError, match="requests are running"):
        llm.sleep()
    stream.close()
