"""Sounds beside prompts: shared by choices, waited for, and gone again without a trace; see test_media.py too."""

import dataclasses

import pytest

from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.runtime.compile.compile import CompileCounter
from tests.engine.golden_media import FAMILIES, WHISPER, asked, assert_golden, assert_goldens, engine_of, run
from tests.marks import slow
from tests.support import finish, step

CONFIG, LADDER = FAMILIES[WHISPER].config, FAMILIES[WHISPER].ladder
POSITIONS = 37


@pytest.mark.usefixtures("compiles_at_start")
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        *(slow(dataclasses.replace(LADDER, block_size=size)) for size in (8, 64)),
    ],
    ids=["", "ladder", "a block a sound"],
)
def test_tokens_beside_sounds_are_the_reference_s_and_no_step_compiles(config):
    engine, counter = engine_of(config, folder=WHISPER), CompileCounter()
    assert_goldens(engine, range(3), WHISPER)
    counts = engine.counts()
    assert counts["sounds_encoded"] == 3 and counts["encoder_calls"] == 3 and counts["image_runs_live"] == 0
    assert_goldens(engine, [2], WHISPER)
    counts = engine.counts()
    assert counts["sounds_encoded"] == 3 and counts["sound_hits"] == 1 and counts["images_encoded"] == 0
    seconds = [asked(prompt, folder=WHISPER)[2].images[0].seconds for prompt in (0, 1, 2, 2)]
    assert counts["sound_s"] == pytest.approx(sum(seconds), abs=1e-3) and counter.count == 0


def beside(prompt: int, sound: int):
    """A golden prompt with the sound of one."""
    return *asked(prompt, folder=WHISPER)[:2], asked(sound, folder=WHISPER)[2]


def test_the_same_prompt_beside_another_sound_hits_nothing():
    engine = engine_of(folder=WHISPER)
    (own,), (other,) = run(engine, beside(2, 2)), run(engine, beside(2, 1))
    assert other.num_cached_tokens == 0 and other.token_ids != own.token_ids
    assert engine.counts()["sounds_encoded"] == 2


def test_choices_share_a_sound_and_the_first_is_the_greedy_one():
    ids, params, options = asked(0, folder=WHISPER)
    several = ids, dataclasses.replace(params, n=3, temperature=0.8, seed=5), options
    engine = engine_of(folder=WHISPER)
    (output,) = run(engine, several)
    assert engine.counts()["sounds_encoded"] == 1 and len({choice.token_ids for choice in output.outputs}) == 3
    (alone,) = run(engine_of(folder=WHISPER), several)
    assert [choice.token_ids for choice in alone.outputs] == [choice.token_ids for choice in output.outputs]


def test_more_sounds_than_slots_wait_and_every_answer_stays_the_same():
    engine = engine_of(folder=WHISPER, num_blocks=24)
    mixed = [beside(prompt, sound) for prompt in (0, 2) for sound in (0, 1, 2)] * 2
    together = [output.token_ids for output in run(engine, *mixed)]
    alone = [run(engine_of(folder=WHISPER), request)[0].token_ids for request in mixed[:6]]
    assert together == alone * 2
    counts = engine.counts()
    assert counts["image_runs_live"] == 0 and counts["sounds_encoded"] + counts["sound_hits"] >= 12
    engine.scheduler.check_invariants()


def test_a_row_that_is_aborted_gives_its_sound_back():
    engine = engine_of(folder=WHISPER)
    number = engine.add(*asked(0, folder=WHISPER))
    for _ in range(4):
        step(engine)
    assert engine.counts()["image_runs_live"] == 1
    engine.abort(number)
    finish(engine)
    assert engine.counts()["image_runs_live"] == 0
    assert_golden(run(engine, asked(0, folder=WHISPER))[0], 0, WHISPER)


def test_what_is_no_sound_of_the_model_is_refused_by_name():
    engine = engine_of(folder=WHISPER)
    ids, params, options = asked(0, folder=WHISPER)
    with pytest.raises(ValueError, match="0 sounds, and this model transcribes one"):
        engine.add(ids, params, RequestOptions())
    with pytest.raises(ValueError, match="2 sounds"):
        engine.add(ids, params, dataclasses.replace(options, images=[*options.images] * 2))
    short = dataclasses.replace(options.images[0], grid=(1, 10, 1), patches=options.images[0].patches[:10])
    with pytest.raises(ValueError, match=f"10 frames, and the model's encoder takes {2 * POSITIONS}"):
        engine.add(ids, params, dataclasses.replace(options, images=[short]))
    with pytest.raises(ValueError, match="not its own"):
        engine.add(ids, params, dataclasses.replace(options, media=[]))
