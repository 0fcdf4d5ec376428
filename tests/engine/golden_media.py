"""Golden prompts with images and sounds, as processors make them, and engines that answer them."""

import dataclasses
import functools
import hashlib
import math
from typing import Any

import numpy as np

from ferrum_jax.config import EngineConfig
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.prompt import MediaSpan
from ferrum_jax.runtime.compile.compile import CompileCounter
from ferrum_jax.sampling_params import SamplingParams
from tests.models import sound_goldens
from tests.support import GOLDENS, SMALL, answers, finish, fresh_engine, small_llm

FOLDER = "vision/qwen3_vl"
HYBRID = "vision/qwen3_5_vision"  # whose recurrent states resume where a snapshot was taken
GLM = ("vision/glm4v", "vision/glm4v_moe")  # whose rotary sections stand one after the other
GEMMA3 = "vision/gemma3_vision"  # whose images are computed whole
GEMMA4 = "vision/gemma4_vision"  # whose images of any size see each other in windows alone
CAUSAL = "vision/gemma4_vision_causal"  # whose tokens see the past alone
MISTRAL3 = "vision/mistral3_vision"  # whose images have tokens of text between their rows
QWEN, VOXTRAL, BOTH = (f"hearing/{name}" for name in (sound_goldens.QWEN, sound_goldens.VOXTRAL, sound_goldens.GEMMA))
WHISPER = "hearing/whisper"  # whose one sound stands beside the prompt
PLACE, START, END = 150, 152, 153  # a token of media, and those before and after an image
LADDER = dataclasses.replace(SMALL, max_image_tokens=64, max_image_patches=256)
CONFIG = dataclasses.replace(LADDER, max_num_batched_tokens=64, invariant=True)  # one bucket
GREEDY = SamplingParams(
    max_tokens=64, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(range(PLACE, 154), float("-inf"))
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A golden folder. few_blocks: hold one of its prompts and not two. budget: tokens of a step that cuts prompts.

    encoded: sounds and images of its prompts. per_token: patches. breaks: whether a token of text stands between two
    rows of an image's tokens.
    """

    ladder: EngineConfig = LADDER
    config: EngineConfig = CONFIG
    few_blocks: int = 9
    budget: int = 7
    num_prompts: int = 3
    encoded: tuple[int, int] = (0, 4)
    per_token: int = 4
    breaks: bool = False


def _sized(ladder: EngineConfig = LADDER, **sizes: Any) -> dict[str, EngineConfig]:
    ladder = dataclasses.replace(ladder, **sizes)
    return {"ladder": ladder, "config": dataclasses.replace(ladder, max_num_batched_tokens=64, invariant=True)}


_GEMMA4 = dataclasses.replace(LADDER, max_num_batched_tokens=32, max_image_patches=90)
_BESIDE = dataclasses.replace(SMALL, max_model_len=128)
_HEARD = {**_sized(max_image_patches=500), "encoded": (3, 0)}
FAMILIES = dict.fromkeys((FOLDER, HYBRID, *GLM), Family()) | {
    GEMMA3: Family(**_sized(max_num_batched_tokens=32, max_image_patches=144), few_blocks=11, budget=20, per_token=9),
    **dict.fromkeys((GEMMA4, CAUSAL), Family(ladder=_GEMMA4, config=_GEMMA4, few_blocks=13, budget=16, per_token=9)),
    MISTRAL3: Family(breaks=True),
    **dict.fromkeys((QWEN, VOXTRAL), Family(**_HEARD)),
    BOTH: Family(
        **_sized(max_image_tokens=256, max_image_patches=1024, max_model_len=512),
        num_prompts=6,
        encoded=(7, 3),
        per_token=9,
    ),
    WHISPER: Family(ladder=_BESIDE, config=dataclasses.replace(_BESIDE, max_num_batched_tokens=64, invariant=True)),
}


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


def pictures_of(prompt: int, *, brighter: float = 0.0, folder: str = FOLDER) -> list[Picture]:
    """The images of a golden prompt. brighter: than the golden's, which makes others of them."""
    arrays, family, at, pictures = golden(folder), FAMILIES[folder], 0, []
    for t, h, w in arrays.get(f"grids_{prompt}", np.zeros((0, 3), int)).tolist():
        pixels = arrays[f"patches_{prompt}"][at : at + t * h * w] + np.float32(brighter)
        count = t * h * w // family.per_token + (h // math.isqrt(family.per_token) - 1) * family.breaks
        digest = hashlib.blake2b(pixels.tobytes()).digest()
        pictures.append(Picture(patches=pixels, grid=(t, h, w), num_tokens=count, digest=digest))
        at += t * h * w
    return pictures


def clip_beside(prompt: int) -> Picture:
    frames = golden(WHISPER)[f"frames_{prompt}"]
    sizes = {"grid": (1, len(frames), 1), "num_tokens": 0, "seconds": len(frames) / 100}
    return Picture(patches=frames, digest=hashlib.blake2b(frames).digest(), kind="audio", **sizes)


def asked(
    prompt: int, *, brighter: float = 0.0, louder: float = 0.0, folder: str = FOLDER, **options: Any
) -> tuple[list[int], SamplingParams, RequestOptions]:
    """A golden prompt, its parameters, and its images and sounds. brighter, louder: than the golden's."""
    ids = golden(folder)[f"prompt_{prompt}"].tolist()
    if folder == WHISPER:
        clip = clip_beside(prompt)
        span = MediaSpan(kind="audio", digest=clip.digest, start=0, length=1)
        params = dataclasses.replace(GREEDY, logit_bias=None)
        return ids, params, RequestOptions(media=[span], images=[clip], key=str(prompt), **options)
    waiting: dict[int, list[Any]] = {PLACE: pictures_of(prompt, brighter=brighter, folder=folder)}
    if folder in (QWEN, VOXTRAL, BOTH):
        sounds = sound_goldens.clips_of(prompt, louder=louder, name=folder.removeprefix("hearing/"))
        waiting = {PLACE: sounds, PLACE + 1: waiting[PLACE]}
    given, media, start = [], [], 0
    while start < len(ids):
        if not waiting.get(ids[start]):
            start += 1
            continue
        own = waiting[ids[start]].pop(0)
        given.append(own)
        kind = "audio" if own.kind == "audio" else "image"
        media.append(MediaSpan(kind=kind, digest=own.digest, start=start, length=own.num_tokens))
        start += own.num_tokens
    assert not any(waiting.values()), "each has its place"
    return ids, GREEDY, RequestOptions(media=media, images=given, key=str(prompt), **options)


def engine_of(config: EngineConfig | None = None, *, folder: str = FOLDER, **overrides: Any):
    return fresh_engine(small_llm(folder, config or FAMILIES[folder].config), **overrides)


def run(engine, *requests):
    """Outputs of requests that run together."""
    return answers(engine, requests)


def check_compiles_nothing(engine, requests) -> None:
    """Requests of media that nobody has seen run without a compile, and each item is encoded."""
    for number, (prompt, item, kind) in enumerate(requests):
        params = SamplingParams(max_tokens=2, temperature=0.0)
        span = MediaSpan(kind=kind, digest=item.digest, start=prompt.index(PLACE), length=item.num_tokens)
        engine.add(prompt, params, RequestOptions(media=[span], images=[item], key=str(number)))
    counter = CompileCounter()
    finish(engine)
    assert counter.count == 0 and engine.counts()[f"{kind}s_encoded".replace("audio", "sound")] == number + 1


def assert_golden(output, prompt: int, folder: str = FOLDER) -> None:
    assert list(output.token_ids) == golden(folder)[f"tokens_{prompt}"].tolist()


def assert_goldens(engine, prompts, folder: str = FOLDER) -> None:
    """Golden prompts that run together have the reference's tokens."""
    outputs = run(engine, *(asked(prompt, folder=folder) for prompt in prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_golden(output, prompt, folder)
