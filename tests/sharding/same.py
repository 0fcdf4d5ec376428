"""What a model says on meshes of simulated devices, in a process of their own, and when that is the same.

Nearly all of its time goes into compiling steps, so there are two of them: rows that decode, and mixed rows.
"""

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.llm import LLM
from ferrum_jax.models.sharding import local_bytes
from ferrum_jax.runtime import settled
from ferrum_jax.runtime.buckets import Ladder, make_ladder
from scripts.goldens.mesh_rows import GREEDY, PRESSED, ROWS
from scripts.hlo_collectives import unexpected_collectives
from tests.engine.test_goldens import golden_prompts
from tests.forked import call
from tests.sharding.meant import meant_collectives
from tests.support import GOLDENS, SMALL, answers, fresh_engine, run


def said_on(say: Callable[..., Any], name: str, *meshes: str) -> list[dict]:
    """What say(name, mesh) returns of each of these meshes, in one process with four devices.

    LLVM does not optimise, which changes no program but halves the time of compiling it.
    """
    flags = "--xla_backend_optimization_level=0"
    return call(_on_each, say, name, meshes, devices=4, XLA_FLAGS=flags)


def _on_each(say: Callable[..., Any], name: str, meshes: tuple[str, ...]) -> list[Any]:
    return [say(name, mesh) for mesh in meshes]


def run_on(family: str, *meshes: str) -> list[dict]:
    """What a golden folder's model says; each mesh but the first begins with the prefixes that the first one saved."""
    with tempfile.TemporaryDirectory() as folder:
        return said_on(functools.partial(_say, saved=pathlib.Path(folder, "prefixes")), family, *meshes)


def _say(family: str, mesh: str, saved: pathlib.Path) -> dict[str, object]:
    """Tokens, log-probabilities and hits of ROWS, in blocks of NaN at first; then with prefixes; then preempted.

    And the golden's tokens.
    """
    settled.make_ladder = _without_single_row
    config = dataclasses.replace(SMALL, mesh=mesh, max_num_seqs=2)
    llm = LLM(str(GOLDENS / family), config)
    outputs = run(llm, [row[0] for row in ROWS], [row[1] for row in ROWS])
    entries = [e for o in outputs for e in (*o.outputs[0].logprobs, *(o.prompt_logprobs or ())) if e]
    if saved.exists():
        llm.load_prefix_cache(saved)
    (again,) = llm.generate([ROWS[0][0]], GREEDY, progress=False)
    if not saved.exists():
        llm.save_prefix_cache(saved)
    pressed = fresh_engine(llm, num_blocks=4)
    late = answers(pressed, [(prompt, GREEDY) for prompt in PRESSED])
    executables = llm.loaded.executables
    greedy = dataclasses.replace(GREEDY, max_tokens=64, logprobs=None)
    golden = run(llm, [prompt.tolist() for prompt in golden_prompts(family)[0]], greedy)
    return {
        "tokens": [*(o.token_ids for o in outputs), again.token_ids, *(o.token_ids for o in late)],
        "logprobs": [sorted((token, e.logprob) for token, e in entry.items()) for entry in entries],
        "cached": [o.num_cached_tokens for o in outputs],
        "cached_from_disk": again.num_cached_tokens,
        "preemptions": pressed.scheduler.metrics().preemptions,
        "kv_bytes": llm.ledger.kv_bytes,
        "kv_repeated_bytes": llm.ledger.repeated_bytes,
        "weights_bytes": llm.ledger.weights_bytes,
        "fingerprint": llm.loaded.fingerprint.digest.hex(),
        "golden": [o.token_ids for o in golden],
        "unexpected_collectives": [
            unexpected_collectives(executable.as_text(), meant_collectives(llm.loaded.layout, part))
            for part, executable in (
                *executables.forwards.items(),
                *executables.samples.items(),
                ("score", executables["score"]),
            )
        ],
        "pools_are_aliased": all(_aliases_pools(llm)),
    }


def _aliases_pools(llm: LLM) -> Iterator[bool]:
    """Whether each half of a step writes what it donates in place."""
    pools, executables = llm.loaded.layout.pools, llm.loaded.executables
    donated = (
        (executables.forwards, (pools.caches, pools.hidden)),
        (executables.samples, (pools.slots, pools.prompts)),
    )
    for halves, arrays in donated:
        num_bytes = sum(map(local_bytes, jax.tree.leaves(arrays)))
        yield from (half.memory_analysis().alias_size_in_bytes >= num_bytes for half in halves.values())


def _without_single_row(**limits) -> Ladder:
    """The ladder that it would be, but a row that decodes alone takes the bucket of two."""
    _, *others = make_ladder(**limits).buckets
    return Ladder(buckets=tuple(others))


def assert_same(family: str, mesh: str, one: dict, many: dict) -> None:
    """Tokens are equal, and logits agree to 1e-5 of the largest.

    Log-probabilities are differences of logits, and on one device another bucket moves them as much.
    """
    with np.load(GOLDENS / family / "golden.npz") as golden:
        error = 1e-5 * np.abs(golden["last_logits"]).max()
    for what in ("tokens", "fingerprint"):
        assert many[what] == one[what], f"{what} on {mesh}"
    for entry, expected in zip(many["logprobs"], one["logprobs"], strict=True):
        assert [token for token, _ in entry] == [token for token, _ in expected], mesh
        np.testing.assert_allclose([p for _, p in entry], [p for _, p in expected], rtol=0, atol=error, err_msg=mesh)
    assert one["cached"][2:] == [32, 0, 39], "the third prompt hits the first one's blocks, the last repeats it whole"
    if MeshShape.parse(mesh).dp == 1:
        assert many["cached"] == one["cached"], mesh
    else:
        assert many["cached"][2] == 32 and many["cached"][4] >= 16, (
            "those who hit run where the blocks are, or the scored"
        )
    assert (one["cached_from_disk"], many["cached_from_disk"]) == (0, 39), (
        "blocks and hidden states are the same on every mesh"
    )
    assert one["preemptions"] and many["preemptions"], mesh
    assert many["pools_are_aliased"], mesh
    for unexpected in (*one["unexpected_collectives"], *many["unexpected_collectives"]):
        assert not unexpected, "\n".join((mesh, *unexpected))
