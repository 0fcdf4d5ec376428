"""Tiny models whose prompts have tokens for sounds: their configs, prompts, weights, and what the reference says."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from scripts import make_vision_goldens as pictures
from scripts.goldens.recipe import normal
from scripts.goldens.reference import greedy_row, is_steady
from scripts.goldens.sounds import sound

AUDIO, IMAGE, START, END = 150, 151, 152, 153
RATE = 16_000
CHUNK, CHUNK_TOKENS = 100, 13  # frames of Qwen's chunks, and the tokens of a whole one
NAMES = ("qwen3_asr", "voxtral", "gemma4_sound")
# A prompt is its sounds by their seconds, and how many tokens of text stand before, between and behind them.
_PROMPTS = (((), (9,)), ((3.3,), (5, 7)), ((1.5, 0.37), (3, 6, 8)))
# Likewise, where some are images by their rows and columns of patches.
_BESIDE_IMAGES = (
    *(((), (9,)), ((1.3,), (5, 7)), ((0.9, 0.37), (3, 6, 8))),
    *(((0.5, (6, 9)), (4, 3, 5)), (((3, 6), 0.41, (3, 3), 0.25), (3, 2, 4, 2, 6)), ((7.0,), (4, 6))),
)

# Likewise, with sounds by their windows.
_WINDOWS = (((), (9,)), ((2,), (5, 7)), ((1, 1), (3, 6, 8)))


class Asked(NamedTuple):
    """A prompt. seconds: of its sounds, `sound(seconds, number)`. lengths: their frames, which stand one behind the
    other, each with zeros to whole chunks. grids, patches: of its images."""

    prompt: np.ndarray
    seconds: np.ndarray
    lengths: np.ndarray
    frames: np.ndarray
    grids: np.ndarray = np.zeros((0, 3), np.int32)
    patches: np.ndarray = np.zeros((0, 48), np.float32)


def drawn(name: str, config: Any) -> list[Asked]:
    """Prompts with no, one and two sounds, and of Gemma 4 some with images beside them. config: of sounds."""
    if name == "gemma4_sound":
        rng, mels = np.random.default_rng(13), config.subsampling_conv_channels[0]
        extractor = transformers.Gemma4AudioFeatureExtractor(feature_size=mels)
        return [_drawn_beside_images(rng, extractor, *each) for each in _BESIDE_IMAGES]
    mels = config.num_mel_bins
    if name == "voxtral":
        rng, frames = np.random.default_rng(12), 2 * config.max_source_positions
        return [_drawn_windows(rng, (frames, mels), *each) for each in _WINDOWS]
    rng, extractor = np.random.default_rng(11), transformers.Qwen3ASRFeatureExtractor(feature_size=mels)
    return [_drawn(rng, extractor, *each) for each in _PROMPTS]


def _drawn(rng: np.random.Generator, extractor: Any, seconds: tuple[float, ...], texts: tuple[int, ...]) -> Asked:
    ids, frames = [rng.integers(6, AUDIO, texts[0])], [np.zeros((0, extractor.feature_size), np.float32)]
    lengths = []
    for number, (long, text) in enumerate(zip(seconds, texts[1:], strict=True)):
        how = {"padding": True, "truncation": False, "return_attention_mask": True, "return_tensors": "np"}
        made = extractor(sound(long, number), sampling_rate=RATE, **how)
        lengths.append(int(made["attention_mask"][0].sum()))
        frames.append(made["input_features"][0].T)
        ids += [[START], [AUDIO] * num_tokens(lengths[-1]), [END], rng.integers(6, AUDIO, text)]
    return Asked(
        np.concatenate(ids).astype(np.int32),
        np.array(seconds),
        np.array(lengths, np.int32),
        np.concatenate(frames).astype(np.float32),
    )


def _drawn_beside_images(
    rng: np.random.Generator, extractor: Any, media: tuple[Any, ...], texts: tuple[int, ...]
) -> Asked:
    """media: sounds by their seconds, images by their rows and columns."""
    ids, seconds, lengths, grids = [rng.integers(6, AUDIO, texts[0])], [], [], []
    frames, patches = [np.zeros((0, extractor.feature_size), np.float32)], [np.zeros((0, 48), np.float32)]
    for each, text in zip(media, texts[1:], strict=True):
        if isinstance(each, tuple):
            grids.append((1, *each))
            patches.append(rng.uniform(-1, 1, (math.prod(each), 48)).astype(np.float32))
            run = [IMAGE] * (math.prod(each) // 9)
        else:
            made = extractor([sound(each, len(seconds))], sampling_rate=RATE, return_tensors="np")
            own = made["input_features"][0][made["input_features_mask"][0]]
            seconds.append(each)
            lengths.append(len(own))
            frames.append(own)
            run = [AUDIO] * math.ceil(len(own) / 4)
        ids += [[START], run, [END], rng.integers(6, AUDIO, text)]
    return Asked(
        np.concatenate(ids).astype(np.int32),
        np.array(seconds),
        np.array(lengths, np.int32),
        np.concatenate(frames).astype(np.float32),
        np.array(grids, np.int32).reshape(-1, 3),
        np.concatenate(patches),
    )


def _drawn_windows(
    rng: np.random.Generator, shape: tuple[int, int], counts: tuple[int, ...], texts: tuple[int, ...]
) -> Asked:
    """shape: frames and mels of a window, where two frames make a position and two positions a token."""
    ids = [rng.integers(6, AUDIO, texts[0])]
    for count, text in zip(counts, texts[1:], strict=True):
        ids += [[START], [AUDIO] * (count * shape[0] // 4), [END], rng.integers(6, AUDIO, text)]
    frames = rng.normal(size=(sum(counts) * shape[0], shape[1])).astype(np.float32)
    lengths = np.array(counts, np.int32) * shape[0]
    return Asked(np.concatenate(ids).astype(np.int32), np.array(counts, np.float64), lengths, frames)


def num_tokens(length: int) -> int:
    """How many tokens a sound of so many frames has."""
    return length // CHUNK * CHUNK_TOKENS + math.ceil(length % CHUNK / 8)


def law(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """What a weight is drawn from, so that tokens vary and depend on the sound."""
    if name.endswith("language_model.norm.weight"):  # of either sign; otherwise a tied table would repeat every token
        return normal(0.0, 1.0)
    if ("norm" in name or "ln_post" in name) and name.endswith("weight"):
        return normal(1.0, 0.2)
    if name.endswith("bias"):
        return normal(0.0, 0.3)
    if "embed_" in name:
        return normal(0.0, 0.5)
    gain = 2.0 if "conv2d" in name else 1.5
    return normal(0.0, gain / math.sqrt(math.prod(shape[1:])))


def answers(model: Any, prompts: list[Asked]) -> dict[str, np.ndarray] | None:
    """What golden.npz holds; None for weights that leave too much to chance."""
    said = [each for asked in prompts if (each := greedy(model, asked)) is not None]
    if len(said) < len(prompts):
        return None
    whole = [
        asked._replace(prompt=np.concatenate((asked.prompt, each[0])))
        for asked, each in zip(prompts, said, strict=True)
    ]

    @torch.no_grad()
    def logits() -> torch.Tensor:
        return torch.cat([_logits(model, asked) for asked in whole]).double()

    if not is_steady(logits, model):
        return None
    arrays: dict[str, np.ndarray] = {}
    for i, (asked, (tokens, best)) in enumerate(zip(prompts, said, strict=True)):
        found = {**asked._asdict(), "tokens": tokens, "best": best, **_observed(model, asked)}
        arrays |= {f"{key}_{i}": value for key, value in found.items()}
    return arrays


def greedy(model: Any, asked: Asked) -> tuple[np.ndarray, np.ndarray] | None:
    """`greedy_row` of tokens of text."""
    return greedy_row(lambda ids: _logits(model, asked._replace(prompt=ids))[-1, :AUDIO], asked.prompt)


@torch.no_grad()
def _observed(model: Any, asked: Asked) -> dict[str, np.ndarray]:
    found = {"logits": _logits(model, asked).numpy()}
    if len(asked.lengths):
        heard = model.model.get_audio_features(**_sounds(model, asked), return_dict=True)
        found["tower"] = heard.pooler_output.numpy()
        if model.config.model_type == "gemma4":
            found["tower"] = found["tower"][heard.attention_mask.numpy()]
    return found


def _logits(model: Any, asked: Asked) -> torch.Tensor:  # [T, V]
    ids = torch.from_numpy(asked.prompt).long()[None]
    given = _sounds(model, asked) if len(asked.lengths) else {}
    given |= pictures.places(asked.grids, asked.patches) if len(asked.grids) else {}
    return model(input_ids=ids, **given, use_cache=False).logits[0]


def _sounds(model: Any, asked: Asked) -> dict[str, torch.Tensor]:
    """Sounds as the reference takes them: a row for each, padded to the longest; of Voxtral one for each window."""
    if hasattr(model.config.audio_config, "max_source_positions"):
        windows = asked.frames.reshape(-1, 2 * model.config.audio_config.max_source_positions, asked.frames.shape[1])
        return {"input_features": torch.from_numpy(np.ascontiguousarray(windows.swapaxes(1, 2)))}
    if model.config.model_type == "gemma4":
        features = np.zeros((len(asked.lengths), max(asked.lengths), asked.frames.shape[1]), np.float32)
        ends = np.cumsum(asked.lengths)
        for row, (length, end) in enumerate(zip(asked.lengths.tolist(), ends.tolist(), strict=True)):
            features[row, :length] = asked.frames[end - length : end]
        real = np.arange(features.shape[1])[None] < asked.lengths[:, None]
        return {"input_features": torch.from_numpy(features), "input_features_mask": torch.from_numpy(real)}
    padded = [-(-length // CHUNK) * CHUNK for length in asked.lengths.tolist()]
    features = np.zeros((len(padded), asked.frames.shape[1], max(padded)), np.float32)
    mask, at = np.zeros((len(padded), max(padded)), np.int64), 0
    for row, (length, count) in enumerate(zip(asked.lengths.tolist(), padded, strict=True)):
        features[row, :, :count] = asked.frames[at : at + count].T
        mask[row, :length] = 1
        at += count
    return {"input_features": torch.from_numpy(features), "input_features_mask": torch.from_numpy(mask)}
