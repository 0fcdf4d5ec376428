"""A Mistral 3 that sees images, with a tokenizer of words and a processor as published folders have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.engine.image_folder import write_words
from tests.support import GOLDENS

PROCESSOR = {
    "image_processor_type": "PixtralImageProcessorFast",
    "processor_class": "PixtralProcessor",
    "do_pad": True,
    "patch_size": {"height": 4, "width": 4},
    "size": {"longest_edge": 48},
    "resample": 3,
}


def write_mistral3_folder(folder: Path) -> Path:
    """The golden's weights and what turns texts and pictures into prompts."""
    shutil.copytree(GOLDENS / "vision" / "mistral3_vision", folder)
    special = ("[IMG]", "[IMG_BREAK]", "[INST]", "[IMG_END]")
    write_words(folder, special)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    whole = {"patch_size": 4, "spatial_merge_size": 2, "processor_class": "PixtralProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    return folder
