"""Models in memory, behind a URL and with weights that change: the tokens of the folder, no compile, no stale hit."""

from __future__ import annotations

import functools

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.models import registry
from tests.support import GOLDENS, SMALL, small_llm

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = [(7 * i) % 290 + 6 for i in range(40)]


def model(scale: float = 1.0) -> nnx.Module:
    """The golden model in memory; scale: of the first layer's output projection."""
    layout = small_llm("qwen3").loaded.layout
    arrays = dict(zip(layout.targets, small_llm("qwen3").loaded.weights, strict=True))
    name = "layers.0.attention.o.weight"
    return registry.bind(layout.graph, arrays | {name: arrays[name] * scale})


@functools.cache
def in_memory() -> LLM:
    return LLM.from_model(model(), SMALL)


def tokens(llm: LLM) -> tuple[int, ...]:
    return llm.generate([PROMPT], GREEDY, progress=False)[0].token_ids


def test_a_model_in_memory_is_the_model_of_its_folder():
    assert in_memory().loaded.fingerprint == small_llm("qwen3").loaded.fingerprint
    assert in_memory().tokenizer is None
    in_memory().update_weights(model())
    assert tokens(in_memory()) == tokens(small_llm("qwen3"))


def test_a_model_behind_a_url_is_the_model_of_its_folder():
    fsspec.filesystem("memory").put(str(GOLDENS / "qwen3"), "/models/qwen3", recursive=True)
    llm = LLM("memory://models/qwen3", SMALL)
    assert llm.loaded.fingerprint == small_llm("qwen3").loaded.fingerprint
    assert tokens(llm) == tokens(small_llm("qwen3"))


def test_new_weights_need_no_compile_hit_nothing_of_the_old_ones_and_act_at_once():
    llm = in_memory()
    llm.update_weights(nnx.state(model()))
    before, old = tokens(llm), llm.loaded.fingerprint
    assert llm.generate([PROMPT], GREEDY, progress=False)[0].num_cached_tokens > 0
    compiles = llm.stats()["compiles_after_ready"]
    other = model(-3.0)
    llm.update_weights(registry.parameters_of(other))
    output = llm.generate([PROMPT], GREEDY, progress=False)[0]
    assert output.num_cached_tokens == 0 and output.token_ids != before and llm.loaded.fingerprint != old
    llm.update_weights(model())
    assert tokens(llm) == before and llm.loaded.fingerprint == old
    assert llm.stats()["compiles_after_ready"] == compiles


def test_the_weights_are_copies_that_a_trainer_may_donate():
    llm, arrays = in_memory(), {name: jnp.array(a) for name, a in registry.parameters_of(model()).items()}
    llm.update_weights(arrays)
    before = tokens(llm)
    jax.tree.map(lambda a: a.delete(), arrays)
    assert tokens(llm) == before


def test_all_that_does_not_fit_is_one_error_and_changes_nothing():
    llm, arrays = in_memory(), registry.parameters_of(model())
    before = llm.loaded
    wrong = arrays | {"norm.weight": np.zeros(3, np.float32), "extra": arrays["norm.weight"]}
    wrong["layers.1.mlp.up.weight"] = arrays["layers.1.mlp.up.weight"].astype(jnp.bfloat16)
    del wrong["embed.weight"]
    with pytest.raises(ValueError, match="4 mismatches") as error:
        llm.update_weights(wrong)
    for part in ("embed.weight is missing", "extra is left over", "norm.weight is [3]", "up.weight is bfloat16; the"):
        assert part in str(error.value)
    assert llm.loaded is before
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(ValueError, match="requests are running"):
        llm.update_weights(arrays)
    stream.close()
    with pytest.raises(ValueError, match="the model is a Linear; it must be one of"):
        LLM.from_model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
