"""Tiny checkpoints that see images and videos: a tokenizer of characters, processors' files, and prompts for them."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from scripts.goldens.pictures import picture

# By family, where its weights lie below tests/goldens.
WEIGHTS = {"qwen3_vl": "vision/qwen3_vl", "qwen3_5": "vision/qwen3_5_vision", "gemma4": "videos/gemma4"}
FIRST_SPECIAL = 150  # no token from here on is generated
_UNKNOWN, _FIRST = 5, 6
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
_QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
SOUND_TOKENS = ("<|audio_pad|>", "<asr_text>", "<|audio_start|>", "<|audio_end|>")
_GEMMA_TOKENS = ("<|image|>", "<|video|>", "<|image>", "<image|>")
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 64, "longest_edge": 2048},
    **_PATCHES,
    **_HALF,
}
QWEN_VIDEOS = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 256, "longest_edge": 6000},
    **_PATCHES,
    **_HALF,
}
GEMMA_IMAGES = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70}
GEMMA_VIDEOS = {"video_processor_type": "Gemma4VideoProcessor", "patch_size": 4, "num_frames": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """A prompt. text: with VIDEO and IMAGE. films: frames, height, width and frames a second. images: heights and
    widths."""

    text: str
    films: tuple[tuple[int, int, int, float], ...] = ()
    images: tuple[tuple[int, int], ...] = ()

    def text_for(self, name: str) -> str:
        """With the placeholders of a family, as its chat template writes them."""
        image, video, before, after = _GEMMA_TOKENS if name == "gemma4" else _QWEN_TOKENS
        around = ("", "") if name == "gemma4" else (before, after)
        return self.text.replace("IMAGE", image.join(around)).replace("VIDEO", video.join(around))

    def recorded_for(self, name: str) -> str:
        """The text that gives the ids of the goldens: transformers 5 leaves Qwen's wrap around a video's own."""
        return wrapped_twice(self.text_for(name))


def wrapped_twice(text: str) -> str:
    _, video, before, after = _QWEN_TOKENS
    return text.replace(f"{before}{video}{after}", f"{before}{before}{video}{after}{after}")


SHOWN = {
    "qwen3_vl": (
        Shown(text="VIDEO?", films=((2, 9, 17, 2.0),)),
        Shown(text="Look: VIDEO what?", films=((40, 17, 11, 2.0),)),
        Shown(
            text="IMAGE and VIDEO\nthen VIDEO IMAGE!",
            films=((7, 30, 21, 3.7), (25, 13, 50, 10.0)),
            images=((20, 30),) * 2,
        ),
        Shown(text="VIDEO VIDEO", films=((5, 40, 33, 29.97), (3, 16, 24, 1.0))),
    ),
    "gemma4": (
        Shown(text="VIDEO?", films=((2, 30, 47, 2.0),)),
        Shown(text="Look: VIDEO what?", films=((40, 37, 31, 0.5),)),
        Shown(text="IMAGE and VIDEO\nthen!", films=((7, 50, 21, 0.02),), images=((20, 30),)),
    ),
}
SHOWN["qwen3_5"] = SHOWN["qwen3_vl"][:3]


def film(count: int, height: int, width: int, seed: int) -> np.ndarray:
    """uint8 [count, height, width, 3]: a picture that moves by two pixels a frame; a longer one begins alike."""
    still = picture(height, width, seed)
    return np.stack([np.roll(still, 2 * index, axis=1) // (1 + index % 2) for index in range(count)])


def films_of(shown: Shown) -> list[np.ndarray]:
    return [film(*sizes[:3], seed) for seed, sizes in enumerate(shown.films)]


def images_of(shown: Shown) -> list[np.ndarray]:
    return [picture(*sizes, 10 + seed) for seed, sizes in enumerate(shown.images)]


def write_tokenizer(path: Path, name: str) -> None:
    """Each character is a token, and each placeholder."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    special = {"gemma4": _GEMMA_TOKENS, "qwen3_asr": SOUND_TOKENS}.get(name, _QWEN_TOKENS)
    words = {"<unk>": _UNKNOWN} | {character: _FIRST + i for i, character in enumerate(_CHARACTERS)}
    words |= {token: FIRST_SPECIAL + i for i, token in enumerate(special)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(path))


def write_folder(goldens: Path, folder: Path, name: str, **of_videos: Any) -> Path:
    """A family's weights, and what turns texts, pictures and films into prompts. of_videos: more of its processor."""
    shutil.copytree(goldens / WEIGHTS[name], folder)
    write_tokenizer(folder / "tokenizer.json", name)
    template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    for kind in ("image", "video"):
        place = Shown(text=kind.upper()).text_for(name)
        template += f"{{% if p.type == '{kind}' %}}{place}{{% endif %}}"
    template += "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    images, videos = (GEMMA_IMAGES, GEMMA_VIDEOS) if name == "gemma4" else (QWEN_IMAGES, QWEN_VIDEOS)
    if name == "gemma4":
        both = {"image_processor": images, "video_processor": videos | of_videos}
        (folder / "processor_config.json").write_text(json.dumps(both))
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(images))
        (folder / "video_preprocessor_config.json").write_text(json.dumps(videos | of_videos))
    return folder
