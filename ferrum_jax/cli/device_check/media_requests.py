"""Requests with images or sounds of a fixed seed, with which a model's own tower is checked.

What a medium is follows from the spec's tower: so many patches or frames, and the tokens that they become, among made
tokens of a text. No file and no library of pictures is needed. A model that transcribes is given windows of a made
sound as its own processor makes them, where its folder says how.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from ferrum_jax.config import EngineConfig
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.inputs.prompt import EncodableImage, MediaSpan
from ferrum_jax.io.ints import round_up
from ferrum_jax.llm import LLM
from ferrum_jax.models.families.registry import AnySpec
from ferrum_jax.models.spec import ModelSpec, SoundSpec, VisionSpec
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.task import EngineRequest
from ferrum_jax.tasks.transcription.heard_sound import HeardSound

_SQUARES = ((4, 6), (3, 3), (2, 7))  # rows and columns of tokens of images
_CHUNKS = (1, 2, 1)  # of sounds
_BEFORE, _BEHIND = 7, 5  # tokens of text around a medium
_SECONDS = 2.2  # windows of a sound that is transcribed
_ROOM = 64  # tokens of a text with its medium, beside those of the medium


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MadeMedium:
    """An image or a sound as a processor would make it. patches: float32 [patches, values of one]."""

    patches: np.ndarray
    grid: tuple[int, int, int]
    num_tokens: int
    digest: bytes
    kind: str
    seconds: float


def with_room(config: EngineConfig, spec: AnySpec) -> EngineConfig:
    """The config with room for the media of a model that sees or hears; unchanged for another."""
    if not isinstance(spec, ModelSpec) or not spec.towers:
        return config
    media = [medium for tower in spec.towers for medium in _media(tower, spec)]
    tokens, patches = max(each.num_tokens for each in media), max(len(each.patches) for each in media)
    longest = max(config.max_model_len or 0, round_up(tokens + _ROOM, 128))
    whole = round_up(tokens, 16) if any(tower.sees_both_ways for tower in spec.towers) else 0  # which one step computes
    return dataclasses.replace(
        config,
        max_model_len=min(longest, spec.max_position_embeddings),
        max_num_batched_tokens=max(config.max_num_batched_tokens, whole + (config.max_num_seqs or 0)),
        max_image_tokens=round_up(tokens, 16) * 2 * len(media),
        max_image_patches=2 * patches,
    )


def media_requests(llm: LLM, params: SamplingParams, *, salt: int = 0) -> list[EngineRequest]:
    """Requests that can run together; none for a model that reads text alone.

    salt: with another one media of the same values count as others, so that they are encoded again and hit nothing.
    """
    spec = llm.loaded.layout.spec
    found = _heard(llm, params) or _seen(spec, params)
    return [_request(number, *each, salt) for number, each in enumerate(found)]


def _request(
    number: int, ids: Sequence[int], start: int, medium: MadeMedium, params: SamplingParams, salt: int
) -> EngineRequest:
    own = dataclasses.replace(medium, digest=blake2b(medium.digest + bytes([salt])).digest())
    span = MediaSpan(kind=own.kind, digest=own.digest, start=start, length=max(own.num_tokens, 1))
    options = RequestOptions(media=[span], images=[own], key=str(number))
    return EngineRequest(ids, params, options)


_Request = tuple[Sequence[int], int, MadeMedium, SamplingParams]  # token ids, where the medium begins, itself, how


def _seen(spec: ModelSpec, params: SamplingParams) -> list[_Request]:
    """Media among made tokens, or beside them."""
    found = []
    media = (medium for tower in spec.towers for medium in _media(tower, spec))
    for number, medium in enumerate(media):
        before, behind = (_text(spec, count, number + count) for count in (_BEFORE + number, _BEHIND))
        start = 0 if spec.cross_layers else len(before)
        count = 0 if spec.cross_layers else medium.num_tokens
        found.append(([*before, *_text(spec, 1, 0) * count, *behind], start, medium, params))
    return found


def _text(spec: ModelSpec, count: int, first: int) -> list[int]:
    return [(7 * place + 13 * first) % min(200, spec.vocab_size - 6) + 6 for place in range(count)]


def _heard(llm: LLM, params: SamplingParams) -> list[_Request]:
    """The windows of a made sound beside their prompts, as its model transcribes them; none of another model."""
    transcriber = llm.model.opened.texts.transcriber
    if transcriber is None or not llm.loaded.layout.spec.cross_layers:
        return []
    rate, window = transcriber.processor.sampling_rate, transcriber.processor.window_samples
    waveform = _values(int(_SECONDS * window), 1)[:, 0] * np.float32(0.1)
    heard = HeardSound.of(transcriber, (waveform, rate), TranscriptionParams())
    found = []
    for window_of, request in zip(heard.windows, heard.requests, strict=True):
        how = dataclasses.replace(params, transcript=request.sampling.transcript)
        found.append((request.prompt["prompt_token_ids"], 0, _beside(window_of.clip), how))
    return found


def _beside(clip: EncodableImage) -> MadeMedium:
    same = {name: getattr(clip, name) for name in ("patches", "grid", "digest", "kind", "seconds")}
    return MadeMedium(num_tokens=0, **same)


def _media(tower: VisionSpec | SoundSpec, spec: ModelSpec) -> Iterator[MadeMedium]:
    """Media of several sizes, where the tower takes some."""
    frames, tokens = tower.chunk
    for number, (square, chunks) in enumerate(zip(_SQUARES, _CHUNKS, strict=True)):
        if isinstance(tower, VisionSpec):
            grid = tower.grid_of_all or (1, square[0] * tower.merge, square[1] * tower.merge)
            count = math.prod(grid) // frames + (grid[1] // tower.merge - 1 if tower.breaks_rows else 0)
        else:
            grid = tower.grid_of_all or (1, chunks * frames, 1)
            count = 0 if spec.cross_layers else chunks * tokens
        patches = _values(math.prod(grid), tower.patch_values, seed=number)
        yield MadeMedium(
            patches=patches,
            grid=grid,
            num_tokens=count,
            digest=blake2b(patches.tobytes()).digest(),
            kind="image" if isinstance(tower, VisionSpec) else "audio",
            seconds=0.0,
        )


def _values(count: int, width: int, *, seed: int = 0) -> np.ndarray:
    """float32 [count, width], within what processors give."""
    return np.random.default_rng(seed).uniform(-1, 1, (count, width)).astype(np.float32)
