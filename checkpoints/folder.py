"""The files that stand beside the weights in every checkpoint folder, ours and Hugging Face's alike.

config.json describes the model and must be there; generation_config.json and the tokenizer's files are
optional and are carried along, byte for byte, when a checkpoint is converted.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER_FILES)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises ValueError naming the file when it is absent or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}; it must be an object")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file, {} when there is no such file. Raises ValueError when it is damaged."""
    return read_json(path) if path.exists() else {}


def tokenizer_files(folder: Path) -> tuple[str, ...]:
    """Names of the tokenizer's files that the folder has, in the order of TOKENIZER_FILES."""
    return tuple(name for name in TOKENIZER_FILES if (folder / name).is_file())


def has_chat_template(folder: Path) -> bool:
    """True when the folder brings a chat template, in a file of its own or inside tokenizer_config.json."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    return bool(read_optional_json(folder / "tokenizer_config.json").get("chat_template"))


def copy_companions(source: Path, target: Path) -> None:
    """Copies to `target` every companion file that `source` has. Raises ValueError without a config.json."""
    if not (source / "config.json").is_file():
        raise ValueError(
            f"{source} has no config.json; a checkpoint needs the model's configuration beside its weights"
        )
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
