"""Sounds in prompts: runs of embedding slots as images are, encoded once, kept by content and cut anywhere."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ferrum_jax.asked.options import RequestOptions
from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.executables.compile import CompileCounter
from ferrum_jax.ints import ceil_div
from ferrum_jax.prompt import MediaSpan
from ferrum_jax.sound.clip import ProcessedClip
from tests.engine import test_images as images
from tests.engine.test_images import engine_of, run
from tests.models.sound_goldens import QWEN, VOXTRAL, clips_of, load
from tests.support import finish

AUDIO, START, END = 150, 152, 153
GREEDY = SamplingParams(
    max_tokens=64, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(range(AUDIO, 154), float("-inf"))
)
LADDER = dataclasses.replace(images.LADDER, max_image_patches=500)
CONFIG = dataclasses.replace(images.CONFIG, max_image_patches=500)
EACH_CONFIG = pytest.mark.parametrize(
    "config", [CONFIG, pytest.param(LADDER, marks=pytest.mark.slow)], ids=["", "ladder"]
)


def asked(
    prompt: int, *, louder: float = 0.0, name: str = QWEN, **options
) -> tuple[list[int], SamplingParams, RequestOptions]:
    """A golden prompt, its parameters and its sounds. louder: than the golden's, which makes others of them."""
    ids = load(name)[2][f"prompt_{prompt}"].tolist()
    clips = clips_of(prompt, louder=louder, name=name)
    starts = [at + 1 for at, token in enumerate(ids) if token == START]
    media = [
        MediaSpan(kind="audio", digest=clip.digest, start=start, length=clip.num_tokens)
        for start, clip in zip(starts, clips, strict=True)
    ]
    return ids, GREEDY, RequestOptions(media=media, images=clips, key=str(prompt), **options)


def hearing(config=CONFIG, *, name: str = QWEN, **overrides):
    return engine_of(config, folder=f"hearing/{name}", **overrides)


def assert_golden(output, prompt: int, name: str = QWEN) -> None:
    assert list(output.token_ids) == load(name)[2][f"tokens_{prompt}"].tolist()


@EACH_CONFIG
@pytest.mark.parametrize("name", [QWEN, VOXTRAL])
def test_tokens_after_sounds_are_the_reference_s(config, name):
    engine = hearing(config, name=name)
    for prompt, output in enumerate(run(engine, *(asked(prompt, name=name) for prompt in range(3)))):
        assert_golden(output, prompt, name)
    counts = engine.counts()
    assert counts["sounds_encoded"] == 3 and counts["sound_hits"] == 0 and counts["image_runs_live"] == 0
    assert counts["encoder_calls"] <= 3


def test_a_sound_that_was_there_before_is_not_encoded_again_and_its_blocks_hit():
    engine = hearing()
    run(engine, asked(2))
    before = engine.counts()
    (output,) = run(engine, asked(2))
    assert_golden(output, 2)
    assert engine.counts()["encoder_calls"] == before["encoder_calls"]
    assert output.num_cached_tokens == len(output.prompt_token_ids) and output.num_cached_media == 2


def test_the_same_text_with_another_sound_hits_nothing_behind_it():
    engine = hearing()
    (first,) = run(engine, asked(1))
    (other,) = run(engine, asked(1, louder=0.5))
    assert other.num_cached_tokens == 0 and other.token_ids != first.token_ids
    assert engine.counts()["sounds_encoded"] == 2


def test_a_kept_sound_is_not_encoded_again_for_another_prompt():
    engine = hearing(enable_prefix_caching=False)
    run(engine, asked(1))
    ids, params, options = asked(1)
    shifted = [dataclasses.replace(span, start=span.start + 1) for span in options.media]
    run(engine, ([7, *ids], params, dataclasses.replace(options, media=shifted)))
    counts = engine.counts()
    assert counts["sounds_encoded"] == 1 and counts["sound_hits"] == 1 and counts["encoder_calls"] == 1


@pytest.mark.parametrize("budget", [4, 7])
def test_a_sound_may_be_cut_by_a_chunk_anywhere(budget):
    engine = hearing(max_num_batched_tokens=budget)
    for prompt, output in zip((2, 1), run(engine, asked(2), asked(1)), strict=True):
        assert_golden(output, prompt)


def test_a_prompt_that_is_preempted_around_its_sounds_gives_the_same_tokens():
    engine = hearing(num_blocks=9)
    outputs = run(engine, *(asked(prompt) for prompt in (1, 2, 0)))
    assert engine.scheduler.metrics().preemptions > 0
    for prompt, output in zip((1, 2, 0), outputs, strict=True):
        assert_golden(output, prompt)


def test_an_evicted_sound_is_encoded_again():
    engine = hearing(enable_prefix_caching=False)
    run(engine, asked(1))
    for louder in (0.1, 0.2):
        run(engine, asked(1, louder=louder))
    assert engine.counts()["image_evictions"] > 0
    (again,) = run(engine, asked(1))
    assert_golden(again, 1)


def test_no_step_compiles_whatever_lengths_sounds_have():
    engine, rng = hearing(enable_prefix_caching=False), np.random.default_rng(3)
    for number in range(40):
        length = int(rng.integers(1, 400))
        frames = rng.normal(size=(ceil_div(length, 100) * 100, 10)).astype(np.float32)
        count = length // 100 * 13 + ceil_div(length % 100, 8)
        clip = ProcessedClip(
            features=frames,
            grid=(1, len(frames), 1),
            num_frames=length,
            num_tokens=count,
            seconds=1.0,
            digest=b"%d" % number,
        )
        span = MediaSpan(kind="audio", digest=clip.digest, start=2, length=count)
        params = SamplingParams(max_tokens=2, temperature=0.0)
        prompt = [7, START, *[AUDIO] * count, END]
        engine.add(prompt, params, RequestOptions(media=[span], images=[clip], key=str(number)))
    counter = CompileCounter()
    finish(engine)
    assert counter.count == 0 and engine.counts()["sounds_encoded"] == 40


def test_what_is_no_sound_of_the_model_is_refused_by_name():
    engine = hearing()
    ids, params, options = asked(1)
    (clip,) = options.images

    def refused(said: str, **changes) -> None:
        with pytest.raises(ValueError, match=said):
            engine.add(ids, params, dataclasses.replace(options, **changes))

    refused("media spans of kind 'audio' and no sounds, .* give the sounds", images=[])
    refused("not those of the sounds; give one for each", images=[dataclasses.replace(clip, digest=b"other")])
    span = options.media[0]
    few = dataclasses.replace(clip, num_tokens=13)
    refused(
        "sound 0 has 13 tokens and 400 frames, and the model makes up to 13 tokens of 100 frames",
        images=[few],
        media=[dataclasses.replace(span, length=13)],
    )
    with pytest.raises(ValueError, match="sound 0 has 400 frames, and max_image_patches is 200; give a shorter sound"):
        hearing(dataclasses.replace(CONFIG, max_image_patches=200)).add(ids, params, options)
    small = dataclasses.replace(CONFIG, max_image_tokens=32)
    with pytest.raises(
        ValueError, match="sounds take 48 tokens, and the engine keeps those of 32; give fewer or short"
    ):
        hearing(small).add(ids, params, options)
