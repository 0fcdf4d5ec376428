"""Placeholders of videos become the reference's token ids, time stamps and all, and positions those of its M-RoPE."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ferrum_jax.inputs.images.placeholders import GEMMA4, QWEN, expand_ids, expand_text
from ferrum_jax.inputs.images.processor_files import processor_of
from ferrum_jax.inputs.prompt import PlacedImage, rope_positions
from ferrum_jax.text.tokenizer import Tokenizer
from scripts.goldens import video_folder
from scripts.goldens.video_folder import SHOWN, films_of, images_of, wrapped_twice
from scripts.make_image_goldens import SMALL
from tests.vision.test_processors import FOLDER
from tests.vision.test_video_processors import golden, processed

TOKENIZER = Tokenizer.load(FOLDER)
assert TOKENIZER is not None
# As in scripts/make_video_goldens.py, which needs torch.
QWEN_TEXT = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>\n\nWhat is it?<|im_end|>\n"
GEMMA_TEXT = "<start_of_turn>user\n\n<|video|>\nWhat is it?<end_of_turn>\n"


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("family", "form", "text", "case"),
    [("qwen", QWEN, wrapped_twice(QWEN_TEXT), "qwen3"), ("gemma4", GEMMA4, GEMMA_TEXT, "gemma4_long")],
)
def test_a_text_with_a_video_has_the_reference_s_ids(family, form, text, case):
    _, _, video = processed(case)
    expanded = expand_text(text, [], form, encode, [video])
    assert list(expanded.token_ids) == golden("frames")[f"ids_{family}"].tolist()
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
    assert len(alone.token_ids) == len(golden("frames")["ids_qwen"]) - 2


def test_token_ids_are_expanded_as_their_text_is():
    _, _, video = processed("qwen3_two")
    image = processor_of(SMALL, {}).process(np.zeros((64, 96, 3), np.uint8))
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
    image = processor_of(SMALL, {}).process(np.zeros((64, 96, 3), np.uint8))
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
        images_of(shown),
        lambda text, adds: tokenizer.encode(text, add_special_tokens=adds),
        adds=False,
        videos=videos,
    )
    arrays = golden("qwen3_vl")
    assert list(expanded.token_ids) == arrays[f"ids_{index}"].tolist()
    placed = [
        PlacedImage(start=span.start, length=span.length, digest=b"-", grid=part.grid, rope_grid=merged(part.grid))
        for span, part in zip(expanded.spans, expanded.parts, strict=True)
    ]
    np.testing.assert_array_equal(rope_positions(placed, 0, len(expanded.token_ids)), arrays[f"rope_{index}"])
    assert all(part.grid[0] == 1 and dataclasses.is_dataclass(part) for part in expanded.parts)


def merged(grid):
    return grid[0], grid[1] // 2, grid[2] // 2
