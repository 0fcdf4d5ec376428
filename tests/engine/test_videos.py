"""Videos in prompts: the reference's tokens and logits, each group of frames encoded once and cached by content."""

import dataclasses

import numpy as np
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.core.scheduler.request_log import read_request_log
from ferrum_jax.inputs.images.prompt_images import PromptImages
from ferrum_jax.inputs.images.sources import ImageSources
from ferrum_jax.text.tokenizer import Tokenizer
from scripts.goldens import video_folder
from scripts.goldens.video_folder import FIRST_SPECIAL, SHOWN, film, films_of, images_of
from tests.marks import few
from tests.rows import rows_beside
from tests.support import GOLDENS, SMALL, small_llm
from tests.vision.test_video_processors import golden

CONFIG = dataclasses.replace(
    SMALL,
    max_model_len=512,
    max_num_batched_tokens=128,  # a frame of Gemma 4 is computed whole
    num_blocks=160,
    max_image_tokens=1024,
    max_image_patches=640,
    invariant=True,
)
BIAS = dict.fromkeys(range(FIRST_SPECIAL, FIRST_SPECIAL + 4), float("-inf"))
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logit_bias=BIAS)
FAMILIES = few(("qwen3_vl", "qwen3_5", "gemma4"))
_MADE: dict[tuple[str, bool], LLM] = {}


def llm_of(name: str, factory, *, caches: bool = True) -> LLM:
    if (name, caches) not in _MADE:
        folder = video_folder.write_folder(GOLDENS, factory.mktemp(name) / "model", name)
        _MADE[name, caches] = LLM(str(folder), dataclasses.replace(CONFIG, enable_prefix_caching=caches))
    return _MADE[name, caches]


def prompt_of(name: str, number: int) -> dict:
    shown = SHOWN[name][number]
    videos = [{"frames": x, "fps": sizes[3]} for x, sizes in zip(films_of(shown), shown.films, strict=True)]
    return {"prompt": shown.recorded_for(name), "images": images_of(shown), "videos": videos}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("caches", few([True, False]), ids=["cache", "no_cache"])
def test_tokens_and_logits_are_the_reference_s(name, caches, tmp_path_factory):
    llm, arrays = llm_of(name, tmp_path_factory, caches=caches), golden(name)
    params = dataclasses.replace(GREEDY, logprobs=20)
    prompts = [prompt_of(name, number) for number in range(len(SHOWN[name]))]
    for outputs in (llm.generate(prompts, params), llm.generate(prompts, params)):
        for number, output in enumerate(outputs):
            assert list(output.prompt_token_ids) == arrays[f"ids_{number}"].tolist()
            assert list(output.token_ids) == arrays[f"tokens_{number}"].tolist()
            logits = arrays[f"logits_{number}"].astype(np.float64)
            wanted = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            found = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
            for token, logprob in found.items():
                np.testing.assert_allclose(logprob, wanted[token], rtol=0, atol=2e-4)
            assert len(found) >= 20
    assert (outputs[0].num_cached_tokens > 0) == caches
    assert llm.stats()["compiles_after_ready"] == 0


def test_a_longer_cut_of_a_film_hits_what_it_shares(tmp_path_factory):
    llm = llm_of("qwen3_vl", tmp_path_factory)
    long = film(12, 16, 24, 77)  # no more pixels than all frames may have together
    text = f"{video_folder.Shown(text='VIDEO').text_for('qwen3_vl')} So?"

    def said(count: int):
        before = llm.stats()
        (output,) = llm.generate({"prompt": text, "videos": [{"frames": long[:count], "fps": 2.0}]}, GREEDY)
        after = llm.stats()
        assert after["images_encoded"] == before["images_encoded"]
        return output, after["video_groups_encoded"] - before["video_groups_encoded"]

    (short, of_short), (whole, of_whole) = said(8), said(12)
    assert (of_short, of_whole) == (4, 2)
    ids = list(zip(short.prompt_token_ids, whole.prompt_token_ids, strict=False))
    shared = next(i for i, (a, b) in enumerate(ids) if a != b)  # the short one's text goes on
    assert shared - CONFIG.block_size < whole.num_cached_tokens <= shared
    again, of_again = said(12)
    assert again.token_ids == whole.token_ids and again.num_cached_tokens == len(whole.prompt_token_ids)
    assert of_again == 0 and again.num_cached_media == 6


def test_another_film_hits_nothing_behind_its_first_token(tmp_path_factory):
    llm = llm_of("qwen3_vl", tmp_path_factory)
    text = "What happens here, and to whom? " + video_folder.Shown(text="VIDEO").text_for("qwen3_vl")
    one, other = (llm.generate({"prompt": text, "videos": [film(6, 24, 40, seed)]}, GREEDY)[0] for seed in (91, 92))
    start = one.prompt_token_ids.index(FIRST_SPECIAL + 1)
    assert other.num_cached_tokens <= start and one.token_ids != other.token_ids


def test_a_chat_has_videos_and_images_in_their_places(tmp_path_factory):
    llm = llm_of("qwen3_vl", tmp_path_factory)
    shown = SHOWN["qwen3_vl"][2]
    videos = [{"frames": x, "fps": sizes[3]} for x, sizes in zip(films_of(shown), shown.films, strict=True)]
    first, second = images_of(shown)
    parts = [
        {"type": "image", "image": first},
        {"type": "text", "text": " and "},
        {"type": "video", "video": videos[0]},
        {"type": "text", "text": "\nthen "},
        {"type": "video", "video": videos[1]},
        {"type": "text", "text": " "},
        {"type": "image", "image": second},
        {"type": "text", "text": "!"},
    ]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
    given = {"prompt": shown.text_for("qwen3_vl"), "images": [first, second], "videos": videos}
    (wanted,) = llm.generate(given, GREEDY)  # whose wraps are not doubled, as those of the golden are
    assert output.prompt_token_ids == wanted.prompt_token_ids and output.token_ids == wanted.token_ids
    assert len(wanted.prompt_token_ids) == len(golden("qwen3_vl")["ids_2"]) - 2 * len(videos)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *rows_beside(__file__)["what is no video or has no place is refused by its number"],
        (
            {"prompt": "VIDEO", "videos": [b"GIF89"]},
            "video 0: the video is not a file of a kind that is read here: MP4",
        ),
        ({"prompt": "VIDEO", "videos": [{"frames": film(4, 9, 9, 0), "fps": 0}]}, "video 0: the video's fps is 0"),
        ({"prompt": "VIDEO", "videos": [film(1, 9, 9, 0)]}, "video 0: the video has 1 frame; this model takes 2"),
        ({"prompt": "VIDEO", "videos": film(4, 9, 9, 0)}, "videos is a ndarray; it must be a list of videos"),
        ({"prompt": "a", "videos": [film(4, 9, 9, 0)]}, r"0 placeholders <\|video_pad\|> and 1 video"),
        (
            {
                "prompt": "VIDEO",
                "videos": [{"frames": film(400, 64, 64, 0), "fps": 2}],
                "images": [film(1, 900, 900, 0)[0]] * 17,
            },
            "tokens, and 512 fit",
        ),
        ({"prompt": "VIDEO", "videos": [[film(1, 9, 9, 0)[0], film(1, 9, 8, 0)[0]]]}, "frames of several sizes"),
    ],
)
def test_what_is_no_video_or_has_no_place_is_refused_by_its_number(given, said, tmp_path_factory):
    llm = llm_of("qwen3_vl", tmp_path_factory)
    prompt = {**given, "prompt": video_folder.Shown(text=given["prompt"]).text_for("qwen3_vl")}
    if "images" in given:
        prompt["prompt"] += video_folder.Shown(text="IMAGE").text_for("qwen3_vl") * len(given["images"])
    if said is None:
        assert llm.generate(prompt, GREEDY)
        return
    with pytest.raises(ValueError, match=said):
        llm.generate(prompt, GREEDY)


def test_models_that_take_no_videos_say_so(tmp_path):
    with pytest.raises(ValueError, match="the prompt has 1 videos, and this model takes none: it sees no images"):
        small_llm("qwen3").generate({"prompt_token_ids": [7, 8], "videos": [film(4, 9, 9, 0)]}, GREEDY)
    folder = video_folder.write_folder(GOLDENS, tmp_path / "model", "qwen3_vl")
    (folder / "video_preprocessor_config.json").unlink()
    llm = LLM(str(folder), CONFIG)
    text = video_folder.Shown(text="VIDEO").text_for("qwen3_vl")
    with pytest.raises(
        ValueError, match=r"takes none: .* its folder has no video_preprocessor_config\.json; give frames"
    ):
        llm.generate({"prompt": text, "videos": [film(4, 9, 9, 0)]}, GREEDY)


def test_a_setting_of_videos_that_is_not_honoured_is_an_error_of_videos_alone(tmp_path):
    folder = video_folder.write_folder(GOLDENS, tmp_path / "model", "qwen3_vl", some_new_key=3)
    how = PromptImages.of_folder(folder, ImageSources())
    tokenizer = Tokenizer.load(folder)
    assert how is not None and tokenizer is not None

    def expanded(**given):
        encode = lambda text, adds: tokenizer.encode(text, add_special_tokens=adds)  # noqa: E731
        return how.expanded(text, given.pop("images", ()), encode, adds=False, **given)

    text = video_folder.Shown(text="IMAGE").text_for("qwen3_vl")
    assert len(expanded(images=[film(1, 9, 9, 0)[0]]).parts) == 1
    text = video_folder.Shown(text="VIDEO").text_for("qwen3_vl")
    with pytest.raises(ValueError, match=r"takes none: .*some_new_key is 3, and no video is processed so here; give"):
        expanded(videos=[film(4, 9, 9, 0)])


@pytest.mark.slow
def test_a_request_log_has_each_group_of_a_video_as_an_image(tmp_path):
    folder = video_folder.write_folder(GOLDENS, tmp_path / "model", "qwen3_vl")
    llm = LLM(str(folder), dataclasses.replace(CONFIG, request_log=str(tmp_path / "log")))
    output = llm.generate(prompt_of("qwen3_vl", 2), GREEDY)[0]
    (segment,) = read_request_log(tmp_path / "log")
    (logged,) = segment.requests
    assert [image.length for image in logged.images] == [span.length for span in logged.media]
    assert len(logged.images) == 2 + 2 + 3 and all(image.grid[0] == 1 for image in logged.images)
    covered = {i for image in logged.images for i in range(image.start, image.end)}
    special = (FIRST_SPECIAL, FIRST_SPECIAL + 1)
    assert covered == {i for i, token in enumerate(output.prompt_token_ids) if token in special}
