"""Engines in lockstep draft the same tokens: what steps take and texts to draft from are calls that process 0 sends."""

import dataclasses

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.startup import build_engine as building
from ferrum_jax.runtime.distributed.messages import decode, joined
from tests.support import INVARIANT, run, small_llm, step

PROMPTS = [[3, 4, 5, 6] * 8, [7] * 20, [9], [5, 6, 7] * 6]
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=1)
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}


class Sent:
    """Processes of one engine in one process: what is sent is kept, and digests of plans too."""

    def __init__(self, leads: bool) -> None:
        self.leads = leads
        self.calls: list[bytes] = []
        self.digests: list[tuple[int, bytes]] = []

    def send_all(self, encoded: list[bytes]) -> None:
        self.calls += joined(encoded)

    def compare(self, step: int, digest: bytes) -> None:
        self.digests.append((step, digest))


def engine_of(llm, leads: bool, monkeypatch):
    """An engine that leads, or one that follows, with the calls of its processes."""
    sent = Sent(leads)
    with monkeypatch.context() as patched:
        patched.setattr(building, "current", lambda: sent)
        config = dataclasses.replace(llm.config, speculative_config=SUFFIX)
        return building.build_engine(llm.loaded, config, llm.tokenizer), sent


@pytest.mark.parametrize("learns", [False, True])
def test_a_process_that_follows_plans_the_drafts_of_process_0(learns, monkeypatch):
    llm = small_llm("qwen3", INVARIANT)
    plain = run(llm, PROMPTS, PARAMS)
    leader, sent = engine_of(llm, True, monkeypatch)
    follower, followed = engine_of(llm, False, monkeypatch)
    if learns:
        for output in plain:
            leader.learn([*output.prompt_token_ids, *output.token_ids], 0)
    outputs = {}
    for turn in range(3):
        keys = range(len(PROMPTS)) if turn else range(1)
        ids = [leader.add(PROMPTS[key], PARAMS, RequestOptions(key=str(key))) for key in keys]
        while leader.has_unfinished:
            outputs |= {output.request_id: output for output in step(leader)}
        found = [(outputs[id].token_ids, outputs[id].outputs[0].logprobs) for id in ids]
        assert found == [(plain[key].token_ids, plain[key].outputs[0].logprobs) for key in keys]
    leader.drain()
    made = set()
    for call in [call for content in sent.calls for call in decode(content)]:
        made.add(call.name)
        getattr(follower, call.name)(*call.arguments)
    assert made == {"add", "step", "take_costs", "drain", *(["learn"] if learns else [])}
    assert leader._digest.digest() == follower._digest.digest() and sent.digests == followed.digests
    counts = leader.scheduler.drafting.counts
    assert counts == follower.scheduler.drafting.counts and counts.accepted_tokens
    assert leader.scheduler.metrics() == follower.scheduler.metrics()
    assert follower.scheduler.drafting.costs == leader.scheduler.drafting.costs != ()
