"""A checkpoint that sees images, with a tokenizer of words, a chat template and a processor; and pictures for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.support import GOLDENS

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}" + PLACE + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% if add_generation_prompt %} t5{% endif %}{% endfor %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 2048},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_words(folder: Path, special: Sequence[str]) -> None:
    """A tokenizer of the words t0 to t149, and of special tokens behind them."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {f"t{i}": i for i in range(150)} | {token: 150 + i for i, token in enumerate(special)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_folder(folder: Path) -> Path:
    """The golden's weights and what turns texts and pictures into prompts."""
    shutil.copytree(GOLDENS / "vision" / "qwen3_vl", folder)
    special = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    write_words(folder, special)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def picture(seed: int, height: int = 30, width: int = 44) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
