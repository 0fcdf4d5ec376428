"""Images as users give them: beside a prompt or in a chat's messages; the tower sees each picture once."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from ferrum_jax import LLM, SamplingParams
from tests.engine.golden_media import CONFIG
from tests.engine.image_folder import PLACE, picture, write_folder
from tests.support import small_llm

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("qwen3_vl") / "model")


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), CONFIG)


def test_an_image_beside_a_prompt_and_one_in_a_chat_are_the_same_and_encoded_once(llm, tmp_path):
    Image.fromarray(picture(1)).save(tmp_path / "picture.png")
    content = (tmp_path / "picture.png").read_bytes()
    text = f"t7 {PLACE} t9 t5"
    (first,) = llm.generate({"prompt": text, "images": [picture(1)]}, GREEDY)
    before = llm.stats()
    chat = [{"type": "text", "text": "t7 "}, {"type": "image", "image": content}, {"type": "text", "text": " t9"}]
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    by_url = {"type": "image_url", "image_url": {"url": url}}
    again = [
        llm.generate({"prompt": text, "images": [tmp_path / "picture.png"]}, GREEDY)[0],
        llm.generate({"prompt": text, "images": [Image.open(io.BytesIO(content))]}, GREEDY)[0],
        llm.generate({"prompt_token_ids": [7, 152, 150, 153, 9, 5], "images": [content]}, GREEDY)[0],
        llm.chat([{"role": "user", "content": chat}], GREEDY)[0],
        llm.chat([{"role": "user", "content": [chat[0], by_url, chat[2]]}], GREEDY)[0],
    ]
    after = llm.stats()
    assert first.prompt_token_ids == (7, 152, *[150] * 24, 153, 9, 5)  # 30 x 44 pixels become 8 x 12 patches
    for output in again:
        assert output.token_ids == first.token_ids and output.prompt_token_ids == first.prompt_token_ids
        assert output.num_cached_tokens == len(first.prompt_token_ids) and output.num_cached_media == 1
    assert after["images_encoded"] == before["images_encoded"] and after["encoder_calls"] == before["encoder_calls"]
    assert after["compiles_after_ready"] == 0


def test_another_picture_gives_another_answer_and_no_hit(llm):
    prompts = [{"prompt": f"t8 {PLACE} t9 t5", "images": [picture(seed)]} for seed in (2, 3)]
    first, other = llm.generate(prompts, GREEDY)
    assert first.token_ids != other.token_ids and other.num_cached_tokens == 0


def test_several_images_of_several_sizes_stand_in_their_order(llm):
    text = f"{PLACE} t9 {PLACE} t11 t12 {PLACE}"
    images = [picture(4), picture(5, 16, 8), picture(6, 24, 24)]
    (output,) = llm.generate({"prompt": text, "images": images}, GREEDY)
    (other,) = llm.generate({"prompt": text, "images": [images[0], images[2], images[1]]}, GREEDY)
    assert output.prompt_token_ids.count(150) == other.prompt_token_ids.count(150) == 24 + 2 + 9
    assert output.prompt_token_ids != other.prompt_token_ids


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"prompt": f"t7 {PLACE}", "images": []}, None),
        ({"prompt": "t7", "images": [picture(1)]}, "0 placeholders <|image_pad|> and 1 image"),
        ({"prompt": f"t7 {PLACE}", "images": [b"GIF89a"]}, "image 0: "),
        ({"prompt": f"t7 {PLACE}", "images": [Path("nowhere.png")]}, "image 0: the image 'nowhere.png' cannot be read"),
        ({"prompt": f"t7 {PLACE}", "images": ["/etc/passwd"]}, "image 0: the image's URL is '/etc/passwd'"),
        (
            {"prompt": f"t7 {PLACE}", "images": ["data:image/png;base64,%%"]},
            "image 0: .* is not base64",
        ),
        ({"prompt": f"t7 {PLACE}", "images": [3]}, "image 0: the image is a int"),
        ({"prompt": f"t7 {PLACE}", "images": "a.png"}, "images is a str"),
        ({"prompt": f"t7 {PLACE}", "images": [picture(1)], "media": []}, None),
    ],
)
def test_what_is_no_image_or_has_no_place_is_refused_by_its_number(llm, prompt, said):
    if said is None:
        assert llm.generate(prompt, GREEDY)
        return
    with pytest.raises(ValueError, match=said.replace("|", r"\|")):
        llm.generate(prompt, GREEDY)


def test_a_model_that_sees_nothing_refuses_images():
    with pytest.raises(ValueError, match="the prompt has 1 images, and this model takes none"):
        small_llm("qwen3").generate({"prompt_token_ids": [7, 8], "images": [picture(1)]}, GREEDY)
