"""Images whose tokens see each other: no chunk ends inside one, and hits may."""

import dataclasses

import numpy as np
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.core.request_options import RequestOptions
from tests.engine import golden_media as media
from tests.engine.image_folder import GEMMA3_PROCESSOR, picture, write_folder
from tests.rows import rows_beside
from tests.support import GOLDENS, SMALL, small_llm

TOKENS, PATCHES = 16, 144
CONFIG = media.FAMILIES[media.GEMMA3].config


def chunks_of(engine):
    """(request, where the chunk ends) of all chunks that the engine plans from now on."""
    seen = []
    schedule = engine.scheduler.schedule

    def watched():
        plan = schedule()
        for part in () if plan is None else engine.scheduler._in_flight[-1][1]:
            seen.extend(zip(part.requests, (part.plan.starts + part.plan.counts).tolist(), strict=True))
        return plan

    engine.scheduler.schedule = watched
    return seen


@pytest.mark.parametrize(
    ("folder", "budget", "rows"),
    [
        (media.GEMMA3, 19, 4),
        *(pytest.param(media.GEMMA3, *sizes, marks=pytest.mark.slow) for sizes in ((16, 1), (17, 2), (23, 4), (32, 4))),
        pytest.param(media.GEMMA4, 13, 4, marks=pytest.mark.slow),
    ],
)
def test_no_chunk_ends_inside_an_image_and_tokens_are_the_reference_s(folder, budget, rows):
    engine = media.engine_of(folder=folder, max_num_batched_tokens=budget, max_num_seqs=rows)
    ends = chunks_of(engine)
    media.assert_goldens(engine, (2, 1, 0, 2), folder)
    cut = [(r.id, end) for r, end in ends if any(image.start < end < image.end for image in r.images)]
    assert not cut and sum(len(r.images) > 0 for r, _ in ends) > 0


@pytest.mark.slow
def test_an_image_that_no_step_holds_is_refused():
    narrow = media.engine_of(folder=media.GEMMA4, max_num_batched_tokens=12)
    with pytest.raises(ValueError, match=r"image 2 has 10 tokens, which see each other .* room for 9"):
        narrow.add(*media.asked(2, folder=media.GEMMA4))


@pytest.mark.slow
def test_another_question_about_an_image_hits_as_a_text_would():
    """The last block of the image holds the question too; the rest of its blocks hit."""
    engine = media.engine_of(folder=media.GEMMA3, max_cached_prompts=0)
    ids, params, options = media.asked(1, folder=media.GEMMA3)
    media.run(engine, (ids, params, options))
    calls = engine.counts()["encoder_calls"]
    end = options.media[0].end
    other = [*ids[: end + 1], *[7, 8, 9, 10, 11]]
    (found,) = media.run(engine, (other, params, options))
    (wanted,) = media.run(media.engine_of(folder=media.GEMMA3, enable_prefix_caching=False), (other, params, options))
    assert found.num_cached_tokens == (end + 1) // SMALL.block_size * SMALL.block_size
    assert options.media[0].start < found.num_cached_tokens
    assert found.token_ids == wanted.token_ids and engine.counts()["encoder_calls"] == calls


def test_a_hit_may_end_inside_an_image_whose_last_tokens_see_what_was_cached():
    engine = media.engine_of(folder=media.GEMMA3, max_cached_prompts=0)
    ids, params, options = media.asked(1, folder=media.GEMMA3)
    shifted = [dataclasses.replace(span, start=span.start + 1) for span in options.media]
    longer = (([3, *ids]), params, dataclasses.replace(options, media=shifted))
    inside = (shifted[0].end // SMALL.block_size) * SMALL.block_size
    assert shifted[0].start < inside < shifted[0].end
    media.run(engine, longer)
    other = ([3, *ids[: options.media[0].end], 9, 9, 9], params, longer[2])
    (found,) = media.run(engine, other)
    (wanted,) = media.run(media.engine_of(folder=media.GEMMA3, enable_prefix_caching=False), other)
    assert found.num_cached_tokens == inside and found.token_ids == wanted.token_ids


@pytest.mark.parametrize(("change", "said"), rows_beside(__file__)["sizes that hold no image are refused at the start"])
def test_sizes_that_hold_no_image_are_refused_at_the_start(change, said):
    with pytest.raises(ValueError, match=said):
        LLM(str(GOLDENS / media.GEMMA3), dataclasses.replace(CONFIG, **change))


def test_an_image_of_another_grid_is_refused():
    ids, params, options = media.asked(1, folder=media.GEMMA3)
    image = dataclasses.replace(options.images[0], grid=(1, 8, 18))
    with pytest.raises(ValueError, match=r"image 0 has a grid of \(1, 8, 18\) patches"):
        media.engine_of(folder=media.GEMMA3).add(ids, params, dataclasses.replace(options, images=[image]))


@pytest.mark.slow
def test_a_picture_in_a_chat_has_the_tokens_that_the_reference_gives_it(tmp_path):
    llm = LLM(str(write_folder(tmp_path / "model", "gemma3_vision")), CONFIG)
    content = [{"type": "text", "text": "t7 "}, {"type": "image", "image": picture(1)}, {"type": "text", "text": " t9"}]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    (first,) = llm.chat([{"role": "user", "content": content}], params)
    assert first.prompt_token_ids == (7, 152, *[150] * TOKENS, 153, 9, 5)
    before = llm.stats()["encoder_calls"]
    (again,) = llm.generate({"prompt": "t7 <start_of_image> t9 t5", "images": [picture(1)]}, params)
    assert again.token_ids == first.token_ids and llm.stats()["encoder_calls"] == before
    assert GEMMA3_PROCESSOR["image_seq_length"] == TOKENS


@pytest.mark.slow
def test_text_alone_through_the_same_folder_is_what_it_is_without_a_tower():
    ids, params, _ = media.asked(0, folder=media.GEMMA3)
    text = (ids, params, RequestOptions(key="0"))
    (sees,) = media.run(media.engine_of(folder=media.GEMMA3), text)
    blind = LLM(str(GOLDENS / media.GEMMA3), dataclasses.replace(CONFIG, max_image_tokens=0))
    (output,) = blind.generate([ids], params)
    assert output.token_ids == sees.token_ids == tuple(media.golden(media.GEMMA3)["tokens_0"].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, media.FAMILIES[media.GEMMA3].ladder], ids=["", "ladder"])
def test_no_step_compiles_whatever_stands_beside_images(config):
    rng, requests, before = (
        np.random.default_rng(3),
        [],
        small_llm(media.GEMMA3, config).stats()["compiles_after_ready"],
    )
    for number in range(40):
        pixels = rng.uniform(-1, 1, (PATCHES, 48)).astype(np.float32)
        image = media.Picture(patches=pixels, grid=(1, 12, 12), num_tokens=TOKENS, digest=b"%d" % number)
        left, right = (rng.integers(6, 150, int(n)).tolist() for n in rng.integers(1, 9, 2))
        requests.append(([*left, 152, *[150] * TOKENS, 153, *right], image, "image"))
    media.check_compiles_nothing(media.engine_of(config, folder=media.GEMMA3, enable_prefix_caching=False), requests)
    assert small_llm(media.GEMMA3, config).stats()["compiles_after_ready"] == before
