"""Images in prompts: encoded once, cached by content, cut anywhere, and gone again without a trace."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math

import numpy as np
import pytest

from ferrum_jax.asked.options import RequestOptions
from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.engine.image_intake import ImageLimits, placed_images
from ferrum_jax.executables.compile import CompileCounter
from ferrum_jax.prompt import MediaSpan
from ferrum_jax.startup.build_engine import build_engine
from tests.support import GOLDENS, SMALL, finish, small_llm, step

FOLDER = "vision/qwen3_vl"
HYBRID = "vision/qwen3_5_vision"  # whose recurrent states resume where a snapshot was taken
GLM = ("vision/glm4v", "vision/glm4v_moe")  # whose rotary sections stand one after the other
IMAGE, START = 150, 152
LADDER = dataclasses.replace(SMALL, max_image_tokens=64, max_image_patches=256)
CONFIG = dataclasses.replace(LADDER, max_num_batched_tokens=64, invariant=True)  # one bucket
EACH_CONFIG = pytest.mark.parametrize(
    "config", [CONFIG, pytest.param(LADDER, marks=pytest.mark.slow)], ids=["", "ladder"]
)
GREEDY = SamplingParams(
    max_tokens=64, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(range(IMAGE, 154), float("-inf"))
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """An image as a processor makes it."""

    patches: np.ndarray
    grid: tuple[int, int, int]
    num_tokens: int
    digest: bytes
    kind: str = "image"
    seconds: float = 0.0


@functools.cache
def golden(folder: str = FOLDER) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / folder / "golden.npz"))


def asked(
    prompt: int, *, brighter: float = 0.0, folder: str = FOLDER, per_token: int = 4, breaks: bool = False, **options
) -> tuple[list[int], SamplingParams, RequestOptions]:
    """A golden prompt, its parameters and its images. brighter: than the golden's, which makes others of them.
    per_token: patches. breaks: whether a token of text stands between two rows of an image's."""
    of_folder = golden(folder)
    ids = of_folder[f"prompt_{prompt}"].tolist()
    starts = [at + 1 for at, token in enumerate(ids) if token == START]
    images, at = [], 0
    for t, h, w in of_folder[f"grids_{prompt}"].tolist():
        pixels = of_folder[f"patches_{prompt}"][at : at + t * h * w] + np.float32(brighter)
        digest = hashlib.blake2b(pixels.tobytes()).digest()
        count = t * h * w // per_token + (h // math.isqrt(per_token) - 1) * breaks
        images.append(Picture(patches=pixels, grid=(t, h, w), num_tokens=count, digest=digest))
        at += t * h * w
    media = [
        MediaSpan(kind="image", digest=image.digest, start=start, length=image.num_tokens)
        for start, image in zip(starts, images, strict=True)
    ]
    return ids, GREEDY, RequestOptions(media=media, images=images, key=str(prompt), **options)


def engine_of(config=CONFIG, *, folder: str = FOLDER, **overrides):
    llm = small_llm(folder, config)
    return build_engine(llm.loaded, dataclasses.replace(llm.config, **overrides), llm.tokenizer, fill=float("nan"))


def run(engine, *requests):
    """(token ids) of requests that run together."""
    ids = [engine.add(*request) for request in requests]
    outputs = finish(engine)
    return [outputs[i] for i in ids]


def assert_golden(output, prompt: int, folder: str = FOLDER) -> None:
    assert list(output.token_ids) == golden(folder)[f"tokens_{prompt}"].tolist()


@EACH_CONFIG
@pytest.mark.parametrize("folder", [FOLDER, *(pytest.param(name, marks=pytest.mark.slow) for name in (HYBRID, *GLM))])
def test_tokens_after_images_are_the_reference_s(config, folder):
    engine = engine_of(config, folder=folder)
    for prompt, output in enumerate(run(engine, *(asked(prompt, folder=folder) for prompt in range(3)))):
        assert_golden(output, prompt, folder)
    counts = engine.counts()
    assert counts["images_encoded"] == 4 and counts["image_hits"] == 0 and counts["image_runs_live"] == 0
    assert counts["encoder_calls"] <= 4


def test_an_image_that_was_there_before_is_not_encoded_again_and_its_blocks_hit():
    engine = engine_of()
    run(engine, asked(2))
    before = engine.counts()
    (output,) = run(engine, asked(2))
    assert_golden(output, 2)
    after = engine.counts()
    assert after["encoder_calls"] == before["encoder_calls"] and after["images_encoded"] == before["images_encoded"]
    assert output.num_cached_tokens == len(output.prompt_token_ids)
    assert output.num_cached_media == 3


def test_the_same_text_with_another_image_hits_nothing_behind_it():
    engine = engine_of()
    (first,) = run(engine, asked(1))
    (other,) = run(engine, asked(1, brighter=0.5))
    assert other.num_cached_tokens == 0 and other.token_ids != first.token_ids
    assert engine.counts()["images_encoded"] == 2


def test_a_kept_image_is_not_encoded_again_for_another_prompt():
    engine = engine_of(enable_prefix_caching=False)
    run(engine, asked(1))
    ids, params, options = asked(1)
    shifted = [dataclasses.replace(span, start=span.start + 1) for span in options.media]
    run(engine, ([7, *ids], params, dataclasses.replace(options, media=shifted)))
    counts = engine.counts()
    assert counts["images_encoded"] == 1 and counts["image_hits"] == 1 and counts["encoder_calls"] == 1


@pytest.mark.parametrize("budget", [4, 5, 7, 11])
def test_an_image_may_be_cut_by_a_chunk_anywhere(budget):
    engine = engine_of(max_num_batched_tokens=budget)
    for prompt, output in zip((2, 1), run(engine, asked(2), asked(1)), strict=True):
        assert_golden(output, prompt)


@pytest.mark.parametrize("caches", [True, False])
def test_a_prompt_that_is_preempted_around_its_images_gives_the_same_tokens(caches):
    engine = engine_of(num_blocks=9, enable_prefix_caching=caches)
    outputs = run(engine, *(asked(prompt) for prompt in (1, 2, 0)))
    assert engine.scheduler.metrics().preemptions > 0
    for prompt, output in zip((1, 2, 0), outputs, strict=True):
        assert_golden(output, prompt)


def test_an_image_that_was_evicted_is_encoded_again():
    engine = engine_of(enable_prefix_caching=False)
    run(engine, asked(2))
    for brighter in (0.1, 0.2):
        run(engine, asked(2, brighter=brighter))
    assert engine.counts()["image_evictions"] > 0
    before = engine.counts()["images_encoded"]
    assert_golden(run(engine, asked(2))[0], 2)
    assert engine.counts()["images_encoded"] == before + 3


def test_prompts_whose_images_wait_do_not_hold_up_others():
    engine = engine_of(enable_prefix_caching=False, max_num_batched_tokens=8)
    waiting = [engine.add(*asked(2, brighter=0.1 * k)) for k in range(1, 4)]
    text, last = engine.add(*asked(0)), engine.add(*asked(2))
    outputs, order = {}, []
    while engine.has_unfinished:
        for output in step(engine):
            outputs[output.request_id] = output
            order.append(output.request_id)
        engine.scheduler.check_invariants()
    assert_golden(outputs[text], 0)
    assert_golden(outputs[last], 2)
    assert order.index(text) < order.index(waiting[-1]), "a prompt of text passed one whose images waited"


def test_a_request_that_is_aborted_gives_its_images_back():
    engine = engine_of(max_num_batched_tokens=4)
    ids = [engine.add(*asked(2, brighter=0.1 * k)) for k in range(4)]
    for steps in range(6):
        engine.step()
        engine.scheduler.check_invariants()
        if steps % 2:
            engine.abort(ids.pop())
    for submission in ids:
        engine.abort(submission)
    engine.drain()
    engine.scheduler.check_invariants()
    assert engine.counts()["image_runs_live"] == 0
    assert_golden(run(engine, asked(2))[0], 2)


@pytest.mark.slow
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize(
    ("folder", "budget", "num_blocks"),
    [*((HYBRID, *sizes) for sizes in ((5, 80), (16, 80), (11, 9))), (GLM[0], 5, 80), (GLM[0], 11, 9), (GLM[1], 7, 9)],
)
def test_images_of_other_families_are_cut_hit_and_preempted(folder, budget, num_blocks, caches):
    sizes = {"max_num_batched_tokens": budget, "num_blocks": num_blocks, "enable_prefix_caching": caches}
    engine = engine_of(folder=folder, **sizes)
    for _ in range(2):
        for prompt, output in zip((2, 1, 0), run(engine, *(asked(p, folder=folder) for p in (2, 1, 0))), strict=True):
            assert_golden(output, prompt, folder)
    other = run(engine, asked(2, brighter=0.5, folder=folder))
    again = run(engine_of(folder=folder), asked(2, brighter=0.5, folder=folder))
    assert other[0].token_ids == again[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("folder", [FOLDER, HYBRID, GLM[0]])
def test_bits_do_not_depend_on_companions_chunks_preemption_or_found_images(folder):
    def said(prompts, **sizes):
        engine = engine_of(folder=folder, **sizes)
        params = dataclasses.replace(GREEDY, logprobs=1, max_tokens=24)
        requests = [(ids, params, options) for ids, _, options in (asked(p, folder=folder) for p in prompts)]
        outputs = [*run(engine, *requests), *run(engine, *requests)]
        return [[next(iter(entry.values())).logprob for entry in o.outputs[0].logprobs] for o in outputs]

    alone, again = said([2])
    assert alone == again
    for sizes in ({}, {"max_num_batched_tokens": 7}, {"num_blocks": 9}, {"enable_prefix_caching": False}):
        together = said([1, 2, 0], **sizes)
        assert together[1] == together[4] == alone, sizes


def test_choices_of_a_prompt_share_its_images():
    engine = engine_of()
    ids, params, options = asked(1)
    (output,) = run(engine, (ids, dataclasses.replace(params, n=3), options))
    assert {choice.token_ids for choice in output.outputs} == {tuple(golden()["tokens_1"].tolist())}
    assert engine.counts()["images_encoded"] == 1


def test_images_and_spans_that_do_not_belong_together_are_refused():
    ids, params, options = asked(2)
    engine = engine_of()
    swapped = [options.images[1], options.images[0], options.images[2]]
    for changed in ({"images": swapped}, {"images": options.images[:2]}, {"images": []}):
        with pytest.raises(ValueError, match="media spans of kind 'image'"):
            engine.add(ids, params, dataclasses.replace(options, **changed))
    assert not engine.has_unfinished


def test_a_prompt_whose_images_are_cut_off_runs_without_them():
    ids, params, options = asked(2)
    engine = engine_of()
    run(engine, (ids, dataclasses.replace(params, truncate_prompt_tokens=27), options))
    assert engine.counts()["images_encoded"] == 1, "the last image alone is left"


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_tokens": 32}, "take 48 tokens, and the engine keeps those of 32; .* raise max_image_tokens"),
        ({"max_patches": 40}, "image 2 has 60 patches, and max_image_patches is 40"),
        ({"max_tokens": 0}, "this model takes none"),
    ],
)
def test_what_there_is_no_room_for_is_refused_with_both_numbers(limits, said):
    _, _, options = asked(2)
    room = ImageLimits(**({"max_tokens": 48, "max_patches": 60, "merge": 2, "chunk": (4, 1)} | limits))
    with pytest.raises(ValueError, match=said):
        placed_images(options.images, options.media, room)


@EACH_CONFIG
def test_no_step_compiles_whatever_sizes_images_have(config):
    llm = small_llm(FOLDER, config)
    engine, rng = engine_of(config, enable_prefix_caching=False), np.random.default_rng(3)
    before = llm.stats()["compiles_after_ready"]
    for number in range(200):
        rows, columns = (2 * int(n) for n in rng.integers(1, 7, 2))
        pixels = rng.uniform(-1, 1, (rows * columns, 96)).astype(np.float32)
        image = Picture(patches=pixels, grid=(1, rows, columns), num_tokens=rows * columns // 4, digest=b"%d" % number)
        text = rng.integers(6, 150, int(rng.integers(1, 9))).tolist()
        span = MediaSpan(kind="image", digest=image.digest, start=len(text) + 1, length=image.num_tokens)
        prompt = [*text, START, *[IMAGE] * image.num_tokens, 153]
        params = SamplingParams(max_tokens=2, temperature=0.0)
        engine.add(prompt, params, RequestOptions(media=[span], images=[image], key=str(number)))
    counter = CompileCounter()
    finish(engine)
    assert counter.count == 0 and llm.stats()["compiles_after_ready"] == before
    assert engine.counts()["images_encoded"] == 200
