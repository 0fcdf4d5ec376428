"""Checkpoints that see images, with a tokenizer of words, a chat template and a processor; and pictures for them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.rows import rows_beside
from tests.support import GOLDENS

ROWS = rows_beside(__file__)

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}" + PLACE + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% if add_generation_prompt %} t5{% endif %}{% endfor %}"
)
PROCESSOR = ROWS["processor"]
GEMMA3_PROCESSOR = ROWS["gemma3 processor"]
MISTRAL3_PROCESSOR = ROWS["mistral3 processor"]
_QWEN = {"tokenizer_config.json": {"chat_template": TEMPLATE}, "preprocessor_config.json": PROCESSOR}
_GEMMA3 = {"tokenizer_config.json": {"chat_template": TEMPLATE.replace(PLACE, "<start_of_image>")}}
_MERGED = {"patch_size": 4, "spatial_merge_size": 2, "processor_class": "PixtralProcessor"}
# By golden: its special tokens, and the files that turn texts and pictures into prompts.
_FOLDERS = {
    "qwen3_vl": (("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"), _QWEN),
    "gemma3_vision": (
        ("<image_soft_token>", "<unused>", "<start_of_image>", "<end_of_image>"),
        _GEMMA3 | {"preprocessor_config.json": GEMMA3_PROCESSOR},
    ),
    "mistral3_vision": (  # without a template, as published folders are
        ("[IMG]", "[IMG_BREAK]", "[INST]", "[IMG_END]"),
        {"preprocessor_config.json": MISTRAL3_PROCESSOR, "processor_config.json": _MERGED},
    ),
}


def write_words(folder: Path, special: Sequence[str]) -> None:
    """A tokenizer of the words t0 to t149, and of special tokens behind them."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {f"t{i}": i for i in range(150)} | {token: 150 + i for i, token in enumerate(special)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_folder(folder: Path, golden: str = "qwen3_vl") -> Path:
    """The golden's weights and what turns texts and pictures into prompts."""
    special, files = _FOLDERS[golden]
    shutil.copytree(GOLDENS / "vision" / golden, folder)
    write_words(folder, special)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def picture(seed: int, height: int = 30, width: int = 44) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
