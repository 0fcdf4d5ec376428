"""Sounds beside prompts: encoded once, found by content, shared by choices, and gone again without a trace."""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import numpy as np
import pytest

from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.prompt import MediaSpan
from ferrum_jax.runtime.compile.compile import CompileCounter
from ferrum_jax.sampling_params import SamplingParams
from tests.engine.golden_media import Picture, run
from tests.support import GOLDENS, SMALL, finish, fresh_engine, small_llm, step

FOLDER = "hearing/whisper"
LADDER = dataclasses.replace(SMALL, max_model_len=128)
CONFIG = dataclasses.replace(LADDER, max_num_batched_tokens=64, invariant=True)
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
POSITIONS = 37


@functools.cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / FOLDER / "golden.npz"))


def asked(prompt: int, *, sound: int | None = None, params: SamplingParams = GREEDY, **options):
    """A golden prompt with a golden sound, its own by default."""
    sound = prompt if sound is None else sound
    frames = golden()[f"frames_{sound}"]
    digest = hashlib.blake2b(frames).digest()
    clip = Picture(
        patches=frames, grid=(1, len(frames), 1), num_tokens=0, digest=digest, kind="audio", seconds=len(frames) / 100
    )
    span = MediaSpan(kind="audio", digest=clip.digest, start=0, length=1)
    ids = golden()[f"prompt_{prompt}"].tolist()
    return ids, params, RequestOptions(media=[span], images=[clip], key=f"{prompt} {sound}", **options)


def engine_of(config=CONFIG, **overrides):
    return fresh_engine(small_llm(FOLDER, config), **overrides)


def tokens_of(output) -> list[int]:
    return list(output.outputs[0].token_ids)


def wanted(prompt: int) -> list[int]:
    return golden()[f"tokens_{prompt}"].tolist()


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(LADDER, block_size=8),
        pytest.param(dataclasses.replace(LADDER, block_size=64), marks=pytest.mark.slow),
    ],
    ids=["", "ladder", "a block a sound"],
)
def test_tokens_beside_sounds_are_the_reference_s(config):
    engine = engine_of(config)
    outputs = run(engine, *(asked(prompt) for prompt in range(3)))
    assert [tokens_of(output) for output in outputs] == [wanted(prompt) for prompt in range(3)]
    counts = engine.counts()
    assert counts["sounds_encoded"] == 3 and counts["encoder_calls"] == 3 and counts["image_runs_live"] == 0


def test_a_sound_that_was_there_before_is_not_encoded_again_and_its_prompt_hits():
    engine = engine_of()
    run(engine, asked(2))
    (again,) = run(engine, asked(2))
    assert tokens_of(again) == wanted(2) and again.num_cached_tokens == len(again.prompt_token_ids)
    counts = engine.counts()
    assert counts["sounds_encoded"] == 1 and counts["sound_hits"] == 1 and counts["images_encoded"] == 0
    assert counts["sound_s"] == pytest.approx(2 * asked(2)[2].images[0].seconds, abs=1e-3)


def test_the_same_prompt_beside_another_sound_hits_nothing():
    engine = engine_of()
    run(engine, asked(2))
    (other,) = run(engine, asked(2, sound=1))
    assert other.num_cached_tokens == 0 and tokens_of(other) != wanted(2)
    assert engine.counts()["sounds_encoded"] == 2


def test_choices_share_a_sound_and_the_first_is_the_greedy_one():
    params = dataclasses.replace(GREEDY, n=3, temperature=0.8, seed=5)
    engine = engine_of()
    (output,) = run(engine, asked(0, params=params))
    assert engine.counts()["sounds_encoded"] == 1 and len({choice.token_ids for choice in output.outputs}) == 3
    (alone,) = run(engine_of(), asked(0, params=params))
    assert [choice.token_ids for choice in alone.outputs] == [choice.token_ids for choice in output.outputs]


def test_more_sounds_than_slots_wait_and_every_answer_stays_the_same():
    engine = engine_of(num_blocks=24)
    mixed = [asked(prompt, sound=sound) for prompt in (0, 2) for sound in (0, 1, 2)] * 2
    together = [tokens_of(output) for output in run(engine, *mixed)]
    alone = [tokens_of(run(engine_of(), request)[0]) for request in mixed[:6]]
    assert together == alone * 2
    counts = engine.counts()
    assert counts["image_runs_live"] == 0 and counts["sounds_encoded"] + counts["sound_hits"] >= 12
    engine.scheduler.check_invariants()


def test_a_row_that_is_aborted_gives_its_sound_back():
    engine = engine_of()
    number = engine.add(*asked(0))
    for _ in range(4):
        step(engine)
    assert engine.counts()["image_runs_live"] == 1
    engine.abort(number)
    finish(engine)
    assert engine.counts()["image_runs_live"] == 0
    (again,) = run(engine, asked(0))
    assert tokens_of(again) == wanted(0)


def test_no_step_compiles_anything():
    engine = engine_of()
    counter = CompileCounter()
    run(engine, *(asked(prompt) for prompt in range(3)))
    assert counter.count == 0


def test_what_is_no_sound_of_the_model_is_refused_by_name():
    engine = engine_of()
    ids, params, options = asked(0)
    with pytest.raises(ValueError, match="0 sounds, and this model transcribes one"):
        engine.add(ids, params, RequestOptions())
    with pytest.raises(ValueError, match="2 sounds"):
        engine.add(ids, params, dataclasses.replace(options, images=[*options.images] * 2))
    short = dataclasses.replace(options.images[0], grid=(1, 10, 1), patches=options.images[0].patches[:10])
    with pytest.raises(ValueError, match=f"10 frames, and the model's encoder takes {2 * POSITIONS}"):
        engine.add(ids, params, dataclasses.replace(options, images=[short]))
    with pytest.raises(ValueError, match="not its own"):
        engine.add(ids, params, dataclasses.replace(options, media=[]))
