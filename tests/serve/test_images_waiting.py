"""Images of a server's requests: texts never wait for them, nobody decodes for who has left, and pixels are bounded."""

import asyncio
import contextlib
import json
import threading

import pytest
import tokenizers
from PIL import Image
from tokenizers import AddedToken, models, pre_tokenizers

from ferrum_jax.inputs import prompt as prompt_module
from ferrum_jax.inputs.images import sources
from ferrum_jax.inputs.images.decoding import decoded_image
from ferrum_jax.inputs.images.placeholders import QWEN
from ferrum_jax.inputs.images.processor_files import read_processor
from ferrum_jax.inputs.images.prompt_images import PromptImages
from ferrum_jax.inputs.images.sources import ImageSources
from ferrum_jax.openai.asked import BodyLimits
from ferrum_jax.openai.bodies import asked_text
from ferrum_jax.serve.http import service as service_module
from ferrum_jax.serve.http.api_keys import OPEN
from ferrum_jax.serve.http.service import Service
from ferrum_jax.text.prompts import PromptEncoder
from ferrum_jax.text.tokenizer import Tokenizer
from scripts.goldens.pictures import picture
from tests.engine.image_folder import PROCESSOR
from tests.serve.own_link import OwnLink, asked, open_over, service_over
from tests.support import in_loop
from tests.vision.hostile import saved

FILES = [saved(Image.fromarray(picture(40, 60, seed)), "PNG") for seed in range(3)]
PROMPT = {"prompt": f"{QWEN.placeholder} x " * len(FILES), "images": FILES}
THREADS = service_module._IMAGE_THREADS


def words() -> Tokenizer:
    library = tokenizers.Tokenizer(models.WordLevel({"x": 0, QWEN.placeholder: 1}, unk_token="x"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    library.add_special_tokens([AddedToken(QWEN.placeholder, special=True)])
    return Tokenizer(library)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> PromptEncoder:
    folder = tmp_path_factory.mktemp("processor")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    processor = read_processor(folder)
    assert processor is not None
    images = PromptImages(processor=processor, folder=folder, sources=ImageSources())
    return PromptEncoder(tokenizer=words(), chat=None, images=images, max_model_len=1000)


@pytest.fixture
def decoding(monkeypatch):
    """(files whose decoding has begun, what lets them go on)"""
    begun: list[int] = []
    free = threading.Event()

    def held(content, **how):
        begun.append(len(content))
        assert free.wait(60)
        return decoded_image(content, **how)

    monkeypatch.setattr(sources.decoding, "decoded_image", held)
    return begun, free


def opened(prompts: PromptEncoder) -> Service:
    link = OwnLink()
    service = service_over(link)
    open_over(service, link, prompts, num_rows=1)
    return service


async def until(holds) -> None:
    for _ in range(10_000):
        if holds():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came to be")


@in_loop
async def test_texts_short_and_long_never_wait_for_images(prompts, decoding):
    begun, free = decoding
    service = opened(prompts)
    images = [asyncio.create_task(service.encode([PROMPT], OPEN)) for _ in range(THREADS + 3)]
    await until(lambda: len(begun) == THREADS)
    short, long = await service.encode(["x"], OPEN), await service.encode(["x " * 100_000], OPEN, times=999)
    assert len(begun) == THREADS, "no image went on meanwhile"
    free.set()
    assert (len(short[0].token_ids), len(long[0].token_ids)) == (1, 100_000)
    assert len(await asyncio.gather(*images)) == THREADS + 3


@in_loop
async def test_of_who_leaves_no_further_image_is_decoded(prompts, decoding):
    begun, free = decoding
    service = opened(prompts)
    leavers = [
        asyncio.create_task(service.enter(asked(PROMPT, max_tokens=5), OPEN, "request")) for _ in range(THREADS + 3)
    ]
    await until(lambda: len(begun) == THREADS)
    for leaver in leavers:
        leaver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaver
    free.set()
    await service.encode([PROMPT], OPEN)
    assert service.gate.num_waiting == 0
    assert len(begun) == THREADS + len(FILES), "the second images of who left, and all of who waited, were not decoded"


@in_loop
async def test_while_many_pixels_wait_for_the_engine_no_more_are_decoded(prompts, decoding, monkeypatch):
    begun, free = decoding
    free.set()
    monkeypatch.setattr(service_module, "MOST_HELD_BYTES", 1)
    service = opened(prompts)
    entered = [
        await service.enter(asked([7] * 3, max_tokens=5), OPEN, "text") for _ in range(2)
    ]  # all rows of the engine
    held = await service.enter(asked(PROMPT, max_tokens=5), OPEN, "images")
    assert service.gate.num_waiting == 1 and service._held_bytes > 0
    waiting = asyncio.create_task(service.enter(asked(PROMPT, max_tokens=5), OPEN, "more images"))
    await asyncio.sleep(0.05)
    assert len(begun) == len(FILES) and not waiting.done()
    service.leave(held)
    await waiting
    assert len(begun) == 2 * len(FILES)
    for requests in (*entered, waiting.result()):
        service.leave(requests)
    await asyncio.sleep(0.01)
    assert service._held_bytes == 0


@in_loop
async def test_a_prompt_of_a_body_is_taken_apart_once(prompts, monkeypatch):
    taken = []
    look = prompt_module._seen_in
    monkeypatch.setattr(prompt_module, "_seen_in", lambda content: taken.append(content) or look(content))
    service = opened(prompts)
    body = {"prompt": ["what is", "it"], "max_tokens": 5, "cache_salt": "a", "detokenize": False}
    requests = await service.enter(asked_text(body, BodyLimits(), is_chat=False), OPEN, "request")
    service.leave(requests)
    assert taken == ["what is", "it"]
