"""A tiny Gemma 3 that sees images, with a tokenizer of words, a chat template and a processor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.engine.image_folder import TEMPLATE, write_words
from tests.support import GOLDENS

PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 48, "width": 48},
    "image_seq_length": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_pan_and_scan": None,
}
_SPECIAL = ("<image_soft_token>", "<unused>", "<start_of_image>", "<end_of_image>")


def write_gemma3_folder(folder: Path) -> Path:
    """The golden's weights and what turns texts and pictures into prompts."""
    shutil.copytree(GOLDENS / "vision" / "gemma3_vision", folder)
    write_words(folder, _SPECIAL)
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder
