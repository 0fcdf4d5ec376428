"""Engines on devices that are named, beside others in one process, and weights that go from one to another."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from ferrum_jax import LLM, SamplingParams
from tests.forked import call
from tests.support import GOLDENS, SMALL


def tokens(llm):
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    return llm.generate([list(range(6, 40))], params, progress=False)[0].token_ids


def devices(llm):
    return {device.id for weight in llm.loaded.weights for device in weight.sharding.device_set}


def opened(**fields):
    return LLM(str(GOLDENS / "llama"), dataclasses.replace(SMALL, max_num_seqs=2, **fields))


@pytest.mark.slow
def test_engines_share_a_process_on_devices_of_their_own_and_hand_weights_over():
    call(hand_weights_over, devices=4)


def hand_weights_over():
    first, last = opened(), opened(devices=jax.devices()[3:])
    pair = opened(mesh="tp=2", devices=Mesh(np.array(jax.devices()[1:3]), ("any",)))
    assert (devices(first), devices(last), devices(pair)) == ({0}, {3}, {1, 2})
    wanted = tokens(first)
    assert tokens(last) == tokens(pair) == wanted
    pair.update_weights(dict(zip(first.loaded.layout.targets, first.loaded.weights, strict=True)))
    last.update_weights(dict(zip(pair.loaded.layout.targets, pair.loaded.weights, strict=True)))
    assert tokens(pair) == tokens(last) == tokens(first) == wanted
    assert devices(last) == {3} and devices(pair) == {1, 2}
    assert [llm.stats()["compiles_after_ready"] for llm in (first, last, pair)] == [0, 0, 0]
