"""Placeholders become the reference's token ids, time stamps of videos and all, and positions those of its M-RoPE."""

import dataclasses

import numpy as np
import pytest

from ferrum_jax.inputs.images.placeholders import GEMMA3, GEMMA4, GLM, PIXTRAL, QWEN, expand_ids, expand_text, parts_of
from ferrum_jax.inputs.images.processor_files import processor_of
from ferrum_jax.inputs.prompt import PlacedImage, rope_positions, rope_shift
from ferrum_jax.text.tokenizer import Tokenizer
from scripts import make_image_goldens as maker
from scripts.goldens import video_folder
from scripts.goldens.pictures import picture
from scripts.goldens.video_folder import SHOWN, films_of, wrapped_twice
from scripts.goldens.video_folder import images_of as images_shown
from scripts.make_image_goldens import GEMMA4 as GEMMA4_FILE
from tests.vision.test_processors import FOLDER, golden
from tests.vision.test_video_processors import golden as film_golden
from tests.vision.test_video_processors import processed

TOKENIZER = Tokenizer.load(FOLDER)
assert TOKENIZER is not None


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def images_of(settings, sizes):
    processor = processor_of(settings, {})
    return [processor.process(picture(height, width, seed)) for seed, (height, width) in enumerate(sizes)]


CASES = [("qwen", QWEN, maker.SMALL, i, *prompt) for i, prompt in enumerate(maker.QWEN_PROMPTS)]
CASES += [("gemma3", GEMMA3, maker.SCANNED, i, *prompt) for i, prompt in enumerate(maker.GEMMA_PROMPTS)]
CASES += [("gemma4", GEMMA4, GEMMA4_FILE, i, *prompt) for i, prompt in enumerate(maker.GEMMA4_PROMPTS)]
CASES += [("glm", GLM, maker.SMALL_GLM, i, *prompt) for i, prompt in enumerate(maker.GLM_PROMPTS)]
CASES += [("pixtral", PIXTRAL, maker.NARROW, i, *prompt) for i, prompt in enumerate(maker.PIXTRAL_PROMPTS)]


@pytest.mark.parametrize(("family", "form", "settings", "index", "sizes", "text"), CASES)
def test_a_text_with_images_has_the_reference_s_ids(family, form, settings, index, sizes, text):
    images = images_of(settings, sizes)
    expanded = expand_text(text, images, form, encode)
    assert list(expanded.token_ids) == golden()[f"ids_{family}_{index}"].tolist()
    own = [encode(token)[0] for token in (form.token, form.between) if token]
    covered = [i for span in expanded.spans for i in range(span.start, span.end)]
    assert covered == [i for i, token_id in enumerate(expanded.token_ids) if token_id in own]
    assert [span.digest for span in expanded.spans] == [part.digest for part in expanded.parts]
    assert len(set(covered)) == sum(image.num_tokens for image in images)


@pytest.mark.parametrize("index", range(len(maker.QWEN_PROMPTS)))
def test_positions_are_those_of_the_reference(index):
    sizes, text = maker.QWEN_PROMPTS[index]
    images = images_of(maker.SMALL, sizes)
    expanded = expand_text(text, images, QWEN, encode)
    placed = [
        PlacedImage(
            start=span.start, length=span.length, digest=span.digest, grid=part.grid, rope_grid=merged(part.grid)
        )
        for span, part in zip(expanded.spans, expanded.parts, strict=True)
    ]
    positions = rope_positions(placed, 0, len(expanded.token_ids))
    np.testing.assert_array_equal(positions, golden()[f"positions_{index}"])
    assert positions[:, -1].max() + 1 == len(expanded.token_ids) + rope_shift(placed, len(expanded.token_ids))


def merged(grid):
    return grid[0], grid[1] // 2, grid[2] // 2


def test_token_ids_are_expanded_as_their_text_is():
    sizes, text = maker.QWEN_PROMPTS[1]
    images = images_of(maker.SMALL, sizes)
    of_ids, of_text = expand_ids(encode(text), images, QWEN, encode), expand_text(text, images, QWEN, encode)
    assert list(of_ids.token_ids) == list(of_text.token_ids) and of_ids.spans == of_text.spans
    gemma = expand_ids(encode("a<start_of_image>b"), images_of(maker.SCANNED, [(50, 50)]), GEMMA3, encode)
    assert list(gemma.token_ids) == encode("a\n\n<start_of_image>" + 4 * "<image_soft_token>" + "<end_of_image>\n\nb")


def test_crops_are_parts_with_digests_of_their_own():
    (image,) = images_of(maker.SCANNED, [(300, 801)])
    parts = parts_of(image)
    assert len(parts) == image.grid[0] == 4 and len({part.digest for part in parts}) == 4
    np.testing.assert_array_equal(np.concatenate([part.patches for part in parts]), image.patches)
    assert {part.grid for part in parts} == {(1, 8, 8)} and {part.num_tokens for part in parts} == {4}


@pytest.mark.parametrize(
    ("text", "count", "said"),
    [
        ("no image", 1, r"0 placeholders <\|image_pad\|> and 1 image; write one for each"),
        ("<|image_pad|>", 0, r"1 placeholder <\|image_pad\|> and 0 images"),
        ("<|image_pad|><|image_pad|>", 2, r"runs of \[8\] tokens .* with a text or token between two"),
    ],
)
def test_placeholders_that_are_not_the_images_are_refused(text, count, said):
    images = images_of(maker.SMALL, [(64, 64)] * count)
    for expand, prompt in ((expand_text, text), (expand_ids, encode(text))):
        with pytest.raises(ValueError, match=said):
            expand(prompt, images, QWEN, encode)


def test_a_token_of_an_image_in_the_text_itself_is_refused():
    images = images_of(maker.SCANNED, [(50, 50)])
    with pytest.raises(ValueError, match=r"runs of \[1, 4\] tokens <image_soft_token>, and its images are \[4\]"):
        expand_text("<image_soft_token><start_of_image>", images, GEMMA3, encode)


@pytest.mark.parametrize("text", ["[IMG_BREAK] [IMG]", "[IMG_BREAK][IMG]", "[IMG][IMG_END] [IMG_BREAK]"])
def test_a_token_between_rows_in_the_text_itself_is_refused(text):
    with pytest.raises(ValueError, match=r"runs of \[.*\] tokens \[IMG\], and its images are \[11\]"):
        expand_text(text, images_of(maker.NARROW, [(90, 70)]), PIXTRAL, encode)


def test_a_tokenizer_without_the_token_is_refused():
    with pytest.raises(ValueError, match=r"the tokenizer has no token <\|image_pad\|>"):
        expand_text("<|image_pad|>", images_of(maker.SMALL, [(64, 64)]), QWEN, lambda text: [1, 2])


# As in scripts/make_video_goldens.py, which needs torch.
QWEN_TEXT = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>\n\nWhat is it?<|im_end|>\n"
GEMMA_TEXT = "<start_of_turn>user\n\n<|video|>\nWhat is it?<end_of_turn>\n"


@pytest.mark.parametrize(
    ("family", "form", "text", "case"),
    [("qwen", QWEN, wrapped_twice(QWEN_TEXT), "qwen3"), ("gemma4", GEMMA4, GEMMA_TEXT, "gemma4_long")],
)
def test_a_text_with_a_video_has_the_reference_s_ids(family, form, text, case):
    _, _, video = processed(case)
    expanded = expand_text(text, [], form, encode, [video])
    assert list(expanded.token_ids) == film_golden("frames")[f"ids_{family}"].tolist()
    assert expanded.parts == video.groups
    assert [span.digest for span in expanded.spans] == [group.digest for group in video.groups]
    (token,) = encode(form.video.token)
    covered = [i for span in expanded.spans for i in range(span.start, span.end)]
    assert covered == [i for i, token_id in enumerate(expanded.token_ids) if token_id == token]


def test_qwens_placeholder_of_a_video_takes_in_the_wrap_around_its_pad():
    _, _, video = processed("qwen3")
    alone = expand_text(
        QWEN_TEXT.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>"), [], QWEN, encode, [video]
    )
    assert expand_text(QWEN_TEXT, [], QWEN, encode, [video]) == alone
    assert expand_ids(encode(QWEN_TEXT), [], QWEN, encode, [video]) == alone
    assert len(alone.token_ids) == len(film_golden("frames")["ids_qwen"]) - 2


def test_token_ids_with_videos_are_expanded_as_their_text_is():
    _, _, video = processed("qwen3_two")
    image = processor_of(maker.SMALL, {}).process(np.zeros((64, 96, 3), np.uint8))
    text = "a<|video_pad|>b<|image_pad|>c<|video_pad|>"
    of_text = expand_text(text, [image], QWEN, encode, [video, video])
    of_ids = expand_ids(encode(text), [image], QWEN, encode, [video, video])
    assert list(of_ids.token_ids) == list(of_text.token_ids) and of_ids.spans == of_text.spans
    assert of_ids.parts == of_text.parts == (*video.groups, image, *video.groups)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a<|image_pad|>", "0 placeholders <|video_pad|> and 1 video; write one for each video"),
        ("<|video_pad|><|video_pad|>", "2 placeholders <|video_pad|> and 1 video"),
    ],
)
def test_as_many_placeholders_as_videos_are_wanted(text, said):
    _, _, video = processed("qwen3_two")
    image = processor_of(maker.SMALL, {}).process(np.zeros((64, 96, 3), np.uint8))
    with pytest.raises(ValueError, match=said.replace("|", r"\|")):
        expand_text(text, [image] * text.count("image"), QWEN, encode, [video])


@pytest.mark.parametrize(
    ("second", "qwen", "gemma4"), [(0.25, "<0.2 seconds>", "00:00 "), (3661.99, "<3662.0 seconds>", "61:01 ")]
)
def test_times_are_written_as_each_family_reads_them(second, qwen, gemma4):
    assert QWEN.video.stamp(second) == qwen and GEMMA4.video.stamp(second) == gemma4


@pytest.mark.parametrize("index", range(len(SHOWN["qwen3_vl"])))
def test_each_group_counts_as_an_image_among_rotary_positions(index, tmp_path):
    from ferrum_jax.inputs.images.prompt_images import PromptImages
    from ferrum_jax.inputs.images.sources import ImageSources
    from tests.support import GOLDENS

    folder = video_folder.write_folder(GOLDENS, tmp_path / "model", "qwen3_vl")
    tokenizer, shown = Tokenizer.load(folder), SHOWN["qwen3_vl"][index]
    videos = [{"frames": x, "fps": sizes[3]} for x, sizes in zip(films_of(shown), shown.films, strict=True)]
    expanded = PromptImages.of_folder(folder, ImageSources()).expanded(
        shown.recorded_for("qwen3_vl"),
        images_shown(shown),
        lambda text, adds: tokenizer.encode(text, add_special_tokens=adds),
        adds=False,
        videos=videos,
    )
    arrays = film_golden("qwen3_vl")
    assert list(expanded.token_ids) == arrays[f"ids_{index}"].tolist()
    placed = [
        PlacedImage(start=span.start, length=span.length, digest=b"-", grid=part.grid, rope_grid=merged(part.grid))
        for span, part in zip(expanded.spans, expanded.parts, strict=True)
    ]
    np.testing.assert_array_equal(rope_positions(placed, 0, len(expanded.token_ids)), arrays[f"rope_{index}"])
    assert all(part.grid[0] == 1 and dataclasses.is_dataclass(part) for part in expanded.parts)
