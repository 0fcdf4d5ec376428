"""A decode step as one executable says what the halves say, to the bit, and is taken where nothing needs the halves."""

import dataclasses
import re

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.plan import Draw
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.runtime.buckets import LaunchBucket
from ferrum_jax.runtime.compile.deferred import Prepared
from ferrum_jax.runtime.compile.executable_store import ExecutableStore
from ferrum_jax.runtime.programs import programs_of
from ferrum_jax.runtime.runner import Runner
from tests.support import COMPILED, answers, requests_of, small_llm, told

GREEDY = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
PLAIN = SamplingParams(max_tokens=12, seed=4, logprobs=0, ignore_eos=True)
FULL = SamplingParams(max_tokens=5, seed=5, top_k=7, logprobs=2)
PROMPTS = [[7] * 20, [9], [3, 4, 5, 6] * 8, [7] * 20, [8, 9]]


def launching(llm, horizons=(1,)):
    """The loaded model with the launches of four rows; those of fewer are too much to compile here."""
    loaded, store = llm.loaded, ExecutableStore(str(COMPILED), llm.loaded.layout.mesh.devices.flatten().tolist())
    four = [each for each in loaded.layout.ladder.launches if each.forward.num_rows == 4]
    launches = [each for each in four if each.horizon in horizons]
    programs = programs_of(loaded.layout, launches)
    made = {launch: programs[launch].get(store) for launch in launches}
    return dataclasses.replace(loaded, executables=dataclasses.replace(loaded.executables, launches=Prepared(made)))


@pytest.fixture
def launched(monkeypatch) -> list[LaunchBucket]:
    """The launches that runners have started."""
    found, launch = [], Runner._launch
    monkeypatch.setattr(Runner, "_launch", lambda self, part, *rest: found.append(part) or launch(self, part, *rest))
    return found


@pytest.mark.parametrize(
    ("params", "draws"),
    [
        ([GREEDY] * 5, {Draw.GREEDY}),
        ([GREEDY, PLAIN, GREEDY, GREEDY, PLAIN], {Draw.GREEDY, Draw.PLAIN}),
        ([FULL, GREEDY, dataclasses.replace(PLAIN, stop=["e"]), PLAIN, PLAIN], {Draw.PLAIN}),
        ([dataclasses.replace(FULL, prompt_logprobs=1)] * 5, set()),
    ],
    ids=["greedy", "plain", "mixed", "scored"],
)
def test_one_launch_draws_the_bits_of_the_halves(launched, params, draws):
    llm = small_llm("qwen3")
    requests = requests_of(PROMPTS, params)
    expected = told(answers(build_engine(llm.loaded, llm.config, llm.tokenizer), requests))
    assert not launched
    assert told(answers(build_engine(launching(llm), llm.config, llm.tokenizer), requests)) == expected
    assert {launch.draw for launch in launched} == draws


def test_launches_go_on_while_a_text_waits_for_its_vector(launched):
    llm = small_llm("qwen3")
    requests = requests_of([*PROMPTS[:4], [5, 6, 7]], [GREEDY] * 4 + [SamplingParams(max_tokens=1, temperature=0.0)])
    requests[4] = (*requests[4][:2], RequestOptions(embeds=True))
    expected = answers(build_engine(llm.loaded, llm.config, llm.tokenizer), requests)
    found = answers(build_engine(launching(llm), llm.config, llm.tokenizer), requests)
    assert launched and told(found) == told(expected)
    np.testing.assert_array_equal(found[4].embedding, expected[4].embedding)


def test_a_launch_adds_no_branch_and_one_loop_if_it_goes_on_and_writes_in_place():
    loaded = launching(small_llm("qwen3"), horizons=(1, 8))

    def controls(text: str) -> int:
        """Not counting scatters, which are loops where the machine code of tests is made by the shorter way."""
        found = re.findall(r" (?:while|conditional)\(.*", text)
        return sum('/scatter"' not in line for line in found)

    for launch, executable in loaded.executables.launches.items():
        text, forward = (part.as_text() for part in (executable, loaded.executables.forwards[launch.forward]))
        assert controls(text) == controls(forward) + (launch.horizon > 1), str(launch)
        pool = ",".join(map(str, loaded.layout.pools.flat_caches()[0].shape))
        assert f"[{pool}]" in text and not re.findall(rf"\[{pool}\]\S* copy\(", text), str(launch)
        header = text.split("\n", 1)[0]
        num_results = len(loaded.layout.pools.flat_caches()) + 3  # slots, hidden and rows
        assert header.count("may-alias") + header.count("must-alias") == num_results, str(launch)


def test_steps_that_ran_in_halves_say_which_launch_they_wanted():
    llm = small_llm("qwen3")
    engine = build_engine(llm.loaded, llm.config, llm.tokenizer)
    engine.runner._executables.worth.wanted.clear()
    answers(engine, requests_of(PROMPTS[:1], GREEDY))
    wanted = {str(part) for part in engine.runner._executables.worth.wanted}
    assert wanted == {"launch decode T=1 R=1 M=16 greedy"}
