"""A Mistral 3 that sees images, with a tokenizer of words and a processor as published folders have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    shutil.copytree(GOLDENS / "vision" / "mistral3_vision", folder)
    special = ("[IMG]", "[IMG_BREAK]", "[INST]", "[IMG_END]")
    words = {f"t{i}": i for i in range(150)} | {token: 150 + i for i, token in enumerate(special)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    whole = {"patch_size": 4, "spatial_merge_size": 2, "processor_class": "PixtralProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    return folder
