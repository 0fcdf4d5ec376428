"""Run as a process of its own with several CPU devices: what a golden folder's model says on meshes, as JSON.

python mesh_run.py FAMILY MESH...       each mesh but the first begins with the prefixes that the first one saved

Nearly all of its time goes into compiling steps, so there are two of them: rows that decode, and mixed rows.
"""

import dataclasses
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Iterator

import jax

from ferrum_jax import SamplingParams
from ferrum_jax.llm import LLM
from ferrum_jax.runtime import layout
from ferrum_jax.runtime.buckets import Ladder, make_ladder
from ferrum_jax.sharding import local_bytes
from ferrum_jax.startup.build_engine import build_engine
from scripts.hlo_collectives import unexpected_collectives
from tests.engine.test_goldens import golden_prompts
from tests.sharding.meant import meant_collectives
from tests.support import GOLDENS, SMALL, finish, run

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=20)
DRAWN = dataclasses.replace(GREEDY, temperature=0.9, top_k=40, seed=5, repetition_penalty=1.2)
SCORED = dataclasses.replace(GREEDY, prompt_logprobs=20, max_tokens=1)
PREFIX = list(range(7, 45))
ROWS = (
    ([*PREFIX, 60], GREEDY),
    ([9], DRAWN),
    ([*PREFIX, 61, 62], GREEDY),
    (PREFIX[:20], SCORED),
    ([*PREFIX, 60], DRAWN),
)
# Two on each of four shards, whose pools hold one of them whole.
PRESSED = [[stem * 9 + i * i % 17 + 6 for i in range(30)] for stem in range(8)]


def say(family: str, mesh: str, saved: pathlib.Path) -> dict[str, object]:
    """Tokens, log-probabilities and hits of ROWS, in blocks of NaN at first; then with prefixes; then preempted.

    And the golden's tokens.
    """
    config = dataclasses.replace(SMALL, mesh=mesh, max_num_seqs=2)
    llm = LLM(str(GOLDENS / family), config)
    outputs = run(llm, [row[0] for row in ROWS], [row[1] for row in ROWS], fill=math.nan)
    entries = [e for o in outputs for e in (*o.outputs[0].logprobs, *(o.prompt_logprobs or ())) if e]
    if saved.exists():
        llm.load_prefix_cache(saved)
    (again,) = llm.generate([ROWS[0][0]], GREEDY, progress=False)
    if not saved.exists():
        llm.save_prefix_cache(saved)
    pressed = build_engine(llm.loaded, dataclasses.replace(config, num_blocks=4), None, fill=math.nan)
    ids = [pressed.add(prompt, GREEDY) for prompt in PRESSED]
    late = finish(pressed)
    executables = llm.loaded.executables
    greedy = dataclasses.replace(GREEDY, max_tokens=64, logprobs=None)
    golden = run(llm, [prompt.tolist() for prompt in golden_prompts(family)[0]], greedy)
    return {
        "tokens": [*(o.token_ids for o in outputs), again.token_ids, *(late[id].token_ids for id in ids)],
        "logprobs": [sorted((token, e.logprob) for token, e in entry.items()) for entry in entries],
        "cached": [o.num_cached_tokens for o in outputs],
        "cached_from_disk": again.num_cached_tokens,
        "preemptions": pressed.scheduler.metrics().preemptions,
        "kv_bytes": llm.ledger.kv_bytes,
        "kv_repeated_bytes": llm.ledger.repeated_bytes,
        "weights_bytes": llm.ledger.weights_bytes,
        "fingerprint": llm.loaded.fingerprint.hex(),
        "golden": [o.token_ids for o in golden],
        "unexpected_collectives": [
            unexpected_collectives(executable.as_text(), meant_collectives(llm.loaded.layout, part))
            for part, executable in (
                *executables.forwards.items(),
                *executables.samples.items(),
                ("score", executables["score"]),
            )
        ],
        "pools_are_aliased": all(aliases_pools(llm)),
    }


def aliases_pools(llm: LLM) -> Iterator[bool]:
    """Whether each half of a step writes what it donates in place."""
    pools, executables = llm.loaded.layout.pools, llm.loaded.executables
    donated = (
        (executables.forwards, (pools.caches, pools.hidden)),
        (executables.samples, (pools.slots, pools.prompts)),
    )
    for halves, arrays in donated:
        num_bytes = sum(map(local_bytes, jax.tree.leaves(arrays)))
        yield from (half.memory_analysis().alias_size_in_bytes >= num_bytes for half in halves.values())


def without_single_row(**limits) -> Ladder:
    """The ladder that it would be, but a row that decodes alone takes the bucket of two."""
    _, *others = make_ladder(**limits).buckets
    return Ladder(buckets=tuple(others))


if __name__ == "__main__":
    layout.make_ladder = without_single_row
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([say(sys.argv[1], mesh, pathlib.Path(folder, "prefixes")) for mesh in sys.argv[2:]]))
